"""Weight transfers without an engine: members as threads or processes, and channels that do harm."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec
from megatron_rl.reshard.execute import connect_plan
from megatron_rl.reshard.plan import ReshardPlan
from megatron_rl.reshard.receive import WeightStream
from megatron_rl.reshard.tables import target_needs
from megatron_rl.reshard.transports import LOOPBACK, LocalHub, Membership, connect_in_process, open_store
from tests.helpers.forked import forkserver, inherit

CPU = torch.device("cpu")


def weights(spec: ModelSpec, version: int) -> dict[str, Tensor]:
    """Other values for every version."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in hf_tensors(spec).items()}


def run_threads(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Every member a thread of this process: what each returned, or the first exception."""
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(fn, rank, world_size, *args) for rank in range(world_size)]
        return [future.result(timeout=60) for future in futures]


def run_processes(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Every member a process: what each returned, or "killed". A member that raises fails the test."""
    context = forkserver()
    ends, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_report, args=(dict(os.environ), theirs, fn, rank, world_size, args), daemon=True
        )
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    deadline, results = time.monotonic() + timeout_s, []
    try:
        for rank, end in enumerate(ends):
            assert end.poll(max(0.0, deadline - time.monotonic())), f"member {rank} did not end in time"
            try:
                results.append(end.recv())
            except EOFError:
                results.append("killed")
    finally:
        for process in processes:
            process.kill()
            process.join()
    raised = [str(result) for result in results if isinstance(result, Exception)]
    assert not raised, raised
    return results


def _report(
    environment: dict[str, str],
    end: Any,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
) -> None:
    inherit(environment)
    torch.set_num_threads(1)
    try:
        end.send(fn(rank, world_size, *args))
    except Exception as error:
        end.send(type(error)(*error.args))


def member_of(plan: ReshardPlan, rank: int, port: int, timeout_s: float = 20.0) -> Membership:
    return Membership(
        rank=rank, num_trainers=plan.num_trainers, num_workers=plan.num_workers, host=LOOPBACK, port=port,
        timeout_s=timeout_s,
    )  # fmt: skip


def stream_of(plan: ReshardPlan, router: Any, dtype: torch.dtype) -> WeightStream:
    return WeightStream(plan, router, dtype=dtype, device=CPU, canary=True)


def join(plan: ReshardPlan, rank: int, meeting: int | LocalHub, kind: str, timeout_s: float = 20.0) -> Any:
    """The router of one member, over `kind`; `meeting` is a port, or for `local` the hub."""
    if isinstance(meeting, LocalHub):
        return connect_in_process(
            member_of(plan, rank, 0, timeout_s), meeting,
            receivers=sorted({message.receiver for message in plan.messages_from(rank)}),
            senders=sorted({message.sender for message in plan.messages_to(rank)}), device=CPU,
        )  # fmt: skip
    store = open_store(LOOPBACK, meeting, timeout_s=timeout_s) if rank == 0 else None
    return connect_plan(plan, member_of(plan, rank, meeting, timeout_s), kind=kind, store=store)  # type: ignore[arg-type]


def differences(plan: ReshardPlan, member: int, got: Sequence[tuple[str, Tensor]], version: int) -> list[str]:
    """What is wrong with the tensors that a worker was handed: names, values inside its need, NaN outside."""
    needs = target_needs(plan.spec, tp=plan.target_tp, rank=(member - plan.num_trainers) % plan.target_tp)
    expected = weights(plan.spec, version)
    wrong = [] if sorted(name for name, _ in got) == sorted(expected) else ["names"]
    for name, tensor in got:
        dim, start, length = needs[name]
        want = expected[name].to(tensor.dtype)
        if dim is not None:
            inside = torch.full_like(want, float("nan"))
            inside.narrow(dim, start, length).copy_(want.narrow(dim, start, length))
            want = inside
        if not torch.equal(tensor.nan_to_num(nan=1e6), want.nan_to_num(nan=1e6)):
            wrong.append(name)
    return wrong


class Tampered:
    """A router whose messages pass through `harm(number, buffer)` as they are sent, counted from 0.

    A message for which `harm` returns False is not sent.
    """

    def __init__(self, router: Any, harm: Callable[[int, Tensor], bool]) -> None:
        self._router, self._harm, self._number = router, harm, 0
        self._transports: dict[Any, _TamperedTransport] = {}
        self.member = router.member

    def to(self, peer: int) -> Any:
        transport = self._router.to(peer)
        return self._transports.setdefault(transport, _TamperedTransport(transport, self))

    def close(self) -> None:
        self._router.close()

    def pass_on(self, buffer: Tensor) -> bool:
        self._number += 1
        return self._harm(self._number - 1, buffer)


class _TamperedTransport:
    def __init__(self, transport: Any, router: Tampered) -> None:
        self._transport, self._router = transport, router

    def outbox(self, num_bytes: int, peers: Sequence[int]) -> Any:
        return _TamperedOutbox(self._transport.outbox(num_bytes, peers), self._router)


class _TamperedOutbox:
    def __init__(self, outbox: Any, router: Tampered) -> None:
        self._outbox, self._router = outbox, router
        self.slot, self.flush, self.rest = outbox.slot, outbox.flush, outbox.rest

    def send(self, parts: Sequence[tuple[Tensor, int]]) -> None:
        self._outbox.send([part for part in parts if self._router.pass_on(part[0])])


def flip_byte(of: int) -> Callable[[int, Tensor], bool]:
    """Damage message number `of`, beyond all that seals it."""

    def harm(number: int, buffer: Tensor) -> bool:
        if number == of:
            buffer[buffer.numel() // 3] ^= 1
        return True

    return harm
