"""One round of rollouts: prompts in, graded groups out, without waiting for the last where the recipe says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron_rl.data.types import Prompt, RolloutGroup
from megatron_rl.recipe.amounts import groups_waited_for, max_staleness, prompts_drawn
from megatron_rl.recipe.stages import RlStage
from megatron_rl.rollout.collect import Collector, Draw, Span
from megatron_rl.rollout.open_groups import OpenGroup
from megatron_rl.train.groups import Collected

# of the groups that a round did not wait for, and of those that were gone on with or were too old for it
_TALLIED = ("late_groups", "late_rollouts", "late_tokens", "continued_rollouts", "stale_groups")


class RoundSampler:
    """On the driving rank. `open` are groups that are gone on with in the next round."""

    def __init__(
        self,
        collector: Collector,
        stage: RlStage,
        token_ids: Mapping[str, Sequence[int]],
        *,
        draw: Callable[[int], Draw],
        versions: Callable[[], Sequence[int]],
        open_groups: Sequence[OpenGroup] = (),
    ) -> None:
        """`draw` says how to sample in an iteration, `versions` which weights were transferred, in order."""
        self.open: list[OpenGroup] = [*open_groups]
        self._collector, self._stage, self._token_ids = collector, stage, token_ids
        self._draw, self._versions = draw, versions

    def num_fresh(self, tally: Counter[str]) -> int:
        """Prompts to draw for the next round, beside the groups that are open."""
        self._drop_stale(tally)
        return prompts_drawn(self._stage) - len(self.open)

    def sample(
        self, prompts: Sequence[Prompt], iteration: int, span: Span, tally: Counter[str]
    ) -> list[RolloutGroup]:
        """Groups of `prompts`, or of as many as the recipe waits for, by the weights transferred last.

        What became of the others goes into `tally`.
        """
        draw, version = self._draw(iteration), self._versions()[-1]
        config = self._stage.stragglers
        if config is None:
            return self._collector.collect(prompts, self._token_ids, draw, weight_version=version, span=span)
        self._drop_stale(tally)
        drawn = {prompt.id for prompt in prompts}
        # a prompt is in a batch once: its rollouts are told apart by its id
        held = [group for group in self.open if group.prompt.id in drawn]
        continued = [group for group in self.open if group.prompt.id not in drawn]
        fresh = [
            OpenGroup(
                prompt=prompt, prompt_token_ids=self._token_ids[prompt.id], parts=(None,) * draw.samples
            )
            for prompt in prompts
        ]
        whole, late = self._collector.collect_first(
            [*continued, *fresh], draw, needed=groups_waited_for(config.groups, len(continued) + len(fresh)),
            weight_version=version, span=span,
        )  # fmt: skip
        self.open = [*held, *late] if self._stage.overlap == "partial" else []
        tally["late_groups"] += len(late)
        tally["late_rollouts"] += sum(len(group.unfinished) for group in late)
        tally["late_tokens"] += sum(group.num_tokens for group in late)
        tally["continued_rollouts"] += sum(len(group.unfinished) for group in continued)
        return whole

    def _drop_stale(self, tally: Counter[str]) -> None:
        """Groups that would be trained on with tokens older than the recipe allows."""
        versions, limit = self._versions(), max_staleness(self._stage)
        # what is made now is trained on after one more transfer
        newest = len(versions)
        kept = [g for g in self.open if g.oldest is None or newest - versions.index(g.oldest) <= limit]
        tally["stale_groups"] += len(self.open) - len(kept)
        self.open = kept


def with_stragglers(collected: Collected, tally: Mapping[str, int], stage: RlStage) -> Collected:
    """With the numbers of what was not waited for, where the recipe has `stragglers`."""
    if stage.stragglers is None:
        return collected
    numbers = {name: tally.get(name, 0) for name in _TALLIED}
    late = 0 if stage.overlap == "partial" else numbers["late_groups"]
    return replace(
        collected,
        metrics={**collected.metrics, **{f"stragglers/{name}": float(n) for name, n in numbers.items()}},
        counts={**collected.counts, "dropped_late": late, "dropped_stale": numbers["stale_groups"]},
    )
