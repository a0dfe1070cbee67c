"""The parts of a checkpoint into a run: model, optimizer, generators. Files are compared with their digests first."""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist

from megatron_rl.data.seeds import derive_seed
from megatron_rl.errors import CheckpointError
from megatron_rl.model.background import Background
from megatron_rl.model.build import unwrapped
from megatron_rl.model.checkpoint_files import (
    GENERATORS_DIR,
    MODEL_DIR,
    OPTIMIZER_DIR,
    SavedState,
    advice_for,
    generators_file,
)
from megatron_rl.model.checkpoint_match import check_same_model, flat_spec
from megatron_rl.model.checkpoint_shards import Trainable, model_state
from megatron_rl.model.checkpoint_tensors import read_sharded
from megatron_rl.model.checkpoint_writer import file_digest
from megatron_rl.model.generators import seed_generators, set_generator_states
from megatron_rl.model.load_report import LoadReport
from megatron_rl.model.together import Together

# what megatron-core's loader is told of the optimizer's tensors
_OPTIMIZER_FORMAT = {
    # whole tensors under the names of the parameters they belong to, so that any layout can read them
    "distrib_optim_sharding_type": "fully_reshardable",
    # expert parallelism trains experts by an optimizer of their own; names of parameters tell them apart as it is
    "chained_optim_avoid_prefix": True,
}


def load_model(policy: Trainable, saved: SavedState, together: Together, report: LoadReport) -> None:
    """See CheckpointStore.load_model."""
    # megatron-core reads an embedding of any number of rows: its padding differs with the layout
    check_same_model(saved, flat_spec(policy.spec))
    _verify(saved, MODEL_DIR, together, report)
    loaded, report.model = read_sharded(model_state(policy), saved.path / MODEL_DIR)
    for number, chunk in enumerate(policy.ddp_chunks):
        unwrapped(chunk).load_state_dict(loaded[f"model{number}"])


def load_optimizer(policy: Trainable, saved: SavedState, together: Together, report: LoadReport) -> None:
    """See CheckpointStore.load_optimizer."""
    if saved.optimizer_steps == 0:
        return
    if not any(name.startswith(f"{OPTIMIZER_DIR}/") for name in saved.files):
        raise CheckpointError(
            f"{saved.path}: holds no optimizer, after {saved.optimizer_steps} optimizer steps; {advice_for(saved.path)}"
        )
    _verify(saved, OPTIMIZER_DIR, together, report)
    optimizer = policy.optimizer
    state = optimizer.inner.sharded_state_dict(
        model_state(policy), is_loading=True, metadata=dict(_OPTIMIZER_FORMAT)
    )
    loaded, report.optimizer = read_sharded({"optimizer": state}, saved.path / OPTIMIZER_DIR)
    optimizer.inner.load_state_dict(_in_own_terms(state, loaded["optimizer"], steps=saved.optimizer_steps))
    optimizer.num_steps = saved.optimizer_steps


def load_generators(
    policy: Trainable, saved: SavedState, together: Together, report: LoadReport, *, rank: int
) -> None:
    """See CheckpointStore.load_generators."""
    if report.layout == saved.layout:
        _verify(saved, GENERATORS_DIR, together, report)
        path = saved.path / generators_file(rank)
        together.run(f"restoring {path}", lambda: set_generator_states(json.loads(path.read_bytes())))
        report.generators = "restored"
        return
    progress = saved.progress
    seed = derive_seed(int(saved.recipe["run.seed"]), "resumed", progress["stage"], progress["step"])
    seed_generators(seed, rank=rank)
    report.generators = "seeded anew from run.seed and the step, since the layout is another"


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


def _verify(saved: SavedState, part: str, together: Together, report: LoadReport) -> None:
    """Compare the files of a part with the digests that they were saved with, shared out over the ranks.

    Raises CheckpointError on every rank, naming the file. Collective.
    """
    began = time.monotonic()
    digests = {
        name: recorded
        for name, recorded in saved.files.items()
        if name.startswith(f"{part}/") and recorded.sha256 is not None
    }
    names = sorted(digests, key=lambda name: (-digests[name].num_bytes, name))
    mine = names[dist.get_rank() :: dist.get_world_size()]

    def check() -> None:
        for name in mine:
            found = file_digest(saved.path / name)
            if found != digests[name].sha256:
                raise CheckpointError(
                    f"{saved.path / name}: was changed after it was saved: its sha256 is {found}, must be "
                    f"{digests[name].sha256}; {advice_for(saved.path)}"
                )

    what = f"reading {saved.path / part}"
    together.run(what, lambda: Background(check, what=what).result(together.timeout_s))
    report.verified["files"] += len(digests)
    report.verified["bytes"] += sum(recorded.num_bytes for recorded in digests.values())
    report.verified["seconds"] += time.monotonic() - began
