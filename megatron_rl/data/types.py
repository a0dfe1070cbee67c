"""The data that crosses borders: from a prompt to a packed micro-batch.

Alignment, stated once: every per-token array of a `TrainSample` is aligned to the token itself.
`data.pack` shifts once (inputs drop the last token, labels and everything else drop the first), so every
per-token array of a `PackedBatch` is aligned to `labels`. Nothing else in the project shifts anything.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

Message = Mapping[str, str]  # {"role": ..., "content": ...}


class Finish(enum.Enum):
    """Why the engine stopped; taken from the engine, never guessed from the last token."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"

    def is_truncated(self) -> bool:
        return self is not Finish.STOP


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem to be solved by sampling."""

    id: str
    messages: Sequence[Message]
    answer: Any  # gold as the data set holds it; decoded by the reward
    data_source: str = ""
    difficulty: float | None = None  # larger is harder; None when the row carries none
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One engine output. `logprobs` are the processed ones of the sampling policy (temperature and top-p applied)."""

    token_ids: Sequence[int]  # R tokens, the end token included when the engine emitted it
    logprobs: Sequence[float]  # R natural-log probabilities
    finish: Finish
    weight_version: int  # of the weights that sampled its tokens; where several did, the oldest
    # (tokens, weight version) of consecutive tokens, where several versions sampled them; empty: weight_version did
    version_runs: Sequence[tuple[int, int]] = ()

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        """(tokens, weight version) of consecutive tokens, all of them."""
        return self.version_runs or ((len(self.token_ids), self.weight_version),)


class Verdict(enum.Enum):
    """What a grader says; a grader that failed is not a wrong answer."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TRUNCATED = "truncated"  # no answer because the engine cut the completion off
    BAD_GOLD = "bad_gold"
    TIMEOUT = "timeout"
    ERROR = "error"

    def is_correct(self) -> bool:
        return self is Verdict.CORRECT

    def is_usable(self) -> bool:
        """False where the verdict says nothing about the completion: such a rollout must not be trained on."""
        return self not in (Verdict.BAD_GOLD, Verdict.ERROR)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """Reward of one completion: `score` is the weighted sum of `parts`; `verdict` is the task grader's own."""

    score: float
    parts: Mapping[str, float]
    verdict: Verdict
    task_score: float  # the judge's own, 0 to 1, whatever `score` was made of it
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One sampled completion with its reward."""

    prompt: Prompt
    prompt_token_ids: Sequence[int]
    sample_index: int
    completion: Completion
    text: str
    reward: RewardResult


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """The G rollouts of one prompt: the unit that advantages need."""

    prompt: Prompt
    rollouts: Sequence[Rollout]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSample:
    """Prompt and response as token ids, ready to be packed. L tokens.

    Example: prompt of 2, response of 3 -> L = 5, loss_mask = [F, F, T, T, T].
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[bool]  # [L] True where this token is trained on
    rollout_logprobs: Sequence[float] | None = None  # [L] 0 where the mask is False; None for SFT
    advantage: float = 0.0
    is_positive: bool = False  # the task grader said correct
    sample_id: str = ""

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that carry loss; the first token of a sample has no label and never does."""
        return sum(self.loss_mask[1:])

    @property
    def packed_length(self) -> int:
        """Positions the sample takes in a `PackedBatch`: L - 1."""
        return len(self.token_ids) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RlFields:
    """Per-token RL quantities of a micro-batch, all [T] float32 and 0 where `loss_mask` is False."""

    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor
    positives: Tensor  # 1.0 on trained tokens of correct rollouts
    ref_logprobs: Tensor | None = None  # of the reference policy; None where the recipe has none
    correction: Tensor | None = None  # factor of the surrogate; None: 1

    def to(self, device: torch.device | str) -> RlFields:
        """The same with every tensor that is there on `device`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: one.to(device) for name, one in tensors.items() if one is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """One micro-batch of packed sequences on one data-parallel rank.

    T tokens in S sequences. Everything except `input_ids` is aligned to `labels`.
    Padding (to a multiple asked for by sequence parallelism) is one extra last sequence with an all-False mask.
    Example: samples of 4 and 3 tokens -> T = 3 + 2 = 5, cu_seqlens = [0, 3, 5].
    """

    input_ids: Tensor  # [T] int64
    labels: Tensor  # [T] int64, input_ids shifted by one inside each sequence
    position_ids: Tensor  # [T] int64, restarts at 0 per sequence
    cu_seqlens: Tensor  # [S + 1] int32
    loss_mask: Tensor  # [T] bool, True where the label is trained on
    sample_index: Sequence[
        int
    ] = ()  # position of each real sequence in the list that was packed; padding has none
    rl: RlFields | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.numel())

    @property
    def max_seqlen(self) -> int:
        return int((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).max())

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with every tensor on `device`."""
        return PackedBatch(
            input_ids=self.input_ids.to(device),
            labels=self.labels.to(device),
            position_ids=self.position_ids.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            loss_mask=self.loss_mask.to(device),
            sample_index=self.sample_index,
            rl=None if self.rl is None else self.rl.to(device),
        )
