"""Weights over real transports: every layout arrives whole, harm is noticed, and whoever fails is named."""

import os
import signal
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatron_rl.errors import ReshardError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.execute import WeightSender
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.plan import plan_reshard
from megatron_rl.reshard.transports import LOOPBACK, LocalHub, Membership, open_store
from megatron_rl.reshard.transports.gloo import GlooTransport
from megatron_rl.train.launcher import free_port, held_port
from tests.helpers.engine import rank_params
from tests.helpers.transfer import (
    Tampered,
    differences,
    flip_byte,
    join,
    run_processes,
    run_threads,
    stream_of,
    weights,
)

SPEC = ModelSpec(
    family="qwen3", num_layers=4, hidden_size=8, ffn_size=16, num_heads=4, num_kv_heads=1, head_dim=4,
    vocab_size=101, max_positions=64, rope_theta=1e4, norm_eps=1e-6, tied=True, qkv_bias=False, qk_norm=True,
)  # fmt: skip
ONE_ROW, SEVERAL, ALL = (
    136,
    3000,
    2**20,
)  # bytes of a bucket: one interval in each, about three tensors, one bucket
LAYOUTS = {
    "tp2pp2-tp2": (ParallelLayout(tp=2, pp=2), 2, 1, torch.float32),
    "tp4-tp2-bf16": (ParallelLayout(tp=4), 2, 1, torch.bfloat16),
    "pp2vpp2-2xtp1": (ParallelLayout(pp=2, vpp=2), 1, 2, torch.float32),
    "tp2dp2-tp4": (ParallelLayout(tp=2, dp=2), 4, 1, torch.float32),
    "tp2-2xtp2": (ParallelLayout(tp=2), 2, 2, torch.float32),
}


def plan_of(layout, target_tp, replicas, dtype, *, bucket_bytes=ALL, two_tier=False):
    trainers, workers = layout.world_size, target_tp * replicas
    placement = None
    if (
        two_tier
    ):  # trainers on one node, all engines on another: one worker receives, the others get it from there
        placement = Placement(
            trainer_nodes=(0,) * trainers, worker_nodes=(1,) * workers,
            trainer_devices=(None,) * trainers, worker_devices=(None,) * workers,
        )  # fmt: skip
    return plan_reshard(
        SPEC, layout, target_tp=target_tp, replicas=replicas, element_bytes=dtype.itemsize,
        placement=placement, bucket_bytes=bucket_bytes, two_tier=two_tier,
    )  # fmt: skip


def two_rounds(rank, world_size, plan, meeting, kind, dtype):
    """Two updates of one member; returns what is wrong with what it received."""
    router, wrong = join(plan, rank, meeting, kind), []
    if rank < plan.num_trainers:
        sender = WeightSender(plan, router, dtype=dtype)
        for version in (1, 2):
            sender.send(rank_params(SPEC, plan.source, rank, weights(SPEC, version)), version=version)
    else:
        stream = stream_of(plan, router, dtype)
        for version in (1, 2):
            wrong += differences(plan, rank, list(stream.tensors(version=version)), version)
    router.close()
    return wrong


def run_two_rounds(plan, kind, dtype):
    meeting = LocalHub() if kind == "local" else free_port()
    world = plan.num_trainers + plan.num_workers
    return run_threads(two_rounds, world, plan, meeting, kind, dtype) == [[]] * world


@pytest.mark.parametrize("kind", ["local", "gloo", "shared"])
@pytest.mark.parametrize("bucket_bytes", [ONE_ROW, SEVERAL, ALL], ids=["bucket-1", "bucket-3", "bucket-all"])
@pytest.mark.parametrize("name", ["tp2pp2-tp2", "pp2vpp2-2xtp1"])
def test_updates_arrive_whole_whatever_carries_them(name, bucket_bytes, kind):
    layout, target_tp, replicas, dtype = LAYOUTS[name]
    plan = plan_of(layout, target_tp, replicas, dtype, bucket_bytes=bucket_bytes)
    assert run_two_rounds(plan, kind, dtype)


