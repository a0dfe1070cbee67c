"""Rewards that `score` can grade by. Without torch: the command line lists them."""

REWARD_NAMES = ("math_answer",)  # each is a key of graders.GRADERS
