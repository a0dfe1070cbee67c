"""What an engine of `bench_reshard.py` does: real vLLM, and in its workers each way to receive weights."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from bench_reshard_source import (
    DTYPE,
    TIMEOUT_S,
    WEIGHTS,
    chunk_bytes,
    forget_peak,
    member_of,
    serve,
    status_bytes,
    whole_chunks,
)
from safetensors import safe_open
from torch import Tensor

from megatron_rl.reshard.execute import connect_plan
from megatron_rl.reshard.plan import ReshardPlan, plan_from_inputs
from megatron_rl.reshard.seal import sealed_bytes
from megatron_rl.reshard.transports import LOOPBACK
from megatron_rl.reshard.transports.gloo import GlooTransport
from megatron_rl.reshard.transports.rendezvous import join_store
from megatron_rl.reshard.transports.staged import aligned, cut


def run_engine(plan: ReshardPlan, model: Path, log: Path, pipe: Connection) -> None:
    """Start vLLM, then serve the coordinator until it says `end`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from megatron_rl.rollout.vllm_worker import build_llm

    llm = build_llm(
        {
            "hf_path": str(model), "dtype": "bfloat16", "tp": plan.target_tp, "seed": 0, "threads": 1,
            "max_model_len": 64, "max_positions": 64, "max_concurrent": 2, "kv_cache_gib": 1,
            "gpu_memory_fraction": 0.5,
            "devices": None, "hf_overrides": {}, "vllm": {}, "sleep": False,
        }
    )  # fmt: skip

    def on_workers(step: Any) -> Any:
        return lambda argument: llm.collective_rpc(step, args=(plan.inputs(), plan.digest(), argument))

    def join(argument: Any) -> None:
        kind, port = argument
        llm.init_weight_transfer_engine(
            {
                "init_info": {
                    "host": LOOPBACK, "port": port, "timeout_s": TIMEOUT_S, "first_worker": 0, "plan": plan.inputs(),
                    "plan_digest": plan.digest(), "transport": kind, "canary": False,
                }
            }
        )  # fmt: skip
        check()
        llm.collective_rpc(keep_stream, args=(kind,))

    def receive_plan(argument: Any) -> None:
        kind, version = argument
        llm.collective_rpc(use_stream, args=(kind,))
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": version}})
        llm.finish_weight_update()
        check()

    def check() -> None:
        errors = [error for error in llm.collective_rpc(outcome) if error]
        if errors:
            raise RuntimeError("; ".join(errors))

    serve(
        pipe,
        {
            "join": join,
            "plan": receive_plan,
            "join_raw": on_workers(join_raw),
            "raw": on_workers(receive_raw),
            "join_whole": on_workers(join_whole),
            "whole": on_workers(receive_whole),
            "read": on_workers(read_own),
            "load": on_workers(load_own),
            "forget_peak": lambda _: llm.collective_rpc(forget_peak_of),
            "peak": lambda _: llm.collective_rpc(peak_of),
            "cpu": lambda _: llm.collective_rpc(cpu_of),
        },
    )


def outcome(worker: Any) -> str | None:
    text: str | None = worker.weight_transfer_engine.outcome()
    return text


def forget_peak_of(worker: Any) -> int:
    return forget_peak()


def peak_of(worker: Any) -> int:
    return status_bytes("VmHWM")


def cpu_of(worker: Any) -> float:
    return time.process_time()


def keep_stream(worker: Any, kind: str) -> None:
    """Several groups at once: the engine has one, so each is put aside under its kind."""
    engine = worker.weight_transfer_engine
    vars(worker).setdefault("bench_streams", {})[kind] = (engine._router, engine._stream)
    engine._router = engine._stream = None


def use_stream(worker: Any, kind: str) -> None:
    worker.weight_transfer_engine._stream = worker.bench_streams[kind][1]


def join_raw(worker: Any, inputs: Any, digest: str, port: int) -> None:
    plan = plan_from_inputs(inputs, digest=digest)
    member = member_of(plan, plan.num_trainers + worker.rank, port)
    worker.bench_raw_router = connect_plan(plan, member, kind="gloo")
    by_bucket = defaultdict(list)
    for message in plan.messages_to(member.rank):
        by_bucket[message.bucket].append((sealed_bytes(message.bytes), message.sender))
    worker.bench_raw = [by_bucket[bucket] for bucket in sorted(by_bucket)]
    size = max(sum(aligned(n) for n, _ in parts) for parts in worker.bench_raw)
    senders = sorted({sender for parts in worker.bench_raw for _, sender in parts})
    worker.bench_raw_inbox = worker.bench_raw_router.to(senders[0]).inbox(size, senders)


def receive_raw(worker: Any, inputs: Any, digest: str, _: Any) -> None:
    """Two buckets posted ahead, nothing done with what comes."""
    inbox, buckets = worker.bench_raw_inbox, worker.bench_raw
    for parts in buckets[:2]:
        inbox.post(parts)
    for index in range(len(buckets)):
        inbox.wait()
        inbox.release()
        if index + 2 < len(buckets):
            inbox.post(buckets[index + 2])


def join_whole(worker: Any, inputs: Any, digest: str, port: int) -> None:
    plan = plan_from_inputs(inputs, digest=digest)
    member = member_of(plan, plan.num_trainers + worker.rank, port)
    worker.bench_gloo = GlooTransport(member, join_store(member))
    worker.bench_chunks = whole_chunks(plan)
    worker.bench_inbox = worker.bench_gloo.inbox(max(map(chunk_bytes, worker.bench_chunks)), [0])


def receive_whole(worker: Any, inputs: Any, digest: str, _: Any) -> None:
    """Whole tensors from rank 0, given to the loader where they arrived."""
    chunks, inbox = worker.bench_chunks, worker.bench_inbox

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for chunk in chunks[:2]:
            inbox.post([(chunk_bytes(chunk), 0)])
        for index, chunk in enumerate(chunks):
            (slot,) = inbox.wait()
            views = cut(slot, [prod(shape) * DTYPE.itemsize for _, shape in chunk])
            for (name, shape), view in zip(chunk, views, strict=True):
                yield name, view.view(DTYPE).view(shape)
            inbox.release()
            if index + 2 < len(chunks):
                inbox.post([(chunk_bytes(chunks[index + 2]), 0)])

    _reload(worker, plan_from_inputs(inputs, digest=digest), tensors())


def read_own(worker: Any, inputs: Any, digest: str, model: str) -> None:
    """Have every tensor whole in memory, or with an empty path forget them."""
    worker.bench_own = []
    if model:
        with safe_open(f"{model}/{WEIGHTS}", framework="pt") as tensors:
            worker.bench_own = [
                (name, tensors.get_tensor(name).clone())
                for name in plan_from_inputs(inputs, digest=digest).shapes
            ]


def load_own(worker: Any, inputs: Any, digest: str, _: Any) -> float:
    """vLLM's own load of tensors that are there already; seconds."""
    plan = plan_from_inputs(inputs, digest=digest)
    began = time.monotonic()
    _reload(worker, plan, worker.bench_own)
    return time.monotonic() - began


def _reload(worker: Any, plan: ReshardPlan, tensors: Any) -> None:
    from megatron_rl.rollout.weight_receiver import reload_model

    engine = worker.weight_transfer_engine
    with torch.no_grad():
        reload_model(
            engine.model, tensors, model_config=engine.model_config, names=plan.shapes, is_tied=plan.spec.tied
        )
