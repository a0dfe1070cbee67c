"""Checkpoints of a run: model, optimizer and progress, saved together and resumed in any layout.

No generator state is stored because none is used: there is no dropout, and the order of the data and every
sampling seed are functions of the run's seed and of its progress.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import nn

from megatron_rl.errors import CheckpointError, LostPeerError
from megatron_rl.model import checkpoint_files as files
from megatron_rl.model.build import unwrapped
from megatron_rl.model.checkpoint_files import MODEL_DIR, SavedState
from megatron_rl.model.checkpoint_tensors import Prepared, prepare_sharded, read_sharded, write_sharded
from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.schema import Recipe

__all__ = ["CheckpointStore", "SavedState", "Trainable"]

T = TypeVar("T")

_OPTIMIZER_DIR = "optimizer"
_OPTIMIZER_FORMAT = {
    # whole tensors under the names of the parameters they belong to, so that any layout can read them
    "distrib_optim_sharding_type": "fully_reshardable",
    # gathered in host memory on dp rank 0 only; the other way costs every rank a whole copy
    "distrib_optim_fully_reshardable_mem_efficient": True,
    # expert parallelism trains experts by an optimizer of their own; names of parameters tell them apart as it is
    "chained_optim_avoid_prefix": True,
}


class SteppedOptimizer(Protocol):
    """megatron-core's optimizer and the optimizer steps it has done in this stage."""

    inner: MegatronOptimizer
    num_steps: int


