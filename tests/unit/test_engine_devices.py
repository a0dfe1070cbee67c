"""Each replica has GPUs of its own, by the names that the trainer's machine shows."""

import pytest

from megatron_rl.errors import EngineError
from megatron_rl.rollout.devices import replica_devices, visible_devices


def test_replicas_take_consecutive_blocks_and_share_no_device():
    assert replica_devices(replicas=3, tp=2, visible=8) == [(0, 1), (2, 3), (4, 5)]
    assert replica_devices(replicas=2, tp=1, visible=2) == [(0,), (1,)]


def test_more_workers_than_visible_devices_are_refused():
    with pytest.raises(EngineError, match=r"2 replica\(s\) of 4 worker\(s\) need 8 GPUs .* 7 are visible"):
        replica_devices(replicas=2, tp=4, visible=7)


@pytest.mark.parametrize(
    ("positions", "inherited", "shown"),
    [
        ((2, 3), None, "2,3"),
        ((0, 1), "4,5,6,7", "4,5"),
        ((2, 3), "4,5,6,7", "6,7"),
        ((1,), "GPU-aaaa, GPU-bbbb", "GPU-bbbb"),
    ],
)
def test_positions_count_among_what_is_already_visible(positions, inherited, shown):
    assert visible_devices(positions, inherited) == shown


def test_a_position_beyond_what_is_visible_is_refused():
    with pytest.raises(EngineError, match="CUDA_VISIBLE_DEVICES=4 shows 1"):
        visible_devices((1,), "4")
