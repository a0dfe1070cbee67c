"""What the trainer ranks do together while a gap is looked into: the driver asks, the other ranks serve.

One order at a time is broadcast, so that the driver can decide freely what to try next and no rank waits for a
collective that the others never enter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.data.pack import pack_microbatch, unpack_per_token
from megatron_rl.data.types import PackedBatch, TrainSample
from megatron_rl.errors import ReshardError
from megatron_rl.model.what_if import Change, changed
from megatron_rl.parallel.collectives import broadcast_object
from megatron_rl.train.batches import microbatch_multiple
from megatron_rl.train.policy import Policy

Sequences = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Log-probs of `sequences` under `change`; with `push` the engine gets the changed weights first."""

    sequences: Sequences
    change: Change | None = None
    push: bool = False
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsTrial:
    """Whole rows of log-probs: of the tokens `positions` of the one `sequence`."""

    sequence: Sequence[int]
    positions: Sequence[int]
    temperature: float = 1.0


class Trials:
    """Collective over all trainer ranks: the driver calls `logprobs` and `rows`, then `close`; the others `serve`.

    `push` sends the weights as they are at that moment to every engine, and raises ReshardError on all ranks or on
    none.
    """

    def __init__(
        self, policy: Policy, push: Callable[[], object], *, group: dist.ProcessGroup | None
    ) -> None:
        self._policy, self._push, self._group = policy, push, group

    def logprobs(self, trial: Trial) -> list[list[float]]:
        """Of each sequence the log-probs of its tokens from the second on. Raises ReshardError when a push fails."""
        result: list[list[float]] = self._order(trial)
        return result

    def rows(self, trial: RowsTrial) -> Tensor:
        """[N, V] float32 on the host."""
        result: Tensor = self._order(trial)
        return result

    def close(self) -> None:
        """Let the other ranks go on."""
        self._order(None)

    def serve(self) -> None:
        """Take part in whatever the driver asks, until it closes."""
        while (order := broadcast_object(None, src=0, group=self._group)) is not None:
            # all ranks failed alike, and the driver says what it means
            with suppress(ReshardError):
                self._perform(order)

    def _order(self, order: Any) -> Any:
        broadcast_object(order, src=0, group=self._group)
        return None if order is None else self._perform(order)

    def _perform(self, order: Trial | RowsTrial) -> Any:
        policy = self._policy
        if isinstance(order, RowsTrial):
            places = [position - 1 for position in order.positions]  # labels are shifted by one
            rows = policy.logprob_rows(
                probe_batches(policy, [order.sequence]), places, temperature=order.temperature
            )
            return rows.cpu()
        with changed(order.change, policy.chunks, policy.spec):
            if order.push:
                self._push()
            return sequence_logprobs(policy, order.sequences, temperature=order.temperature)


def sequence_logprobs(policy: Policy, sequences: Sequences, *, temperature: float = 1.0) -> list[list[float]]:
    """Of each sequence the log-probs of its tokens from the second on. Collective; the same on every rank."""
    batches = probe_batches(policy, sequences)
    values = policy.logprobs(batches, temperature=temperature)[0]
    return [part.to(torch.float64).tolist() for part in unpack_per_token(batches[0], values)]


def probe_batches(policy: Policy, sequences: Sequences) -> list[PackedBatch]:
    """One micro-batch of all `sequences`, as often as the pipeline wants it."""
    layout = policy.layout
    samples = [
        TrainSample(token_ids=ids, loss_mask=[True] * len(ids), sample_id=f"parity probe {number}")
        for number, ids in enumerate(sequences)
    ]
    batch = pack_microbatch(samples, range(len(samples)), pad_multiple=layout.tp if layout.sp else 1)
    return [batch] * microbatch_multiple(layout)
