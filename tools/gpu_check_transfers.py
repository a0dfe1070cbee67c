"""Check on real GPUs what CPU tests cannot: transfers over CUDA IPC and NCCL, and the digest computed on a device.

Trainer ranks and engine workers are processes with a small random model; of every transfer two updates are compared
byte by byte and a third is timed. With one GPU both sides share it (CUDA IPC), with more NCCL connects them,
alone and beside IPC. No engine is started. Exit code 0: all passed; 1: something failed; 3: there is no GPU. A part of
gpu_check.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.hf_tables import padded_vocab, source_pieces
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.execute import WeightSender, connect_plan
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.plan import ReshardPlan, plan_reshard
from megatron_rl.reshard.receive import WeightStream
from megatron_rl.reshard.seal import device_digest
from megatron_rl.reshard.transports import LOOPBACK, Membership, TransportKind, open_store

NO_GPU, FAILED, PASSED = 3, 1, 0
TIMEOUT_S = 120.0
MIB = 2**20
TIMED = 3  # version of the update that is not compared


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One transfer: which devices trainer ranks and workers have, and what has to carry it."""

    name: str
    trainers: tuple[int, ...]
    workers: tuple[int, ...]
    target_tp: int = 1
    kind: TransportKind = "auto"
    two_tier: bool = False
    carriers: frozenset[str]  # kinds of transport that must come to use


def cases(num_gpus: int) -> Iterator[Case]:
    yield Case(name="one GPU, CUDA IPC", trainers=(0,), workers=(0,), carriers=frozenset({"shared"}))
    yield Case(name="one GPU, gloo", trainers=(0,), workers=(0,), kind="gloo", carriers=frozenset({"gloo"}))
    if num_gpus < 2:
        return
    half = 2 if num_gpus >= 4 else 1
    apart = tuple(range(half)), tuple(range(half, 2 * half))
    yield Case(
        name="own GPUs, NCCL", trainers=apart[0], workers=apart[1], target_tp=half, kind="nccl",
        carriers=frozenset({"nccl"}),
    )  # fmt: skip
    all_gpus = tuple(range(2 * half))
    yield Case(
        name="shared GPUs, CUDA IPC and NCCL", trainers=all_gpus, workers=all_gpus, target_tp=half,
        carriers=frozenset({"shared", "nccl"}),
    )  # fmt: skip
    if num_gpus >= 3:
        yield Case(
            name="two tiers, NCCL", trainers=(0,), workers=(1, 2), two_tier=True, carriers=frozenset({"nccl"})
        )


def plan_of(case: Case, layers: int, bucket_mib: int) -> ReshardPlan:
    spec = ModelSpec(
        family="qwen2", num_layers=layers, hidden_size=2048, ffn_size=5504, num_heads=16, num_kv_heads=4,
        head_dim=128, vocab_size=32000, max_positions=1024, rope_theta=1e4, norm_eps=1e-6, tied=False,
        qkv_bias=True, qk_norm=False,
    )  # fmt: skip
    # two tiers: as if workers were on another machine, which makes them pass on what they receive
    node = 1 if case.two_tier else 0
    placement = Placement(
        trainer_nodes=(0,) * len(case.trainers), worker_nodes=(node,) * len(case.workers),
        trainer_devices=case.trainers, worker_devices=case.workers,
    )  # fmt: skip
    return plan_reshard(
        spec, ParallelLayout(tp=len(case.trainers)), target_tp=case.target_tp,
        replicas=len(case.workers) // case.target_tp, element_bytes=2, placement=placement,
        bucket_bytes=bucket_mib * MIB, two_tier=case.two_tier,
    )  # fmt: skip


def weight(plan: ReshardPlan, name: str, version: int, device: torch.device) -> Tensor:
    """A HF tensor of float32 values that bfloat16 holds exactly; every process computes the same."""
    shape = plan.shapes[name]
    index = torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.int64)
    seed = sum(name.encode()) + 31 * version
    return ((index * 40503 + seed * 2654435) % 251 - 125).to(torch.float32).view(shape)


def trainer_params(
    plan: ReshardPlan, rank: int, version: int, device: torch.device
) -> list[dict[str, Tensor]]:
    """What a rank of a tensor-parallel layout holds; padding is NaN, so that a leak is seen."""
    pieces = source_pieces(plan.spec, plan.source, rank=rank)
    params: dict[str, Tensor] = {}
    for piece in pieces:
        tensor = weight(plan, piece.hf_name, version, device)
        if piece.param_dim is None or piece.hf_dim is None:
            params[piece.param] = tensor
            continue
        if piece.param not in params:
            shape = list(tensor.shape)
            shape[piece.param_dim] = max(p.param_start + p.length for p in pieces if p.param == piece.param)
            if "embedding" in piece.param or "output_layer" in piece.param:
                shape[0] = padded_vocab(plan.spec.vocab_size, plan.source.tp) // plan.source.tp
            params[piece.param] = torch.full(shape, float("nan"), device=device)
        place = params[piece.param].narrow(piece.param_dim, piece.param_start, piece.length)
        place.copy_(tensor.narrow(piece.hf_dim, piece.hf_start, piece.length))
    return [params]


