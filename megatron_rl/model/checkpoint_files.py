"""Checkpoint directories of a run: names, the state file, atomic publishing, retention. No tensors.

    ROOT/stage_0_step_000050/{state.json, model/, optimizer/}   complete: it got this name by one rename
                                                                (no optimizer/ before its first step)
    ROOT/latest                                                 the name of the newest one
    ROOT/.tmp-NAME, ROOT/.old-NAME                              being written, being deleted: never read

`state.json` is written last and lists every other file with its size.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.errors import CheckpointError
from megatron_rl.model.new_directory import sync
from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.origins import leaves
from megatron_rl.recipe.schema import Recipe

STATE_FILE = "state.json"
LATEST_FILE = "latest"
MODEL_DIR = "model"
CHECKPOINTS_DIR = "checkpoints"  # of a run directory
_FORMAT = 1
_NAME = re.compile(r"stage_(\d+)_step_(\d+)")
_STAGE_KEY = re.compile(r"stages\.(\d+)\.")
_LEFTOVERS = (".tmp-*", ".old-*")
_SHOWN = 8  # names an error lists before it counts the rest

# keys that say where and how a run is computed, not what: a resume may change them
_PLACEMENT = (
    "name",
    "layout.*",
    "checkpoint",
    "checkpoint.*",
    "run.torch_threads",
    "run.collective_timeout_s",
    "stages.*.tokens_per_microbatch",
    "stages.*.engine.*",
    "stages.*.grader.workers",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """One complete checkpoint: where it is, and everything in it that is not a tensor."""

    path: Path
    progress: Mapping[str, Any]      # what was given to `save`, plain JSON
    optimizer_steps: int             # optimizer steps of the stage so far
    recipe: Mapping[str, Any]        # dotted key: value, of the run that saved it
    model: Mapping[str, Any]         # the numbers of its ModelSpec
    # HF tensor: dtype it came in, of those that an import had to store in a wider one
    hf_dtypes: Mapping[str, str] = field(default_factory=dict)


def flat_recipe(recipe: Recipe) -> dict[str, Any]:
    """Dotted key of each leaf to its value as JSON gives it back."""
    flat = {".".join(path): value for path, value in leaves(recipe)}
    return dict(json.loads(json.dumps(flat)))


def checkpoint_name(progress: Mapping[str, Any]) -> str:
    return f"stage_{int(progress['stage'])}_step_{int(progress['step']):06d}"


def start_checkpoint(root: Path, name: str) -> Path:
    """Make room for a new checkpoint and return the empty directory to write it into.

    Removes what killed processes left behind. Raises CheckpointError when `latest` already names it.
    """
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    if _latest_name(root) == name:
        raise CheckpointError(
            f"{root / name}: is the latest checkpoint already, so it is not overwritten; resume from it, or "
            "start in another run directory"
        )
    directory = root / f".tmp-{name}"
    directory.mkdir()
    return directory


def publish_checkpoint(
    directory: Path,
    *,
    progress: Mapping[str, Any],
    optimizer_steps: int,
    recipe: Mapping[str, Any],
    model: Mapping[str, Any],
    versions: Mapping[str, str],
) -> Path:
    """Complete the checkpoint that was written into `directory`, give it its name, and make it the latest.

    Everything is on the disk before the rename, so a checkpoint with a name is a complete one.
    """
    root, name = directory.parent, checkpoint_name(progress)
    write_state(
        directory,
        progress=progress,
        optimizer_steps=optimizer_steps,
        recipe=recipe,
        model=model,
        versions=versions,
    )
    for path in sorted(directory.rglob("*")):
        sync(path)
    sync(directory)
    if (root / name).exists():
        # left over from before the run was taken back to an earlier checkpoint
        _remove(root / name)
    directory.rename(root / name)
    sync(root)
    _write_latest(root, name)
    return root / name


def write_state(
    directory: Path,
    *,
    progress: Mapping[str, Any],
    optimizer_steps: int,
    recipe: Mapping[str, Any],
    model: Mapping[str, Any],
    versions: Mapping[str, str],
    hf_dtypes: Mapping[str, str] | None = None,
) -> None:
    """Write the state file of the checkpoint in `directory`, when all its other files are there."""
    state = {
        "format": _FORMAT,
        "progress": progress,
        "optimizer_steps": optimizer_steps,
        "recipe": recipe,
        "model": model,
        "versions": versions,
        "hf_dtypes": hf_dtypes or {},
        "files": _inventory(directory),
    }
    (directory / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def retain_newest(root: Path, keep: int) -> None:
    """Delete all but the `keep` checkpoints furthest in the run; never the one that `latest` names."""
    latest = _latest_name(root)
    for path in _published(root)[:-keep]:
        if path.name != latest:
            _remove(path)


def remove_leftovers(root: Path) -> None:
    """Delete what was being written or deleted; only one run at a time works on `root`."""
    for pattern in _LEFTOVERS:
        for path in root.glob(pattern):
            shutil.rmtree(path)
    (root / f".{LATEST_FILE}").unlink(missing_ok=True)


def find_latest(root: Path) -> SavedState | None:
    """The checkpoint to resume from, None where none was published yet.

    Raises CheckpointError naming the file that is absent, cut short or unreadable.
    """
    name = _latest_name(root)
    if name is None:
        # killed between the first rename and the first `latest`
        published = _published(root)
        return read_state(published[-1]) if published else None
    if not (root / name).is_dir():
        raise CheckpointError(
            f"{root / LATEST_FILE}: names {name!r}, which is not there; write another name into it: "
            f"{_list([path.name for path in _published(root)]) or 'none is left'}"
        )
    return read_state(root / name)


def find_checkpoint(path: Path) -> SavedState:
    """The checkpoint in `path`, or the latest one of the run directory `path`.

    Raises CheckpointError for a directory that is neither, and for a checkpoint that is not complete.
    """
    if (path / STATE_FILE).is_file():
        return read_state(path)
    for root in (path / CHECKPOINTS_DIR, path):
        if root.is_dir() and (saved := find_latest(root)) is not None:
            return saved
    if any(path.glob(f"{MODEL_DIR}/*.distcp")):
        raise CheckpointError(f"{path}: holds no {STATE_FILE}, so it was not finished; use another checkpoint")
    raise CheckpointError(
        f"{path}: is neither a checkpoint ({STATE_FILE}) nor a run directory with one ({CHECKPOINTS_DIR}/)"
    )


def read_state(path: Path) -> SavedState:
    """The state of the checkpoint in `path`, with every file there in its full size."""
    file = path / STATE_FILE
    latest = path.parent / LATEST_FILE
    advice = f"write the name of an older checkpoint into {latest}, or start a new run"
    if not latest.is_file():
        advice = "copy or make it again"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        if state["format"] != _FORMAT:
            raise CheckpointError(f"{file}: format is {state['format']!r}, must be {_FORMAT}; {advice}")
        files = {str(name): int(size) for name, size in state["files"].items()}
        saved = SavedState(
            path=path,
            progress=dict(state["progress"]),
            optimizer_steps=int(state["optimizer_steps"]),
            recipe=dict(state["recipe"]),
            model=dict(state["model"]),
            hf_dtypes=dict(state.get("hf_dtypes", {})),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: not a complete state of a checkpoint: {error!r}; {advice}") from None
    for name, size in files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name}: is not there; {advice}")
        found = (path / name).stat().st_size
        if found != size:
            raise CheckpointError(f"{path / name}: has {found} bytes, must have {size}; {advice}")
    return saved


def check_same_recipe(saved: SavedState, recipe: Mapping[str, Any]) -> None:
    """Raises CheckpointError listing each key that decided results so far and differs from the saved run's.

    Stages after the saved one have not begun: they may be mended, added or removed.
    """
    stage = int(saved.progress["stage"])
    different = _differences(_decisive(saved.recipe, stage), _decisive(recipe, stage))
    if different:
        raise CheckpointError(
            f"{saved.path}: was saved by another recipe ({_list(different, '; ')}); set these back, or start "
            "a new run; only later stages, the layout, engines, checkpointing and micro-batch sizes may change in "
            "a resume"
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


def _published(root: Path) -> list[Path]:
    """Complete checkpoints, the one furthest in the run last."""
    found = [(match, path) for path in root.glob("stage_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(((int(m[1]), int(m[2])), path) for m, path in found)]


def _latest_name(root: Path) -> str | None:
    try:
        name = (root / LATEST_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{root / LATEST_FILE}: cannot be read: {error}") from None
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{root / LATEST_FILE}: got {name!r}, must name a checkpoint, such as stage_0_step_000050"
        )
    return name


def _write_latest(root: Path, name: str) -> None:
    partial = root / f".{LATEST_FILE}"
    partial.write_text(name + "\n", encoding="utf-8")
    sync(partial)
    partial.replace(root / LATEST_FILE)
    sync(root)


def _inventory(directory: Path) -> dict[str, int]:
    """Bytes of every file, by its path below `directory`."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _remove(path: Path) -> None:
    # half a deletion must not look like a checkpoint
    doomed = path.with_name(f".old-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _list(names: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more
