"""Which transport carries what, by placement alone: the choice per pair, and NCCL groups without shared GPUs."""

import sys
from itertools import product

import pytest

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.transports.nccl import lane_of, nccl_lanes
from megatron_rl.reshard.transports.router import choose_kind
from tests.helpers.source import ROOT


def placement(trainers, workers):
    """From (node, device) of each."""
    return Placement(
        trainer_nodes=tuple(n for n, _ in trainers), worker_nodes=tuple(n for n, _ in workers),
        trainer_devices=tuple(d for _, d in trainers), worker_devices=tuple(d for _, d in workers),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "worker", "kind"),
    [
        ((0, None), (0, None), "shared"),
        ((0, None), (1, None), "gloo"),
        ((0, 3), (0, 3), "shared"),
        ((0, 3), (0, 4), "nccl"),
        ((0, 3), (1, 3), "nccl"),
        ((0, None), (0, 3), "gloo"),
    ],
    ids=["cpu", "cpus", "same gpu", "gpus of one node", "gpus of two nodes", "cpu and gpu"],
)
def test_the_nearest_transport_is_chosen(trainer, worker, kind):
    assert choose_kind(placement([trainer], [worker]), 0, 1, kind="auto") == kind
    assert choose_kind(placement([trainer], [worker]), 0, 1, kind="gloo") == "gloo"


@pytest.mark.parametrize(
    ("trainer", "worker", "kind", "why"),
    [
        ((0, None), (1, None), "shared", "on different nodes"),
        ((0, 3), (0, 4), "shared", "on different devices"),
        ((0, 3), (0, 3), "nccl", "share a GPU"),
        ((0, None), (0, None), "nccl", "do not both have a GPU"),
    ],
)
def test_a_transport_that_cannot_be_used_is_refused(trainer, worker, kind, why):
    with pytest.raises(ReshardError, match=rf"engine\.transport: got {kind}, but .* {why}; use auto"):
        choose_kind(placement([trainer], [worker]), 0, 1, kind=kind)


def test_members_with_their_own_gpus_share_one_nccl_group():
    own = Placement.packed(8, 8)
    assert nccl_lanes(own, relays=False) == (tuple(range(16)),)
    assert nccl_lanes(own, relays=True) == (tuple(range(16)), tuple(range(8, 16)))


@pytest.mark.parametrize(
    ("trainers", "workers", "per_node"), [(2, 2, 2), (8, 8, 8), (16, 8, 8), (5, 3, 4), (12, 12, 4)]
)
def test_members_that_share_gpus_find_an_nccl_group_without_two_on_one(trainers, workers, per_node):
    shared = Placement.packed(trainers, workers, per_node, colocated=True)
    lanes = nccl_lanes(shared, relays=True)
    for lane in lanes:
        devices = [shared.device(member) for member in lane]
        assert len(set(devices)) == len(devices)
    for sender, receiver in product(range(trainers), range(trainers, trainers + workers)):
        if not shared.share_device(sender, receiver):
            assert {sender, receiver} <= set(lanes[lane_of(shared, lanes, sender, receiver)])
    for sender, receiver in product(range(trainers, trainers + workers), repeat=2):
        assert {sender, receiver} <= set(lanes[lane_of(shared, lanes, sender, receiver)])


def test_each_case_of_the_gpu_check_uses_the_transports_that_it_is_for(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    from gpu_check import cases, plan_of

    for num_gpus in (1, 2, 3, 4, 8):
        for case in cases(num_gpus):
            plan = plan_of(case, layers=1, bucket_mib=256)
            pairs = {(m.sender, m.receiver) for r in range(plan.num_trainers + plan.num_workers)
                     for m in plan.messages_from(r)}  # fmt: skip
            used = {choose_kind(plan.placement, *pair, kind=case.kind) for pair in pairs}
            assert used == case.carriers, (num_gpus, case)
            assert max(case.trainers + case.workers) < num_gpus