@pytest.mark.parametrize("bucket_bytes", [SEVERAL, ALL], ids=["bucket-3", "bucket-all"])
@pytest.mark.parametrize("name", ["tp4-tp2-bf16", "tp2dp2-tp4", "tp2-2xtp2"])
def test_updates_arrive_whole_from_other_layouts(name, bucket_bytes):
    layout, target_tp, replicas, dtype = LAYOUTS[name]
    plan = plan_of(layout, target_tp, replicas, dtype, bucket_bytes=bucket_bytes)
    assert run_two_rounds(plan, "auto", dtype)


@pytest.mark.parametrize("kind", ["local", "gloo", "auto"])
@pytest.mark.parametrize("bucket_bytes", [ONE_ROW, SEVERAL, ALL], ids=["bucket-1", "bucket-3", "bucket-all"])
def test_workers_pass_on_what_their_node_received_once(bucket_bytes, kind):
    layout, target_tp, replicas, dtype = LAYOUTS["tp2-2xtp2"]
    plan = plan_of(layout, target_tp, replicas, dtype, bucket_bytes=bucket_bytes, two_tier=True)
    assert any(plan.messages_from(member) for member in range(2, 6))
    assert run_two_rounds(plan, kind, dtype)


@pytest.mark.parametrize("kind", ["gloo", "shared"])
def test_updates_arrive_whole_between_processes(kind):
    plan = plan_of(ParallelLayout(tp=2), 2, 1, torch.float32, bucket_bytes=SEVERAL)
    with held_port() as port:
        assert run_processes(two_rounds, 4, plan, port, kind, torch.float32) == [[]] * 4


def look_at_mappings(rank, world_size, plan, port):
    router = join(plan, rank, port, "shared")
    if rank == 0:
        WeightSender(plan, router, dtype=torch.float32).send(
            rank_params(SPEC, plan.source, rank, weights(SPEC, 1)), version=1
        )
        return None
    stream = stream_of(plan, router, torch.float32)
    list(stream.tensors(version=1))
    return Path("/proc/self/maps").read_text()


def test_shared_memory_has_no_name_that_could_be_left_behind():
    plan = plan_of(ParallelLayout(), 1, 1, torch.float32)
    with held_port() as port:
        mappings = run_processes(look_at_mappings, 2, plan, port)[1]
    assert "/memfd:weights (deleted)" in mappings
    assert "/dev/shm" not in mappings


def fail_then_recover(rank, world_size, plan, port, harm):
    """An update in which rank 0 does harm, then a clean one over the same channel.

    Of a worker: how many tensors it was handed before, the error, and what is wrong with the second update.
    """
    router = join(plan, rank, port, "auto", timeout_s=5.0)
    if rank < plan.num_trainers:
        params = rank_params(SPEC, plan.source, rank, weights(SPEC, 1))
        if rank == 0:
            WeightSender(plan, Tampered(router, harm), dtype=torch.float32).send(params, version=1)
        sender = WeightSender(plan, router, dtype=torch.float32)
        if rank:
            sender.send(params, version=1)
        sender.send(rank_params(SPEC, plan.source, rank, weights(SPEC, 2)), version=2)
        return None
    stream, got, error = stream_of(plan, router, torch.float32), [], None
    try:
        for item in stream.tensors(version=1):
            got.append(item)
    except ReshardError as raised:
        error = str(raised)
        stream.drain()
    return len(got), error, differences(plan, rank, list(stream.tensors(version=2)), 2)


def names_before(plan, bucket):
    return sum(len(plan.completes(earlier)) for earlier in range(bucket))


def test_a_damaged_message_stops_its_worker_before_its_bucket_is_loaded_and_leaves_the_channel_usable():
    plan = plan_of(ParallelLayout(tp=2), 1, 2, torch.float32, bucket_bytes=7000)
    assert plan.num_buckets >= 3
    bucket = [m.bucket for m in plan.messages_from(0)][1]
    outcomes = run_threads(fail_then_recover, 4, plan, free_port(), flip_byte(1))[2:]
    failed = [outcome for outcome in outcomes if outcome[1] is not None]
    assert failed
    for loaded, error, wrong in failed:
        assert "bytes from trainer rank 0 do not match their digest" in error
        assert loaded == names_before(plan, bucket)
        assert wrong == []
    assert all(outcome[2] == [] for outcome in outcomes)


