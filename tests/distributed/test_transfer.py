"""Bytes over real gloo groups: every layout arrives whole, and whoever fails or stays away is named."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_rl.errors import ReshardError
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.execute import full_tensors, receive_weights, send_weights, unpack
from megatron_rl.reshard.plan import plan_reshard
from megatron_rl.reshard.tables import target_needs
from megatron_rl.reshard.transports import LOOPBACK, make_group, open_store
from tests.helpers.distributed import free_port, run_distributed
from tests.helpers.engine import rank_params

SPEC = ModelSpec(
    family="qwen3", num_layers=4, hidden_size=8, ffn_size=16, num_heads=4, num_kv_heads=1, head_dim=4,
    vocab_size=101, max_positions=64, rope_theta=1e4, norm_eps=1e-6, tied=True, qkv_bias=False, qk_norm=True,
)  # fmt: skip


def weights(version):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in hf_tensors(SPEC).items()}


def run_threads(fn, world_size, *args):
    """Every member a thread of this process: the same sockets as between processes, without their start."""
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(fn, rank, world_size, *args) for rank in range(world_size)]
        return [future.result(timeout=60) for future in futures]


def join(rank, world_size, port, timeout_s=20.0):
    store = open_store(LOOPBACK, port, timeout_s=timeout_s) if rank == 0 else None
    return make_group(LOOPBACK, port, rank, world_size, timeout_s, store=store)


def wrong_tensors(plan, worker, payloads, dtype, version):
    parts = unpack(plan, worker, payloads, dtype=dtype)
    expected, wrong = weights(version), []
    needs = target_needs(SPEC, tp=plan.target_tp, rank=worker % plan.target_tp)
    for name, tensor in full_tensors(plan, parts, dtype=dtype, canary=True):
        dim, start, length = needs[name]
        want = expected[name].to(dtype)
        if dim is not None:
            tensor, want = tensor.narrow(dim, start, length), want.narrow(dim, start, length)
        if not torch.equal(tensor, want):
            wrong.append(name)
    return wrong


def two_rounds(rank, world_size, port, layout, target_tp, replicas, dtype):
    plan = plan_reshard(SPEC, layout, target_tp=target_tp, replicas=replicas, element_bytes=dtype.itemsize)
    group, trainers, wrong = join(rank, world_size, port), layout.world_size, []
    for version in (1, 2):
        if rank < trainers:
            params = rank_params(SPEC, layout, rank, weights(version))
            send_weights(plan, rank, params, group, dtype=dtype, version=version)
        else:
            payloads = receive_weights(plan, rank - trainers, group, version=version)
            wrong += wrong_tensors(plan, rank - trainers, payloads, dtype, version)
    return wrong


@pytest.mark.parametrize(
    ("layout", "target_tp", "replicas", "dtype"),
    [
        (ParallelLayout(tp=2, pp=2), 2, 1, torch.float32),
        (ParallelLayout(tp=4), 2, 1, torch.bfloat16),
        (ParallelLayout(pp=2, vpp=2), 1, 2, torch.float32),
        (ParallelLayout(tp=2, dp=2), 4, 1, torch.float32),
    ],
    ids=["tp2pp2-tp2", "tp4-tp2-bf16", "pp2vpp2-2xtp1", "tp2dp2-tp4"],
)
def test_two_updates_arrive_whole_from_any_layout(layout, target_tp, replicas, dtype):
    world = layout.world_size + target_tp * replicas
    assert run_threads(two_rounds, world, free_port(), layout, target_tp, replicas, dtype) == [[]] * world


def test_two_updates_arrive_whole_between_processes():
    args = (free_port(), ParallelLayout(tp=2), 1, 1, torch.float32)
    assert run_distributed(two_rounds, 3, *args) == [[]] * 3


def send_old_version(rank, world_size, port):
    plan = plan_reshard(SPEC, ParallelLayout(), target_tp=1, replicas=1, element_bytes=4)
    group = join(rank, world_size, port)
    if rank == 0:
        params = rank_params(SPEC, ParallelLayout(), 0, weights(1))
        send_weights(plan, 0, params, group, dtype=torch.float32, version=1)
        return None
    with pytest.raises(ReshardError) as error:
        receive_weights(plan, 0, group, version=2)
    return str(error.value)


def test_weights_of_another_version_are_refused():
    assert "trainer rank 0 sent version 1, expected 2" in run_threads(send_old_version, 2, free_port())[1]


def wait_for_silent_trainer(rank, world_size, port):
    plan = plan_reshard(SPEC, ParallelLayout(), target_tp=1, replicas=1, element_bytes=4)
    group = join(rank, world_size, port, timeout_s=2.0)
    if rank == 0:
        time.sleep(6.0)
        return None
    with pytest.raises(ReshardError) as error:
        receive_weights(plan, 0, group, version=1)
    return str(error.value)


def test_a_trainer_rank_that_never_sends_is_named_after_the_time_out():
    message = run_threads(wait_for_silent_trainer, 2, free_port())[1]
    assert "rank 1 receiving from rank 0" in message
    assert "within 2 s" in message


def test_a_member_that_never_joins_ends_the_others_in_time():
    port = free_port()
    store = open_store(LOOPBACK, port, timeout_s=1.0)
    with pytest.raises(ReshardError, match="rank 0 of 2 could not join"):
        make_group(LOOPBACK, port, 0, 2, 1.0, store=store)


def test_a_busy_port_is_named():
    store = open_store(LOOPBACK, 0, timeout_s=1.0)
    with pytest.raises(ReshardError, match=f"cannot listen on 127.0.0.1:{store.port}"):
        open_store(LOOPBACK, store.port, timeout_s=1.0)
