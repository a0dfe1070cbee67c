"""What is known of each token of a few rollouts of an iteration, for a person who reads them.

The engine's log-prob, this trainer's before the updates (old), and the one that the loss saw in the one update that
trained on the rollout. The ratio of that update is exp(logprob - old_logprob): 1 but for rounding in the first update
of an iteration, since nothing has moved yet. Nothing here changes a number of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_rl.algo.clipping import clip_flags
from megatron_rl.algo.surrogates import make_surrogate
from megatron_rl.data.pack import unpack_per_token
from megatron_rl.data.token_texts import TokenTexts
from megatron_rl.data.types import PackedBatch, Rollout, RolloutGroup
from megatron_rl.parallel.collectives import all_gather_object
from megatron_rl.recipe.stages import AlgorithmConfig
from megatron_rl.train.updates import Update

KEPT_TOKENS = 2048  # of a response; of a longer one the first and the last half of them
_DIGITS = 7

Watch = Callable[[PackedBatch, Tensor], None]


def choose(groups: Sequence[RolloutGroup], trained: Sequence[RolloutGroup], count: int) -> dict[str, Rollout]:
    """At most `count` rollouts by sample id, half of them of groups that are trained on; the same on every rank.

    Both halves are evenly spread. A prompt that was drawn twice is passed over: its samples share their ids.
    """
    named = _named(groups)
    times = Counter(name for name, _ in named)
    chosen = dict(_spread([one for one in _named(trained) if times[one[0]] == 1], (count + 1) // 2))
    rest = [one for one in named if times[one[0]] == 1 and one[0] not in chosen]
    chosen |= dict(_spread(rest, count - len(chosen)))
    # in the order in which the other file has them
    return {name: rollout for name, rollout in named if name in chosen}


def _named(groups: Sequence[RolloutGroup]) -> list[tuple[str, Rollout]]:
    return [(f"{group.prompt.id}/{each.sample_index}", each) for group in groups for each in group.rollouts]


def _spread(items: Sequence[tuple[str, Rollout]], count: int) -> list[tuple[str, Rollout]]:
    num = min(count, len(items))
    return [items[index * len(items) // num] for index in range(num)]


@dataclass(frozen=True, slots=True)
class TokenTraces:
    """Collects log-probs of the chosen rollouts while an iteration trains on them."""

    chosen: Mapping[str, Rollout]
    _seen: dict[str, Tensor] = field(default_factory=dict)

    def watch(self, update: Update) -> Watch | None:
        """What is told of each micro-batch of the update and its log-probs; None where none of it was chosen."""
        samples = update.samples
        if not any(samples[i].sample_id in self.chosen for batch in update.batches for i in batch.sample_index):
            return None

        def seen(batch: PackedBatch, logprobs: Tensor) -> None:
            for index, values in zip(batch.sample_index, unpack_per_token(batch, logprobs), strict=True):
                name = samples[index].sample_id
                if name in self.chosen:
                    # a copy on the device: waiting for it can wait
                    self._seen[name] = values.detach().clone()

        return seen

    def gather(self, updates: Sequence[Update], *, tp_rank: int, pp_rank: int) -> dict[str, dict[str, Any]]:
        """By sample id what all ranks know: `advantage`, `old_logprobs` and `logprobs` of the response. Collective."""
        mine: dict[str, dict[str, Any]] = {}
        # other tp ranks hold the same, other pp ranks copies of the old ones
        if tp_rank == 0:
            mine = {name: {"logprobs": self._of_response(name, values)} for name, values in self._seen.items()}
        for update in updates if tp_rank == 0 and pp_rank == 0 else ():
            for batch in update.batches:
                assert batch.rl is not None
                unpacked = unpack_per_token(batch, batch.rl.old_logprobs)
                for index, values in zip(batch.sample_index, unpacked, strict=True):
                    sample = update.samples[index]
                    if (name := sample.sample_id) in self.chosen:
                        known = mine.setdefault(name, {})
                        known["old_logprobs"] = self._of_response(name, values)
                        known["advantage"] = sample.advantage
        found: dict[str, dict[str, Any]] = {}
        for of_rank in all_gather_object(mine):
            for name, known in of_rank.items():
                found.setdefault(name, {}).update(known)
        return found

    def _of_response(self, name: str, values: Tensor) -> list[float]:
        """Of the labels of a sample those that the response is."""
        return values[values.numel() - len(self.chosen[name].completion.token_ids) :].tolist()

    def lines(
        self, found: Mapping[str, Mapping[str, Any]], texts: TokenTexts, algorithm: AlgorithmConfig
    ) -> list[dict[str, Any]]:
        """A line for each rollout, in order; one that was not trained on has the engine's log-probs alone."""
        config = make_surrogate(algorithm)
        lines = []
        for name, rollout in self.chosen.items():
            known = found.get(name, {})
            old, now = known.get("old_logprobs"), known.get("logprobs")
            clipped = None
            if old is not None and now is not None:
                ratios = [new - before for new, before in zip(now, old, strict=True)]
                clipped = clip_flags(config, ratios, known["advantage"])
            ids = list(rollout.completion.token_ids)
            cut = _Cut(len(ids))
            lines.append(
                {
                    "prompt_id": rollout.prompt.id,
                    "sample_index": rollout.sample_index,
                    "advantage": known.get("advantage"),
                    # [position, count] of what is not here; null: nothing
                    "left_out": cut.left_out,
                    "token_ids": cut.of(ids),
                    "tokens": texts.of(cut.of(ids)),
                    "rollout_logprobs": _rounded(cut.of(list(rollout.completion.logprobs))),
                    "old_logprobs": None if old is None else _rounded(cut.of(old)),
                    "logprobs": None if now is None else _rounded(cut.of(now)),
                    "clipped": None if clipped is None else cut.of(clipped),
                }
            )
        return lines


@dataclass(frozen=True, slots=True)
class _Cut:
    length: int

    @property
    def left_out(self) -> list[int] | None:
        return [KEPT_TOKENS // 2, self.length - KEPT_TOKENS] if self.length > KEPT_TOKENS else None

    def of(self, values: list[Any]) -> list[Any]:
        if self.length <= KEPT_TOKENS:
            return values
        return values[: KEPT_TOKENS // 2] + values[-(KEPT_TOKENS - KEPT_TOKENS // 2) :]


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values]