def run_member(rank: int, case: Case, plan: ReshardPlan, port: int, pipe: Connection) -> None:
    """All updates of one member; sends back what went wrong, seconds of the timed one, carriers that it used."""
    try:
        devices = (*case.trainers, *case.workers)
        torch.cuda.set_device(devices[rank])
        pipe.send(_transfer(rank, case, plan, port, torch.device("cuda", devices[rank])))
    except Exception:  # the parent reports it
        pipe.send((traceback.format_exc(), 0.0, set()))


def _transfer(
    rank: int, case: Case, plan: ReshardPlan, port: int, device: torch.device
) -> tuple[str, float, set[str]]:
    member = Membership(
        rank=rank, num_trainers=plan.num_trainers, num_workers=plan.num_workers, host=LOOPBACK, port=port,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    store = open_store(LOOPBACK, port, timeout_s=TIMEOUT_S) if rank == 0 else None
    router = connect_plan(plan, member, kind=case.kind, store=store)
    peers = {m.receiver for m in plan.messages_from(rank)} | {m.sender for m in plan.messages_to(rank)}
    carriers = {router.to(peer).kind for peer in peers}
    seconds, wrong = 0.0, ""
    if rank < plan.num_trainers:
        sender = WeightSender(plan, router, dtype=torch.bfloat16)
        for version in (1, 2, TIMED):
            params = trainer_params(plan, rank, version, device)
            torch.cuda.synchronize()
            began = time.monotonic()
            sender.send(params, version=version)
            seconds = time.monotonic() - began
    else:
        stream = WeightStream(plan, router, dtype=torch.bfloat16, device=device, canary=True)
        wrong = ", ".join([*_differences(plan, rank, stream, 1), *_differences(plan, rank, stream, 2)][:3])
        for _ in stream.tensors(version=TIMED):
            pass
    router.close()
    return wrong, seconds, carriers


def _differences(plan: ReshardPlan, rank: int, stream: WeightStream, version: int) -> Iterator[str]:
    """Tensors of one update that are not as sent inside what this worker needs, and NaN outside."""
    needs = plan.needs[(rank - plan.num_trainers) % plan.target_tp]
    for name, tensor in stream.tensors(version=version):
        dim, start, length = needs[name]
        want, whole = torch.full_like(tensor, float("nan")), weight(plan, name, version, tensor.device)
        if dim is None:
            want.copy_(whole)
        else:
            want.narrow(dim, start, length).copy_(whole.narrow(dim, start, length))
        if not torch.equal(tensor.nan_to_num(nan=1e4), want.nan_to_num(nan=1e4)):
            yield f"{name} of update {version}"


def run_case(case: Case, plan: ReshardPlan) -> tuple[str, float]:
    """What went wrong (nothing: empty) and the seconds of the slowest sender."""
    from megatron_rl.train.launcher import held_port

    with held_port() as port:
        return _run_members(case, plan, port)


def _run_members(case: Case, plan: ReshardPlan, port: int) -> tuple[str, float]:
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[Any] = []
    for rank in range(plan.num_trainers + plan.num_workers):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_member, args=(rank, case, plan, port, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    problems, seconds = [], 0.0
    carriers: set[str] = set()
    for rank, pipe in enumerate(pipes):
        try:
            wrong, took, used = pipe.recv() if pipe.poll(3 * TIMEOUT_S) else ("silent", 0.0, set())
        except EOFError:
            wrong, took, used = "died", 0.0, set()
        seconds, carriers = max(seconds, took), carriers | used
        if wrong:
            problems.append(f"member {rank}: {wrong}")
    for process in processes:
        process.join(10.0)
        process.kill()
    if not problems and carriers != case.carriers:
        problems.append(f"carried by {sorted(carriers)}, expected {sorted(case.carriers)}")
    return "\n".join(problems), seconds


def check_digest() -> str:
    """The digest of a device must be that of the CPU, for payloads below, at and above its blocks."""
    for num_bytes in (8, 2**18, 2**18 + 8, 100 * 2**18 + 16):
        body = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        if not torch.equal(device_digest(body), device_digest(body.cuda()).cpu()):
            return f"{num_bytes} bytes have another digest on the GPU than on the CPU"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=int, default=8, help="of the model, 88 MB each (default: %(default)s)"
    )
    parser.add_argument("--bucket-mib", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "gpu_check: no CUDA GPU here, so nothing was checked; run it on a machine that has one",
            file=sys.stderr,
        )
        return NO_GPU
    count, card = torch.cuda.device_count(), torch.cuda.get_device_name()
    print(
        f"{count} x {card}, torch {torch.__version__}, CUDA {torch.version.cuda}, {datetime.now(tz=UTC):%Y-%m-%d}"
    )
    results = [{"name": "digest on the device", "problem": check_digest()}]
    _show(results[0])
    for case in cases(count):
        plan = plan_of(case, args.layers, args.bucket_mib)
        problem, seconds = run_case(case, plan)
        moved = plan.bytes_moved() / 1e9
        found = f"{moved:.2f} GB in {seconds:.3f} s = {moved / seconds:.1f} GB/s" if not problem else ""
        results.append({"name": case.name, "problem": problem, "found": found})
        _show(results[-1])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return FAILED if any(result["problem"] for result in results) else PASSED


def _show(result: dict[str, str]) -> None:
    verdict = "FAILED" if result["problem"] else "passed"
    print(f"{verdict}  {result['name']}: {result['problem'] or result.get('found', '')}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
