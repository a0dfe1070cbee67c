"""Checkpoints of a run: model, optimizer, generators and progress, saved together and resumed in any layout.

A save has four phases: agree on what goes where, write and compare, publish, retain. Where the recipe asks for it,
only the first and a copy into memory hold the run up; a writer process beside each rank does the second, and the
third and fourth come at a later step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rl.errors import CheckpointError
from megatron_rl.model import checkpoint_files as files
from megatron_rl.model import checkpoint_load as load
from megatron_rl.model.background import Background
from megatron_rl.model.checkpoint_files import MODEL_DIR, OPTIMIZER_DIR, Recorded, SavedState
from megatron_rl.model.checkpoint_match import check_same_recipe, flat_recipe, flat_spec, recipe_digest
from megatron_rl.model.checkpoint_plan import (
    METADATA_FILE,
    Entry,
    RankFile,
    check_index,
    plan_file,
    plan_index,
    side_files,
)
from megatron_rl.model.checkpoint_process import StagingBuffer, WriterProcess
from megatron_rl.model.checkpoint_shards import Trainable, model_state, owned_model, owned_optimizer
from megatron_rl.model.checkpoint_writer import Written, write_verified
from megatron_rl.model.generators import generator_states
from megatron_rl.model.load_report import LoadReport
from megatron_rl.model.together import Together
from megatron_rl.recipe.schema import Recipe

__all__ = ["CheckpointStore", "SavedState", "Trainable"]

_TRIES = 20  # to remove what others may still write into
_INTACT = "; nothing was published, earlier checkpoints are intact"

Entries = dict[str, tuple[Entry, ...]]  # of this rank's file in each directory
Contents = dict[str, Sequence[bytes | Tensor]]  # pieces of each file, by its path in the checkpoint


class CheckpointStore:
    """The checkpoints of one run below `root`, a directory that every rank sees. A context manager.

    `keep` newest ones stay. `timeout_s` bounds every wait for a rank, a disk or a writer. With `asynchronous`, `save`
    returns once the state is copied; `poll` at every step and `finish` at the end publish what was written since.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        rank: int,
        recipe: Recipe,
        timeout_s: float,
        asynchronous: bool = False,
    ) -> None:
        self._root, self._keep, self._rank = root, keep, rank
        self._recipe = flat_recipe(recipe)
        self._together = Together(str(root), rank=rank, timeout_s=timeout_s)
        self._asynchronous = asynchronous
        self._writer: WriterProcess | None = None
        self._staging = StagingBuffer()
        # a save that is being written, its files not known yet; then, on rank 0, what publishes it
        self._pending: SavedState | None = None
        self._is_written = False
        self._publishing: Background[None] | None = None
        # then older checkpoints are deleted, on rank 0
        self._is_retaining = False
        self._retaining: Background[None] | None = None
        self._entries: list[Entries] = []  # of every rank, as they were last planned
        self._index: dict[str, tuple[bytes, Metadata]] = {}  # of each directory; on rank 0
        self._report: LoadReport | None = None

    def __enter__(self) -> CheckpointStore:
        if self._asynchronous:
            self._start_writer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the writer. A save that was not finished is given up and its files are removed. Not collective."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._staging.close()
        if self._pending is not None:
            self._forget()
        with suppress(Exception):
            self._wait_for_retaining()

    def latest(self) -> SavedState | None:
        """The checkpoint to resume from, None where none was published. Not collective.

        Raises CheckpointError for one with a file absent or cut short, and for one of another recipe.
        """
        saved = files.find_latest(self._root)
        if saved is not None:
            check_same_recipe(saved, self._recipe)
        return saved

    def save(
        self, policy: Trainable, progress: Mapping[str, Any], *, extra: Mapping[str, bytes] | None = None
    ) -> None:
        """Write a checkpoint and publish it at once or not at all. Collective.

        `progress` is plain JSON with the numbers `stage` and `step`; rank 0's is stored, and so
        is `extra`, whole files by name, which `checkpoint_files.read_extra` reads. An optimizer that has not stepped
        has no state yet and none is stored. When any rank fails, every rank raises CheckpointError;
        the unfinished checkpoint is removed (also on Ctrl-C or SIGTERM), earlier ones stay.

        An asynchronous save first waits for the one before it. Its own failure comes with the next `poll`, `save` or
        `finish`.
        """
        self.finish()
        name = files.checkpoint_name(progress)
        try:
            self._run("making room", lambda: self._start(policy, progress, name), rank=0)
            contents = self._plan(policy)
            if self._rank == 0:
                contents |= {name: [content] for name, content in (extra or {}).items()}
            self._pending = self._state(policy, progress, self._root / f".tmp-{name}")
            if self._asynchronous:
                self._run("copying state", lambda: self._submit(contents))
            else:
                self._start_publishing(self._run("writing", lambda: self._write(contents)))
                self._advance()
        except BaseException:
            self._give_up()
            raise

    @property
    def is_saving(self) -> bool:
        """Whether a save is still being written."""
        return self._pending is not None

    def poll(self) -> None:
        """Take the save that is being written a phase further if every rank is ready; waits for no disk. Collective."""
        if self._pending is None:
            return
        if self._is_written:
            is_ready = self._publishing is None or self._publishing.is_done()
        else:
            assert self._writer is not None
            is_ready = self._writer.is_settled()
        if self._together.agree("asking the writers", is_ready=is_ready):
            self._advance()

    def finish(self) -> None:
        """Wait for the save that is being written, if any, until it is published and older ones are deleted.
        Collective."""
        while self._pending is not None:
            self._advance()
        if self._is_retaining:
            self._is_retaining = False
            self._together.run("deleting older checkpoints", self._wait_for_retaining, rank=0)

    def load_model(self, policy: Trainable, saved: SavedState) -> None:
        """Fill the model chunks from a checkpoint of any layout. Collective.

        Comes before the optimizer is built, which copies the weights. Raises CheckpointError naming what is
        missing, unexpected, changed since it was saved or unreadable, and for a checkpoint of another model.
        """
        self._report = LoadReport(saved=saved, layout=asdict(policy.layout))
        load.load_model(policy, saved, self._together, self._report)

    def load_optimizer(self, policy: Trainable, saved: SavedState) -> None:
        """Fill a new optimizer, its step count included, from a checkpoint of any layout. Collective.

        One saved before its first step leaves the new one as it is. Otherwise raises CheckpointError when the
        checkpoint holds none or another one: it is never started anew.
        """
        report = self._report or LoadReport(saved=saved, layout=asdict(policy.layout))
        load.load_optimizer(policy, saved, self._together, report)

    def load_generators(self, policy: Trainable, saved: SavedState) -> None:
        """Continue every random generator where the checkpoint left it, in the same layout; in another one they start
        anew from the run's seed and the step. Collective."""
        report = self._report or LoadReport(saved=saved, layout=asdict(policy.layout))
        load.load_generators(policy, saved, self._together, report, rank=self._rank)

    def take_report(self) -> LoadReport | None:
        """What was loaded since the last call; None: nothing."""
        report, self._report = self._report, None
        return report

    def _run(self, what: str, action: Any, *, rank: int | None = None) -> list[Any]:
        return self._together.run(what, action, rank=rank, after=_INTACT)

    def _start(self, policy: Trainable, progress: Mapping[str, Any], name: str) -> None:
        if json.loads(json.dumps(progress)) != progress:
            raise CheckpointError(f"progress: got {progress!r}, must be plain JSON: text keys, no tuples")
        directory = files.start_checkpoint(self._root, name)
        for part in [MODEL_DIR, files.GENERATORS_DIR] + [OPTIMIZER_DIR] * (policy.optimizer.num_steps > 0):
            (directory / part).mkdir()

    def _plan(self, policy: Trainable) -> Contents:
        """What this rank writes. Ranks tell each other only when that changes, which is once a stage."""
        owned: dict[str, RankFile] = {}
        before = self._entries[self._rank] if self._entries else None

        def gather() -> Entries | None:
            owned.update(_owned_files(policy))
            entries = {part: file.entries for part, file in owned.items()}
            return None if entries == before else entries

        changed = self._run("gathering state", gather)
        if any(entries is not None for entries in changed):
            known = self._entries or [{}] * len(changed)
            # forgotten first: a plan that fails is not the one to compare with
            self._entries = []
            planned = [old if new is None else new for old, new in zip(known, changed, strict=True)]
            self._run("checking state", lambda: self._plan_indices(planned), rank=0)
            self._entries = planned
        contents: Contents = {f"{part}/{_file_name(self._rank)}": file.pieces for part, file in owned.items()}
        contents[files.generators_file(self._rank)] = [json.dumps(generator_states()).encode()]
        if self._rank == 0:
            for part, (index, _) in self._index.items():
                for name, content in {METADATA_FILE: index, **side_files()}.items():
                    contents[f"{part}/{name}"] = [content]
        return contents

    def _plan_indices(self, planned: Sequence[Entries]) -> None:
        self._index = {
            part: plan_index({_file_name(rank): entries[part] for rank, entries in enumerate(planned)})
            for part in planned[0]
        }

    def _state(self, policy: Trainable, progress: Mapping[str, Any], directory: Path) -> SavedState:
        return SavedState(
            path=directory,
            progress=dict(progress),
            optimizer_steps=policy.optimizer.num_steps,
            recipe=self._recipe,
            recipe_digest=recipe_digest(self._recipe, stage=int(progress["stage"])),
            model=flat_spec(policy.spec),
            layout=asdict(policy.layout),
            files={},
        )

    def _write(self, contents: Contents) -> dict[str, Written]:
        """Synchronously: from where the state lies, in this process."""
        assert self._pending is not None
        directory = self._pending.path

        def write() -> dict[str, Written]:
            return {
                name: write_verified(directory / name, lambda pieces=pieces: _views(pieces))  # type: ignore[misc]
                for name, pieces in contents.items()
            }

        return Background(write, what=f"writing {directory}").result(self._together.timeout_s)

    def _submit(self, contents: Contents) -> None:
        assert self._pending is not None
        writer = self._writer or self._start_writer()
        ranges = self._staging.fill(contents)
        writer.submit(
            self._pending.path, ranges, memory=self._staging.descriptor, timeout_s=self._together.timeout_s
        )

    def _start_writer(self) -> WriterProcess:
        self._writer = WriterProcess(rank=self._rank)
        return self._writer

    def _advance(self) -> None:
        """The next phase of the save that is being written, and the wait for it."""
        try:
            if not self._is_written:
                assert self._writer is not None
                self._start_publishing(self._run("writing", self._writer.result))
            else:
                self._run("publishing", self._wait_for_publishing, rank=0)
                self._pending, self._publishing, self._is_written = None, None, False
                self._start_retaining()
        except BaseException:
            self._give_up()
            raise

    def _start_publishing(self, written: Sequence[Mapping[str, Written] | None]) -> None:
        """In a thread of rank 0: renaming takes no time, but waiting for the disk and deleting old files do.

        `written` are the files of every rank.
        """
        assert self._pending is not None
        recorded = {
            name: Recorded(file.num_bytes, file.sha256)
            for of_rank in written
            for name, file in (of_rank or {}).items()
        }
        complete = replace(self._pending, files=recorded)
        self._is_written = True
        if self._rank == 0:
            self._publishing = Background(lambda: self._publish(complete), what=f"publishing {complete.path}")

    def _wait_for_publishing(self) -> None:
        assert self._publishing is not None
        self._publishing.result(self._together.timeout_s)

    def _publish(self, complete: SavedState) -> None:
        for part, (_, meant) in self._index.items():
            sizes = {Path(n).name: f.num_bytes for n, f in complete.files.items() if n.startswith(f"{part}/")}
            check_index(complete.path / part, meant, sizes)
        files.publish_checkpoint(
            complete, versions={package: version(package) for package in ("torch", "megatron-core")}
        )

    def _start_retaining(self) -> None:
        """In a thread of rank 0: freeing a large file takes as long as writing half of it."""
        self._is_retaining = True
        if self._rank == 0:
            what = f"deleting older checkpoints of {self._root}"
            self._retaining = Background(lambda: files.retain_newest(self._root, self._keep), what=what)

    def _wait_for_retaining(self) -> None:
        retaining, self._retaining = self._retaining, None
        if retaining is not None:
            retaining.result(self._together.timeout_s)

    def _give_up(self) -> None:
        """After a failure: no writer goes on, nothing of the save stays."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._forget()

    def _forget(self) -> None:
        # what has begun to be published becomes a checkpoint
        for unfinished in (self._publishing, self._retaining):
            if unfinished is not None:
                with suppress(Exception):
                    unfinished.result(self._together.timeout_s)
        self._pending, self._publishing, self._is_written = None, None, False
        self._retaining, self._is_retaining = None, False
        if self._rank == 0:
            _remove_leftovers(self._root)


def _remove_leftovers(root: Path) -> None:
    """As far as it goes: the failure that led here is the one to report."""
    for _ in range(_TRIES):
        try:
            files.remove_leftovers(root)
        except OSError:
            # a writer that is just being ended may still have made a file
            time.sleep(0.05)
        else:
            return


def _owned_files(policy: Trainable) -> dict[str, RankFile]:
    """This rank's file in each directory."""
    state = model_state(policy)
    planned = {}
    if policy.optimizer.num_steps > 0:
        planned[OPTIMIZER_DIR] = plan_file(owned_optimizer(policy.optimizer.inner, state))
    # consumes the state
    planned[MODEL_DIR] = plan_file(owned_model(state))
    return planned


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _views(pieces: Sequence[bytes | Tensor]) -> Iterator[memoryview]:
    for piece in pieces:
        if isinstance(piece, Tensor):
            # from a device: one tensor at a time comes to the host
            yield piece.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        else:
            yield memoryview(piece)
