"""What this rank owns of a model and of its distributed optimizer: boxes of the tensors that a checkpoint stores.

The optimizer's moments are stored under the names and in the shapes of the parameters (megatron-core's
`fully_reshardable` format, which its own loader reads in any layout), but nobody gathers them: a data-parallel rank
owns runs of elements, and a run is a few boxes. So every rank writes its own part, straight from where it lies.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megatron_rl.model.boxes import boxes_of_run
from megatron_rl.model.build import unwrapped
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout

# of each parameter, by megatron-core's names; "param" is the float32 master copy
_OPTIMIZER_KEYS = ("param", "exp_avg", "exp_avg_sq")


class SteppedOptimizer(Protocol):
    """megatron-core's optimizer and the optimizer steps it has done in this stage."""

    inner: MegatronOptimizer
    num_steps: int


class Trainable(Protocol):
    """What is saved: DDP-wrapped model chunks of this rank and the optimizer of the current stage."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def layout(self) -> ParallelLayout: ...

    @property
    def ddp_chunks(self) -> Sequence[nn.Module]: ...

    @property
    def optimizer(self) -> SteppedOptimizer: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a stored tensor, and the elements that fill it: live memory of this rank, in the box's order."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    data: Tensor  # sizes.numel() elements


@dataclass(frozen=True, slots=True)
class Owned:
    """What one rank writes into one directory: shards of tensors, and small objects as `torch.save` has them."""

    shards: Sequence[Shard]
    objects: Mapping[str, bytes] = field(default_factory=dict)


def model_state(policy: Trainable) -> dict[str, Any]:
    """Live tensors of every chunk; their keys count layers over the whole model, so chunks never collide."""
    chunks = [unwrapped(chunk) for chunk in policy.ddp_chunks]
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def owned_model(state: dict[str, Any]) -> Owned:
    """The part of a model's sharded state that this rank writes; replicas are written by their main one."""
    sharded, _ = save_preprocess(state, validate_access_integrity=False)
    shards, objects = [], {}
    for entry in nested_values(sharded):
        if not is_main_replica(entry.replica_id):
            continue
        if isinstance(entry, ShardedObject):
            content = io.BytesIO()
            torch.save([entry.data], content)
            objects[str(entry.unique_key)] = content.getvalue()
        else:
            shards.append(_whole(entry, entry.data.detach()))
    return Owned(shards, objects)


def owned_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> Owned:
    """The runs of moments and master weights that this rank updates. `state` is the model's."""
    tensors, _ = extract_sharded_tensors_and_factories(state)
    by_param = {entry.data: entry for entry in nested_values(tensors)}
    shards: list[Shard] = []
    # experts have an optimizer of their own
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for param in part.model_param_gbuf_map:
            run = part._get_model_param_range_map(param)["param"]
            states = part._get_main_param_and_optimizer_states(param)
            shards += _shards_of_param(by_param[param], states, run.start, run.end)
    return Owned(shards)


def _shards_of_param(
    entry: ShardedTensor | ShardedTensorFactory, states: Mapping[str, Tensor], start: int, stop: int
) -> Iterator[Shard]:
    """Elements [start, stop) of a parameter, which may be stored as several tensors (gate and up projection)."""
    for piece, first in _pieces(entry):
        if not is_main_replica((*piece.replica_id[:2], 0)):
            continue
        low, high = max(start, first), min(stop, first + piece.data.numel())
        for key in _OPTIMIZER_KEYS:
            whole = replace(piece, key=f"optimizer.state.{key}.{piece.key}")
            yield from _runs(whole, states[key].detach().view(-1)[low - start : high - start], low - first)


def _pieces(entry: ShardedTensor | ShardedTensorFactory) -> list[tuple[ShardedTensor, int]]:
    """Each stored tensor of a parameter, and the element of the parameter at which it begins."""
    if isinstance(entry, ShardedTensor):
        return [(entry, 0)]
    # elements are not needed, only where the factory cuts
    outline = torch.empty(entry.data.shape, device="meta")
    built = [piece for piece in nested_values(replace(entry, data=outline).build())]
    assert all(piece.data.is_contiguous() for piece in built), f"{entry.key}: is cut across its rows"
    return [(piece, piece.data.storage_offset()) for piece in built]


def _runs(piece: ShardedTensor, data: Tensor, start: int) -> Iterator[Shard]:
    """`data` holds elements from `start` on of a stored tensor."""
    leading = piece.prepend_axis_num
    done = 0
    for starts, sizes in boxes_of_run(tuple(piece.local_shape), start, start + data.numel()):
        count = math.prod(sizes)
        offsets = tuple(piece.global_offset)
        yield Shard(
            key=piece.key,
            shape=tuple(piece.global_shape),
            starts=offsets[:leading] + tuple(o + s for o, s in zip(offsets[leading:], starts, strict=True)),
            sizes=(1,) * leading + sizes,
            data=data[done : done + count],
        )
        done += count


def _whole(piece: ShardedTensor, data: Tensor) -> Shard:
    return Shard(
        key=piece.key,
        shape=tuple(piece.global_shape),
        starts=tuple(piece.global_offset),
        sizes=(1,) * piece.prepend_axis_num + tuple(piece.local_shape),
        data=data,
    )
