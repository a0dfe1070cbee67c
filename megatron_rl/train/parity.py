"""The gate on every weight transfer: trainer and engine must give a fixed prompt the same log-probs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.data.pack import pack, unpack_per_token
from megatron_rl.data.types import TrainSample
from megatron_rl.reshard.verify import parity_bound, parity_report
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.train.batches import microbatch_multiple
from megatron_rl.train.context import RunContext


class ParityProbe:
    """One fixed token sequence, scored by both sides at temperature 1 after every transfer."""

    def __init__(
        self, run: RunContext, engine: RolloutEngine | None, *, token_ids: Sequence[int], bound: float | None
    ) -> None:
        self._run, self._engine = run, engine
        self._bound = parity_bound(run.recipe.model.dtype) if bound is None else bound
        self._sample = TrainSample(
            token_ids=token_ids, loss_mask=[True] * len(token_ids), sample_id="parity probe"
        )
        self._previous: list[float] | None = None

    def check(self, version: int) -> float:
        """Largest gap in nats. Raises ReshardError with a diagnosis when it exceeds the bound. Collective."""
        mine = self._trainer_logprobs()
        gap = 0.0
        if self._engine is not None:
            report = parity_report(
                mine,
                self._engine.score(self._sample.token_ids),
                self._bound,
                previous_logprobs=self._previous,
            )
            gap = report["max"]
            self._run.reporter.parity({"weight_version": version, "bound": self._bound, **report})
        self._previous = mine
        return self._run.from_driver(gap)

    def _trainer_logprobs(self) -> list[float]:
        layout = self._run.layout
        (batch,) = pack(
            [self._sample],
            tokens_per_microbatch=len(self._sample.token_ids) + layout.tp,
            pad_multiple=layout.tp if layout.sp else 1,
        )
        logprobs = self._run.policy.logprobs([batch] * microbatch_multiple(layout))[0]
        values: list[float] = unpack_per_token(batch, logprobs)[0].to(torch.float64).tolist()
        return values