def swap_tail(number, buffer):
    """Bytes of one interval in the place of another of the same size."""
    buffer[:64], buffer[64:128] = buffer[64:128].clone(), buffer[:64].clone()
    return True


def test_bytes_in_the_wrong_order_are_refused():
    plan = plan_of(ParallelLayout(), 1, 1, torch.float32)
    _, error, wrong = run_threads(fail_then_recover, 2, plan, free_port(), swap_tail)[1]
    assert "do not match their digest" in error
    assert wrong == []


class Reordering:
    """Sends the first two messages of equal size in each other's place."""

    def __init__(self):
        self.held = None

    def __call__(self, number, buffer):
        if self.held is not None and self.held.numel() == buffer.numel():
            buffer.copy_(self.held)
        self.held = buffer.clone()
        return True


def test_a_message_in_the_place_of_another_is_refused():
    plan = plan_of(ParallelLayout(), 1, 1, torch.float32, bucket_bytes=512)
    sizes = [m.bytes for m in plan.messages_from(0)]
    assert any(a == b for a, b in pairwise(sizes))
    _, error, wrong = run_threads(fail_then_recover, 2, plan, free_port(), Reordering())[1]
    assert "do not match their digest" in error
    assert wrong == []


def test_what_a_worker_could_not_verify_it_does_not_pass_on():
    plan = plan_of(ParallelLayout(tp=2), 2, 2, torch.float32, two_tier=True)
    outcomes = run_threads(fail_then_recover, 6, plan, free_port(), flip_byte(0))[2:]
    errors = [error for _, error, _ in outcomes if error is not None]
    assert any("from trainer rank 0 do not match their digest" in error for error in errors)
    assert any("engine worker" in error and "could not send its weights" in error for error in errors)
    assert all(wrong == [] for _, _, wrong in outcomes)


def send_old_version(rank, world_size, plan, port):
    router = join(plan, rank, port, "auto")
    if rank == 0:
        params = rank_params(SPEC, plan.source, 0, weights(SPEC, 1))
        return WeightSender(plan, router, dtype=torch.float32).send(params, version=1)
    stream = stream_of(plan, router, torch.float32)
    with pytest.raises(ReshardError) as error:
        next(stream.tensors(version=2))
    stream.drain()
    return str(error.value)


def test_weights_of_another_version_are_refused():
    plan = plan_of(ParallelLayout(), 1, 1, torch.float32)
    assert (
        "trainer rank 0 sent version 1, expected 2" in run_threads(send_old_version, 2, plan, free_port())[1]
    )


def follow_another_plan(rank, world_size, port):
    """The trainer's model has the same sizes and another head: messages are as long, but mean something else."""
    spec = SPEC
    if rank == 0:
        spec = ModelSpec(**{**{f: getattr(SPEC, f) for f in SPEC.__slots__}, "rope_theta": 2e4})
    plan = plan_reshard(spec, ParallelLayout(), target_tp=1, replicas=1, element_bytes=4)
    return send_old_version(rank, world_size, plan, port)


def test_the_bytes_of_another_plan_are_refused():
    assert "do not match their digest" in run_threads(follow_another_plan, 2, free_port())[1]


def lose_a_message(rank, world_size, plan, port, kind):
    router = join(plan, rank, port, kind, timeout_s=2.0)
    try:
        if rank == 0:
            drop_second = Tampered(router, lambda number, buffer: number != 1)
            params = rank_params(SPEC, plan.source, 0, weights(SPEC, 1))
            WeightSender(plan, drop_second, dtype=torch.float32).send(params, version=1)
        else:
            stream = stream_of(plan, router, torch.float32)
            try:
                list(stream.tensors(version=1))
            finally:
                stream.drain()
    except ReshardError as error:
        return str(error)
    finally:
        time.sleep(3.0)  # longer than the time-out: it is this that ends the others, not that we left
        router.close()
    return None