class Trainable(Protocol):
    """What is saved: DDP-wrapped model chunks of this rank and the optimizer of the current stage."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def ddp_chunks(self) -> Sequence[nn.Module]: ...

    @property
    def optimizer(self) -> SteppedOptimizer: ...


class CheckpointStore:
    """The checkpoints of one run below `root`, a directory that every rank sees.

    `keep` newest ones stay. `timeout_s` bounds how long the ranks wait for the slowest one while saving.
    """

    def __init__(self, root: Path, *, keep: int, rank: int, recipe: Recipe, timeout_s: float) -> None:
        self._root, self._keep, self._rank, self._timeout_s = root, keep, rank, timeout_s
        self._recipe = files.flat_recipe(recipe)
        self._group: dist.ProcessGroup | None = None

    def latest(self) -> SavedState | None:
        """The checkpoint to resume from, None where none was published. Not collective.

        Raises CheckpointError for one with a file absent or cut short, and for one of another recipe.
        """
        saved = files.find_latest(self._root)
        if saved is not None:
            files.check_same_recipe(saved, self._recipe)
        return saved

    def save(self, policy: Trainable, progress: Mapping[str, Any]) -> None:
        """Write a checkpoint and publish it at once or not at all. Collective.

        `progress` is plain JSON with the numbers `stage` and `step`; rank 0's is stored. An optimizer that has
        not stepped has no state yet and none is stored. When any rank fails, every rank raises CheckpointError;
        the unfinished checkpoint is removed (also on Ctrl-C or SIGTERM), earlier ones stay.
        """
        name = files.checkpoint_name(progress)
        directory = self._root / f".tmp-{name}"
        try:
            self._together("making room", lambda: self._start(policy, progress, name), rank=0)
            states = self._together("gathering state", lambda: _sharded_states(policy))
            prepared = self._together("checking state", lambda: _prepared(states))
            self._together("writing", lambda: self._write(prepared, directory))
            self._together("publishing", lambda: self._publish(policy, progress, directory), rank=0)
        except BaseException:
            if self._rank == 0:
                # the failure that led here is the one to report
                with suppress(OSError):
                    files.remove_leftovers(self._root)
            raise

    def load_model(self, policy: Trainable, saved: SavedState) -> None:
        """Fill the model chunks from a checkpoint of any layout. Collective.

        Comes before the optimizer is built, which copies the weights. Raises CheckpointError naming what is
        missing, unexpected or unreadable, and for a checkpoint of another model.
        """
        # megatron-core reads an embedding of any number of rows: its padding differs with the layout
        files.check_same_model(saved, files.flat_spec(policy.spec))
        loaded = read_sharded(_model_state(policy), saved.path / MODEL_DIR)
        for number, chunk in enumerate(policy.ddp_chunks):
            unwrapped(chunk).load_state_dict(loaded[f"model{number}"])

    def load_optimizer(self, policy: Trainable, saved: SavedState) -> None:
        """Fill a new optimizer, its step count included, from a checkpoint of any layout. Collective.

        One saved before its first step leaves the new one as it is. Otherwise raises CheckpointError when the
        checkpoint holds none or another one: it is never started anew.
        """
        if saved.optimizer_steps == 0:
            return
        optimizer = policy.optimizer
        state = optimizer.inner.sharded_state_dict(
            _model_state(policy), is_loading=True, metadata=dict(_OPTIMIZER_FORMAT)
        )
        loaded = read_sharded({"optimizer": state}, saved.path / _OPTIMIZER_DIR)
        optimizer.inner.load_state_dict(_in_own_terms(state, loaded["optimizer"], steps=saved.optimizer_steps))
        optimizer.num_steps = saved.optimizer_steps

    def _start(self, policy: Trainable, progress: Mapping[str, Any], name: str) -> None:
        if json.loads(json.dumps(progress)) != progress:
            raise CheckpointError(f"progress: got {progress!r}, must be plain JSON: text keys, no tuples")
        directory = files.start_checkpoint(self._root, name)
        for part in [MODEL_DIR] + [_OPTIMIZER_DIR] * (policy.optimizer.num_steps > 0):
            (directory / part).mkdir()

    def _write(self, prepared: Mapping[str, Prepared], directory: Path) -> None:
        assert self._group is not None
        for part, state in prepared.items():
            write_sharded(state, directory / part, self._group)

    def _publish(self, policy: Trainable, progress: Mapping[str, Any], directory: Path) -> None:
        files.publish_checkpoint(
            directory,
            progress=progress,
            optimizer_steps=policy.optimizer.num_steps,
            recipe=self._recipe,
            model=files.flat_spec(policy.spec),
            versions={package: version(package) for package in ("torch", "megatron-core")},
        )
        files.retain_newest(self._root, self._keep)

    def _together(self, what: str, action: Callable[[], T], *, rank: int | None = None) -> T:
        """Run `action` on every rank, or on `rank` alone (others get None); one failure fails all."""
        if self._group is None:
            # of its own: writing may take longer than a training step, and a GPU is of no use to it
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        result, failure = None, None
        try:
            if rank is None or rank == self._rank:
                result = action()
        except Exception as error:
            failure = error
        outcomes: list[str | None] = [None] * dist.get_world_size()
        try:
            message = None if failure is None else self._describe(failure)
            dist.all_gather_object(outcomes, message, group=self._group)
        except RuntimeError as error:
            if failure is not None:
                raise CheckpointError(f"{self._root}: {what} failed: {message}") from failure
            raise LostPeerError(
                f"{self._root}: {what} failed: {error}; a rank stopped or took longer than "
                f"{self._timeout_s:g} s: read its log first"
            ) from error
        failures = [outcome for outcome in outcomes if outcome is not None]
        if failures:
            raise CheckpointError(
                f"{self._root}: {what} failed: {failures[0]}; nothing was published, earlier checkpoints are intact"
            ) from failure
        return result  # type: ignore[return-value]

    def _describe(self, failure: Exception) -> str:
        if isinstance(failure, CheckpointError):
            return str(failure)
        return f"rank {self._rank}: {type(failure).__name__}: {failure}"


def _sharded_states(policy: Trainable) -> dict[str, dict[str, Any]]:
    model = _model_state(policy)
    if policy.optimizer.num_steps == 0:
        return {MODEL_DIR: model}
    optimizer = policy.optimizer.inner.sharded_state_dict(model, metadata=dict(_OPTIMIZER_FORMAT))
    return {MODEL_DIR: model, _OPTIMIZER_DIR: {"optimizer": optimizer}}


def _in_own_terms(own: dict[Any, Any], loaded: dict[Any, Any], *, steps: int) -> dict[Any, Any]:
    """The loaded moments with the settings of this run's optimizer, which may be split another way than the saved.

    `own` is what it says of itself: parameter groups and settings, or such parts by number.
    """
    if 0 in own:
        return {number: _in_own_terms(part, loaded[number], steps=steps) for number, part in own.items()}
    groups = [{**group, "step": steps} for group in own["optimizer"]["param_groups"]]
    return {
        **own,
        "optimizer": {**own["optimizer"], "param_groups": groups},
        "param_state": loaded["param_state"],
    }


def _prepared(states: Mapping[str, dict[str, Any]]) -> dict[str, Prepared]:
    return {part: prepare_sharded(state) for part, state in states.items()}


def _model_state(policy: Trainable) -> dict[str, Any]:
    """Live tensors of every chunk; their keys count layers over the whole model, so chunks never collide."""
    chunks = [unwrapped(chunk) for chunk in policy.ddp_chunks]
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
