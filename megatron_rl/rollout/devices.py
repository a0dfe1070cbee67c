"""Which GPUs an engine replica runs on: consecutive blocks of those that the trainer's machine shows."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.errors import EngineError


def replica_devices(*, replicas: int, tp: int, visible: int) -> list[tuple[int, ...]]:
    """Per replica its `tp` devices, as positions among the `visible` ones: replica i has [i*tp, (i+1)*tp).

    Raises EngineError when the replicas need more devices than are visible.
    """
    if replicas * tp > visible:
        raise EngineError(
            f"engine: {replicas} replica(s) of {tp} worker(s) need {replicas * tp} GPUs of this machine, "
            f"{visible} are visible; lower engine.replicas or engine.tp, or show more in CUDA_VISIBLE_DEVICES"
        )
    return [tuple(range(first, first + tp)) for first in range(0, replicas * tp, tp)]


def visible_devices(positions: Sequence[int], inherited: str | None) -> str:
    """`CUDA_VISIBLE_DEVICES` that shows only `positions` of what `inherited` (None: unset) already shows.

    Names in `inherited` may be numbers or UUIDs.
    """
    if inherited is None:
        return ",".join(str(position) for position in positions)
    names = [name.strip() for name in inherited.split(",")]
    if max(positions) >= len(names):
        raise EngineError(
            f"engine: device {max(positions)} was assigned, but CUDA_VISIBLE_DEVICES={inherited} shows "
            f"{len(names)}"
        )
    return ",".join(names[position] for position in positions)