@pytest.mark.parametrize("kind", ["gloo", "shared"])
def test_a_message_that_is_not_sent_ends_its_receiver_in_time(kind):
    plan = plan_of(ParallelLayout(), 1, 1, torch.float32, bucket_bytes=7000)
    began = time.monotonic()
    error = run_threads(lose_a_message, 2, plan, free_port(), kind)[1]
    assert time.monotonic() - began < 20
    # shared memory says how large the next message is, sockets that fewer bytes came than expected or none
    assert "trainer rank 0" in error


def stop_reading(rank, world_size, plan, port, kind):
    """A worker that takes one tensor and then nothing more, but stays."""
    router = join(plan, rank, port, kind, timeout_s=1.5)
    if rank:
        stream = stream_of(plan, router, torch.float32)
        tensors = stream.tensors(version=1)
        next(tensors)
        time.sleep(4.0)
        return None
    params = rank_params(SPEC, plan.source, 0, weights(SPEC, 1))
    with pytest.raises(ReshardError) as error:
        WeightSender(plan, router, dtype=torch.float32).send(params, version=1)
    return str(error.value)


@pytest.mark.parametrize("kind", ["gloo", "shared"])
def test_a_worker_that_takes_nothing_more_is_named_after_the_time_out(kind):
    plan = plan_of(ParallelLayout(), 1, 1, torch.float32, bucket_bytes=SEVERAL)
    assert "engine worker 0" in run_threads(stop_reading, 2, plan, free_port(), kind)[0]


def read_slowly(rank, world_size, plan, port, kind):
    """A worker that looks at every tensor long after it got it, when its sender would be far ahead."""
    router = join(plan, rank, port, kind)
    if rank == 0:
        params = rank_params(SPEC, plan.source, 0, weights(SPEC, 1))
        WeightSender(plan, router, dtype=torch.float32).send(params, version=1)
        return []
    stream = stream_of(plan, router, torch.float32)
    stream._check = partial(_check_then_wait, stream._check)  # between the check of a bucket and its use
    return differences(plan, rank, list(stream.tensors(version=1)), 1)


def _check_then_wait(check, arrived, version):
    pieces = check(arrived, version)
    time.sleep(0.02)
    return pieces


@pytest.mark.parametrize("kind", ["gloo", "shared", "local"])
def test_no_buffer_is_filled_again_before_its_reader_is_done(kind):
    plan = plan_of(ParallelLayout(), 1, 1, torch.float32, bucket_bytes=SEVERAL)
    assert plan.num_buckets > 4
    meeting = LocalHub() if kind == "local" else free_port()
    assert run_threads(read_slowly, 2, plan, meeting, kind) == [[], []]


def die_in_the_middle(rank, world_size, plan, port, kind, victim, meeting):
    """Returns the error of a member that outlives the victim, and after how many seconds it came."""
    router = join(plan, rank, port, kind, timeout_s=150.0)
    (meeting / f"{rank} joined").touch()
    # whoever still joined would look for the store of a rank 0 that is gone, as long as that may take to start
    while len(list(meeting.iterdir())) < world_size:
        time.sleep(0.02)
    began = time.monotonic()

    def harm(number, buffer):
        if rank == victim and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    try:
        if rank < plan.num_trainers:
            params = rank_params(SPEC, plan.source, rank, weights(SPEC, 1))
            WeightSender(plan, Tampered(router, harm), dtype=torch.float32).send(params, version=1)
            return None
        stream = stream_of(plan, router, torch.float32)
        try:
            for number, _ in enumerate(stream.tensors(version=1)):
                harm(number - 3, None)
        except ReshardError:
            stream.drain()
            raise
        return None
    except ReshardError as error:
        return str(error), time.monotonic() - began
    finally:
        router.close()


@pytest.mark.parametrize("kind", ["gloo", "shared"])
@pytest.mark.parametrize(("victim", "name"), [(0, "trainer rank 0"), (3, "engine worker 1")])
def test_a_member_that_is_killed_ends_the_others_at_once(victim, name, kind, tmp_path):
    plan = plan_of(ParallelLayout(tp=2), 2, 1, torch.float32, bucket_bytes=SEVERAL)
    with held_port() as port:
        results = run_processes(die_in_the_middle, 4, plan, port, kind, victim, tmp_path)
    assert results.pop(victim) == "killed"
    errors = [result for result in results if result is not None]
    assert any(name in error for error, _ in errors)
    assert all(seconds < 60 for _, seconds in errors)  # members would wait 150 s for one that is silent


