"""Checkpoint directories of a run: names, the state file, atomic publishing, retention. No tensors.

    ROOT/stage_0_step_000050/         complete: it got this name by one rename
        state.json                    what is not a tensor, and every other file with its size and digest
        model/ optimizer/             tensors (no optimizer/ before its first step)
        generators/                   the random generators of each rank
    ROOT/latest                       the name of the newest one
    ROOT/.tmp-NAME, ROOT/.old-NAME    being written, being deleted: never read

`state.json` is written last.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.errors import CheckpointError
from megatron_rl.model.hf_files import listed
from megatron_rl.model.new_directory import sync

STATE_FILE = "state.json"
LATEST_FILE = "latest"
MODEL_DIR, OPTIMIZER_DIR, GENERATORS_DIR = "model", "optimizer", "generators"
CHECKPOINTS_DIR = "checkpoints"  # of a run directory
_FORMAT = 3
_OWN_DIGEST = "sha256"  # of the state file's other entries
_NAME = re.compile(r"stage_(\d+)_step_(\d+)")
_LEFTOVERS = (".tmp-*", ".old-*")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the state file says of another file; no digest for one that no run wrote."""

    num_bytes: int
    sha256: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """One complete checkpoint: where it is, and everything in it that is not a tensor."""

    path: Path
    progress: Mapping[str, Any]  # what was given to `save`, plain JSON
    optimizer_steps: int  # optimizer steps of the stage so far
    recipe: Mapping[str, Any]  # dotted key: value, of the run that saved it
    recipe_digest: str  # sha256 of those that decided results so far; empty for one that no run saved
    model: Mapping[str, Any]  # the numbers of its ModelSpec
    layout: Mapping[str, Any]  # the numbers of its ParallelLayout; empty for one that no run saved
    files: Mapping[str, Recorded]  # every file but the state's own, by its path in the checkpoint
    # HF tensor: dtype it came in, of those that an import had to store in a wider one
    hf_dtypes: Mapping[str, str] = field(default_factory=dict)


def generators_file(rank: int) -> str:
    """Path in a checkpoint."""
    return f"{GENERATORS_DIR}/rank_{rank}.json"


def read_extra(saved: SavedState, name: str) -> bytes | None:
    """A file that `CheckpointStore.save` was given; None: it was not.

    Raises CheckpointError unless it is there to the byte.
    """
    if name not in saved.files:
        return None
    path, recorded = saved.path / name, saved.files[name]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {advice_for(saved.path)}") from None
    if (digest := hashlib.sha256(content).hexdigest()) != recorded.sha256:
        raise CheckpointError(
            f"{path}: has sha256 {digest}, was saved with {recorded.sha256}; {advice_for(saved.path)}"
        )
    return content


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


def publish_checkpoint(saved: SavedState, *, versions: Mapping[str, str]) -> Path:
    """Complete the checkpoint that was written into `saved.path`, give it its name, and make it the latest.

    Its files were fsynced by those who wrote them. Everything is on the disk before the rename, so a checkpoint with
    a name is a complete one. Raises CheckpointError, and publishes nothing, for a directory that does not hold
    exactly `saved.files`.
    """
    directory = saved.path
    root, name = directory.parent, checkpoint_name(saved.progress)
    write_state(saved, versions=versions)
    # the other files are on the disk already
    sync(directory / STATE_FILE)
    for path in [*sorted(path for path in directory.rglob("*") if path.is_dir()), directory]:
        sync(path)
    _check_complete(saved)
    if (root / name).exists():
        # left over from before the run was taken back to an earlier checkpoint
        _remove(root / name)
    directory.rename(root / name)
    sync(root)
    _write_latest(root, name)
    return root / name


