"""Sharded tensors to one directory and back, in megatron-core's `torch_dist` format; collective.

Loading is `dist_checkpointing.load`. Writing is done here, by torch's writer inside the trainer process:
`dist_checkpointing.save` forks writers and waits for them without a time-out, and it writes its common file
before the ranks agree on anything, so a full disk on rank 0 would leave the others waiting.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rl.errors import CheckpointError
from megatron_rl.parallel.collectives import all_gather_object

_COMMON_FILE = "common.pt"  # megatron-core's name for what is the same on every rank
_SHOWN = 8                  # tensor names an error lists before it counts the rest
_UNREADABLE = (CheckpointingException, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one rank writes: the shards it owns, by name, and what is the same on every rank."""

    shards: dict[str, Any]
    common: dict[str, Any]


def prepare_sharded(state: dict[str, Any]) -> Prepared:
    """Check that the shards of all ranks cover each tensor exactly once, and pick those this rank writes."""
    sharded, common = save_preprocess(state)
    shards: dict[str, list[Any]] = defaultdict(list)
    for shard in nested_values(sharded):
        if is_main_replica(shard.replica_id):
            shards[_name(shard)].append(shard)
    return Prepared(mcore_to_pyt_state_dict(dict(shards)), common)


def write_sharded(prepared: Prepared, directory: Path, group: dist.ProcessGroup) -> None:
    """Write one directory; every tensor file is on the disk when this returns.

    A failure of any rank raises CheckpointError on every rank.
    """
    try:
        torch_checkpoint.save(
            prepared.shards,
            storage_writer=_Writer(directory, common=prepared.common),
            planner=MCoreSavePlanner(flatten_state_dict=False),
            process_group=group,
        )
    except CheckpointException as error:
        _raise_interrupt(error)
        # torch hides the operating system's reason behind a position in its archive
        raise CheckpointError(f"{directory}: {_first_failure(error)}; is the disk full?") from error


class _Writer(FileSystemWriter):
    """torch's writer; adds megatron-core's own two files in a step whose outcome every rank learns."""

    def __init__(self, directory: Path, *, common: dict[str, Any]) -> None:
        super().__init__(directory)
        self._common = common

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        super().finish(metadata, results)
        torch.save(self._common, Path(self.path) / _COMMON_FILE)
        save_config(CheckpointingConfig("torch_dist", 1), str(self.path))


def read_sharded(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Fill the tensors of `state` in place; returns them together with what is the same on every rank.

    Any layout reads what any other wrote. Raises CheckpointError on every rank, naming files that cannot be
    read, and tensors that are missing, unexpected or of another shape.
    """
    try:
        _check_names(state, directory)
        return dict(dist_checkpointing.load(state, str(directory)))
    except CheckpointException as error:
        _raise_interrupt(error)
        raise CheckpointError(f"{directory}: {_first_failure(error)}") from error
    except _UNREADABLE as error:
        raise CheckpointError(f"{directory}: cannot be read: {error}") from error


def _check_names(state: dict[str, Any], directory: Path) -> None:
    """Compare names over all ranks before anything is read: an error on some ranks leaves others waiting."""
    sharded, _ = extract_sharded_base(load_preprocess(state)[0])
    wanted = set().union(*all_gather_object({_name(shard) for shard in nested_values(sharded)}))
    found = {_name(shard) for shard in load_sharded_metadata(str(directory)).values()}
    complaints = [
        f"{what} {', '.join(names[:_SHOWN])}" + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")
        for what, names in (("missing", sorted(wanted - found)), ("unexpected", sorted(found - wanted)))
        if names
    ]
    if complaints:
        raise CheckpointError(
            f"{directory}: does not hold the tensors of this run: {'; '.join(complaints)}; it belongs to "
            "another model or optimizer, or was damaged"
        )


def _name(shard: Any) -> str:
    return str(shard.unique_key if isinstance(shard, ShardedObject) else shard.key)


def _raise_interrupt(error: CheckpointException) -> None:
    """Ctrl-C, which torch took for a failure of the rank that it reached, is one for all of them."""
    if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
        raise KeyboardInterrupt from error


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(cause).__name__}: {cause}"
