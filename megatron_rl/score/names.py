"""Rewards that `score` can grade by. Without torch: the command line lists them."""

REWARD_NAMES = ("math_answer", "code_tests")  # each is a key of graders.GRADERS
