"""Sharded tensors from one directory, in megatron-core's `torch_dist` format; collective.

Loading is `dist_checkpointing.load`, after the names and shapes of all ranks were compared with what is there: an
error on some ranks alone would leave the others waiting.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.errors import CheckpointError
from megatron_rl.model.hf_files import listed
from megatron_rl.parallel.collectives import all_gather_object

_UNREADABLE = (CheckpointingException, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Stored tensors and objects of one directory against those that this run has, over all ranks."""

    expected: int
    found: int
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    wrong_shape: Sequence[str] = ()

    @property
    def loaded(self) -> int:
        return self.expected - len(self.missing) - len(self.wrong_shape)

    def complaint(self) -> str:
        """Empty when everything that is wanted, and nothing else, is there."""
        lists = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("wrong shape", self.wrong_shape),
        )
        return "; ".join(f"{what} {listed(list(names))}" for what, names in lists if names)


def read_sharded(state: dict[str, Any], directory: Path) -> tuple[dict[str, Any], Names]:
    """Fill the tensors of `state` in place; returns the filled state and what was compared.

    Any layout reads what any other wrote. Raises CheckpointError on every rank, naming files that cannot be
    read, and tensors that are missing, unexpected or of another shape.
    """
    try:
        names = _compare_names(state, directory)
        if names.complaint():
            raise CheckpointError(
                f"{directory}: does not hold the tensors of this run: {names.complaint()}; it belongs to another model "
                "or optimizer, or was damaged"
            )
        return dict(dist_checkpointing.load(state, str(directory))), names
    except CheckpointException as error:
        _raise_interrupt(error)
        raise CheckpointError(f"{directory}: {_first_failure(error)}") from error
    except _UNREADABLE as error:
        raise CheckpointError(f"{directory}: cannot be read: {error}") from error


def _compare_names(state: dict[str, Any], directory: Path) -> Names:
    sharded, _ = extract_sharded_base(load_preprocess(state)[0])
    mine = {_name(shard): _shape(shard) for shard in nested_values(sharded)}
    wanted: dict[str, tuple[int, ...] | None] = {}
    for of_rank in all_gather_object(mine):
        wanted |= of_rank
    found = {_name(shard): _shape(shard) for shard in load_sharded_metadata(str(directory)).values()}
    return Names(
        expected=len(wanted),
        found=len(found),
        missing=sorted(wanted.keys() - found.keys()),
        unexpected=sorted(found.keys() - wanted.keys()),
        wrong_shape=[
            f"{name} {list(found[name] or ())}, must be {list(shape)}"
            for name, shape in sorted(wanted.items())
            if shape is not None and name in found and found[name] != shape
        ],
    )


def _name(shard: Any) -> str:
    return str(shard.unique_key if isinstance(shard, ShardedObject) else shard.key)


def _shape(shard: Any) -> tuple[int, ...] | None:
    """None where any will do: an object, and an embedding, whose padding differs with the layout."""
    if isinstance(shard, ShardedObject) or shard.allow_shape_mismatch:
        return None
    return tuple(shard.global_shape)


def _raise_interrupt(error: CheckpointException) -> None:
    """Ctrl-C, which torch took for a failure of the rank that it reached, is one for all of them."""
    if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
        raise KeyboardInterrupt from error


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(cause).__name__}: {cause}"
