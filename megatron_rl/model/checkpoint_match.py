"""Whether a checkpoint belongs to a run: its recipe and its model against those of now."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_rl.errors import CheckpointError
from megatron_rl.model.checkpoint_files import STATE_FILE, SavedState, advice_for
from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.origins import leaves
from megatron_rl.recipe.schema import Recipe

_STAGE_KEY = re.compile(r"stages\.(\d+)\.")
_SHOWN = 8  # differences an error lists before it counts the rest

# keys that say where and how a run is computed or what is noted of it, not what it computes: a resume may change them
_PLACEMENT = (
    "name",
    "layout.*",
    "checkpoint",
    "checkpoint.*",
    "run.torch_threads",
    "run.collective_timeout_s",
    "run.silence_timeout_s",
    "run.stop_grace_s",
    "run.rollout_tokens",
    "run.profile",
    "run.profile.*",
    "run.wandb",
    "run.wandb.*",
    "stages.*.tokens_per_microbatch",
    "stages.*.optimizer.max_skipped_steps",
    "stages.*.engine.*",
    "stages.*.grader.workers",
)


def flat_recipe(recipe: Recipe) -> dict[str, Any]:
    """Dotted key of each leaf to its value as JSON gives it back."""
    flat = {".".join(path): value for path, value in leaves(recipe)}
    return dict(json.loads(json.dumps(flat)))


def recipe_digest(recipe: Mapping[str, Any], *, stage: int) -> str:
    """sha256 of the keys, with their values, that decided results up to stage number `stage`."""
    decisive = json.dumps(_decisive(recipe, stage), sort_keys=True)
    return hashlib.sha256(decisive.encode()).hexdigest()


def check_same_recipe(saved: SavedState, recipe: Mapping[str, Any]) -> None:
    """Raises CheckpointError listing each key that decided results so far and differs from the saved run's.

    Stages after the saved one have not begun: they may be mended, added or removed.
    """
    stage = int(saved.progress["stage"])
    if saved.recipe_digest != recipe_digest(saved.recipe, stage=stage):
        raise CheckpointError(
            f"{saved.path / STATE_FILE}: its recipe is not the one that it was saved with; {advice_for(saved.path)}"
        )
    different = _differences(_decisive(saved.recipe, stage), _decisive(recipe, stage))
    if different:
        raise CheckpointError(
            f"{saved.path}: was saved by another recipe ({_list(different, '; ')}); set these back, or start "
            "a new run; only later stages, the layout, engines, checkpointing, micro-batch sizes and what is recorded "
            "(run.profile, run.wandb, run.rollout_tokens) may change in a resume"
        )


def flat_spec(spec: ModelSpec) -> dict[str, Any]:
    """The model's numbers as JSON gives them back."""
    return dict(json.loads(json.dumps(asdict(spec))))


def check_same_model(saved: SavedState, model: Mapping[str, Any], *, place: str = "model.hf_path") -> None:
    """Raises CheckpointError listing each number in which the model at `place` differs from the saved one."""
    different = _differences(saved.model, model)
    if different:
        raise CheckpointError(
            f"{saved.path}: holds another model than {place} ({_list(different, '; ')}); name the directory "
            "of the model that it holds, or use another checkpoint"
        )


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: was {json.dumps(was[key]) if key in was else 'not set'}, "
        f"is {json.dumps(now[key]) if key in now else 'not set'}"
        for key in sorted(was.keys() | now.keys())
        if key not in was or key not in now or was[key] != now[key]
    ]


def _decisive(recipe: Mapping[str, Any], last_stage: int) -> dict[str, Any]:
    return {
        key: value
        for key, value in recipe.items()
        if not any(fnmatch.fnmatchcase(key, pattern) for pattern in _PLACEMENT)
        and _stage_of(key) <= last_stage
    }


def _stage_of(key: str) -> int:
    """The stage that a dotted key belongs to; -1: to the whole run."""
    match = _STAGE_KEY.match(key)
    return int(match[1]) if match else -1


def _list(names: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more