def _check_complete(saved: SavedState) -> None:
    """Read back what `write_state` wrote, and compare the files that are there with those that it names."""
    if read_state(saved.path) != saved:
        raise CheckpointError(f"{saved.path / STATE_FILE}: does not hold what was written into it")
    unexpected = sorted(inventory(saved.path).keys() - saved.files.keys() - {STATE_FILE})
    if unexpected:
        raise CheckpointError(f"{saved.path}: holds files that were not written: {listed(unexpected)}")


def write_state(saved: SavedState, *, versions: Mapping[str, str]) -> None:
    """Write the state file of the checkpoint in `saved.path`; `read_state` is the inverse."""
    state = {
        "format": _FORMAT,
        "progress": saved.progress,
        "optimizer_steps": saved.optimizer_steps,
        "recipe": saved.recipe,
        "recipe_digest": saved.recipe_digest,
        "model": saved.model,
        "layout": saved.layout,
        "versions": versions,
        "hf_dtypes": saved.hf_dtypes,
        "files": {
            name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in saved.files.items()
        },
    }
    state[_OWN_DIGEST] = _own_digest(state)
    (saved.path / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def _own_digest(state: Mapping[str, Any]) -> str:
    others = {key: value for key, value in state.items() if key != _OWN_DIGEST}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


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
            f"{root / LATEST_FILE}: names {name!r}, which is not there; write another name into it: {_choice(root)}"
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
        raise CheckpointError(
            f"{path}: holds no {STATE_FILE}, so it was not finished; use another checkpoint"
        )
    raise CheckpointError(
        f"{path}: is neither a checkpoint ({STATE_FILE}) nor a run directory with one ({CHECKPOINTS_DIR}/)"
    )


def advice_for(path: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    latest = path.parent / LATEST_FILE
    if latest.is_file():
        return f"write the name of an older checkpoint into {latest}, or start a new run"
    return "copy or make it again"


def read_state(path: Path) -> SavedState:
    """The state of the checkpoint in `path`, with every file there in its full size."""
    file = path / STATE_FILE
    advice = advice_for(path)
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        if state["format"] != _FORMAT:
            raise CheckpointError(f"{file}: format is {state['format']!r}, must be {_FORMAT}; {advice}")
        if state[_OWN_DIGEST] != _own_digest(state):
            raise CheckpointError(f"{file}: was changed after it was saved; {advice}")
        saved = SavedState(
            path=path,
            progress=dict(state["progress"]),
            optimizer_steps=int(state["optimizer_steps"]),
            recipe=dict(state["recipe"]),
            recipe_digest=str(state["recipe_digest"]),
            model=dict(state["model"]),
            layout=dict(state["layout"]),
            files={str(n): Recorded(int(f["bytes"]), f["sha256"]) for n, f in state["files"].items()},
            hf_dtypes=dict(state["hf_dtypes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: not a complete state of a checkpoint: {error!r}; {advice}") from None
    for name, recorded in saved.files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name}: is not there; {advice}")
        found = (path / name).stat().st_size
        if found != recorded.num_bytes:
            raise CheckpointError(
                f"{path / name}: has {found} bytes, must have {recorded.num_bytes}; {advice}"
            )
    return saved


def _published(root: Path) -> list[Path]:
    """Complete checkpoints, the one furthest in the run last."""
    found = [
        (match, path)
        for path in root.glob("stage_*")
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
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
            f"{root / LATEST_FILE}: got {name!r}, must name a checkpoint; write one into it: {_choice(root)}"
        )
    return name


def _choice(root: Path) -> str:
    return listed([path.name for path in _published(root)]) or "none is left"


def _write_latest(root: Path, name: str) -> None:
    partial = root / f".{LATEST_FILE}"
    partial.write_text(name + "\n", encoding="utf-8")
    sync(partial)
    partial.replace(root / LATEST_FILE)
    sync(root)


def inventory(directory: Path) -> dict[str, Recorded]:
    """Every file by its path below `directory`, without digests."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): Recorded(path.stat().st_size, None) for path in files}


def _remove(path: Path) -> None:
    # half a deletion must not look like a checkpoint
    doomed = path.with_name(f".old-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)