def outlive_the_sender(rank, world_size, plan, port, kind, has_left):
    """The sender leaves while the worker reads a bucket, so that the worker cannot even say that it has read it."""
    router = join(plan, rank, port, kind, timeout_s=5.0)
    if rank == 0:

        def leave(number, buffer):
            if number == 2:
                router.close()
                has_left.set()
            return True

        params = rank_params(SPEC, plan.source, rank, weights(SPEC, 1))
        with pytest.raises(ReshardError):
            WeightSender(plan, Tampered(router, leave), dtype=torch.float32).send(params, version=1)
        has_left.set()
        return None
    stream = stream_of(plan, router, torch.float32)
    tensors = stream.tensors(version=1)
    next(tensors)
    assert has_left.wait(20)
    with pytest.raises(ReshardError, match="trainer rank 0"):
        list(tensors)
    stream.drain()
    with pytest.raises(ReshardError, match="lost before"):
        next(stream.tensors(version=2))
    return "left"


@pytest.mark.parametrize("kind", ["gloo", "shared"])
def test_a_worker_whose_sender_leaves_while_it_reads_leaves_as_well(kind):
    plan = plan_of(ParallelLayout(), 1, 1, torch.float32, bucket_bytes=SEVERAL)
    assert run_threads(outlive_the_sender, 2, plan, free_port(), kind, threading.Event())[1] == "left"


def test_a_missing_or_misshapen_parameter_is_named_before_anything_is_sent():
    plan, hub = plan_of(ParallelLayout(), 1, 1, torch.float32), LocalHub()
    sender = WeightSender(plan, join(plan, 0, hub, "local"), dtype=torch.float32)
    (params,) = rank_params(SPEC, ParallelLayout(), 0, weights(SPEC, 1))
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    with pytest.raises(ReshardError, match=rf"layers\.3\.mlp\.down_proj.*{name}.*does not exist"):
        sender.send([{key: value for key, value in params.items() if key != name}], version=1)
    with pytest.raises(ReshardError, match=rf"layers\.3\.mlp\.down_proj.*{name}.*does not hold it"):
        sender.send([{**params, name: params[name][:, :3]}], version=1)
    assert hub.queues(0, 1)[0].empty()


def test_a_width_that_was_not_planned_is_refused():
    plan = plan_of(ParallelLayout(), 1, 1, torch.float32)
    with pytest.raises(ReshardError, match="bfloat16 has 2 bytes, the plan 4"):
        WeightSender(plan, join(plan, 0, LocalHub(), "local"), dtype=torch.bfloat16)


def test_a_member_that_never_joins_ends_the_others_in_time():
    port = free_port()
    store = open_store(LOOPBACK, port, timeout_s=1.0)
    member = Membership(rank=0, num_trainers=1, num_workers=1, host=LOOPBACK, port=port, timeout_s=1.0)
    with pytest.raises(ReshardError, match="trainer rank 0 could not join the group of 2"):
        GlooTransport(member, store)


def join_alone(rank, world_size, plan, port):
    if rank == 0:
        time.sleep(3.0)
        return None
    with pytest.raises(ReshardError) as error:
        join(plan, rank, port, "shared", timeout_s=1.0)
    return str(error.value)


def test_a_member_that_never_comes_is_named_where_memory_is_shared():
    plan, port = plan_of(ParallelLayout(), 1, 1, torch.float32), free_port()
    store = open_store(LOOPBACK, port, timeout_s=5.0)
    message = run_threads(join_alone, 2, plan, port)[1]
    assert "trainer rank 0 did not come to engine worker 0" in message
    del store


def test_a_busy_port_is_named():
    store = open_store(LOOPBACK, 0, timeout_s=1.0)
    with pytest.raises(ReshardError, match=f"cannot listen on 127.0.0.1:{store.port}"):
        open_store(LOOPBACK, store.port, timeout_s=1.0)
