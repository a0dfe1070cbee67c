"""What becomes of the rollouts of an RL stage before the update, and when its curriculum moves on.

Fields of `recipe.stages.RlStage`; every one says its unit. A null switches it off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.recipe.types import Batch, Float, PositiveInt, Share

MAX_ROUNDS, BUFFER_TOKENS = 10, 4096  # DAPO's, where a recipe does not say
PARTIAL_STALENESS = 2  # transfers


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSamplingConfig:
    """Generate more prompts than are trained on, and train on those whose rollouts differ in the task's outcome.

    refill: further rounds of `generate_prompts` until `prompts_per_iteration` groups are left (DAPO, arXiv
    2503.14476: 3 times as many, at most 10 rounds). oversample: one round (Klear, arXiv 2508.07629: twice as many).
    Both train on the first `prompts_per_iteration` groups in the order they were drawn, or on what there is.
    """

    kind: Literal["refill", "oversample"]
    generate_prompts: Batch  # of each round, at least prompts_per_iteration
    max_rounds: PositiveInt = MAX_ROUNDS  # refill: rounds of one iteration, the first included


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongConfig:
    """What a response near or at `max_response_tokens` costs: a penalty, or the place in the loss; never both.

    penalty: DAPO's, added to the reward: 0 up to max_response_tokens - buffer_tokens, then falling linearly to -1 at
    max_response_tokens. filter: truncated responses are left out of the loss and of its divisor, and stay in the
    statistics of their group.
    """

    kind: Literal["penalty", "filter"]
    buffer_tokens: PositiveInt = BUFFER_TOKENS  # penalty: tokens before the limit over which it falls


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglersConfig:
    """An iteration does not wait for its longest responses: a round ends once `groups` of its groups are whole.

    The others are dropped and counted or, with `overlap: partial`, gone on with in the next round, by the weights of
    then and with the tokens they have. Groups are trained on whole. Which are late depends on the clock, so that such a
    run does not repeat itself bit for bit.
    """

    groups: Share  # of the groups of a round; below 1
    # partial: groups with tokens older than so many transfers, when they are trained on, are dropped; null: 2
    max_staleness: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromoteConfig:
    """When a curriculum window (a stage without windows: the stage) ends before its iterations are over.

    reward_plateau: the mean reward of the last `window` iterations is at most `threshold` above that of the `window`
    iterations before them. truncated_frac: over the last `window` iterations at least this share of the responses was
    truncated: the length limit binds, and a stage with a longer one should follow.
    """

    on: Literal["reward_plateau", "truncated_frac"]
    window: PositiveInt  # iterations
    threshold: Float  # of reward, or a share of responses
    min_iterations: PositiveInt = 1  # that every window lasts


@dataclass(frozen=True, kw_only=True, slots=True)
class RescoreConfig:
    """Before its first iteration the stage samples every prompt from the policy it begins with, and drops some.

    The pass rates are those that windows of `pass_rate` mean. POLARIS drops mean accuracies above 0.9.
    """

    samples: Batch = 8  # rollouts per prompt
    drop_above: Share = 0.9  # prompts with a mean accuracy above it: solved
    drop_below: Share = 0.0  # and below it: out of reach; 0 keeps all of them
