"""The profile of a run: some of its steps as a Chrome trace with a lane for every rank and engine replica.

`run.profile` of the recipe asks for it. Every rank keeps its spans in memory; at the end of the window rank 0 gathers
those of all ranks and engines, on its own clock, and writes `profile/trace.json.gz` of the run directory.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_rl.errors import EngineError
from megatron_rl.parallel.clocks import offset_to_first
from megatron_rl.parallel.collectives import all_gather_object
from megatron_rl.platform.device import has_accelerator
from megatron_rl.platform.spans import Span, Spans, clock_id
from megatron_rl.recipe.schema import ProfileConfig
from megatron_rl.rollout.spans import EngineLane
from megatron_rl.train.chrome_trace import ENGINES, TRAINER, Lane, Trace

PROFILE_DIR = "profile"
TRACE_NAME = "trace.json.gz"


class Profiled(Protocol):
    """An engine of which replicas can be asked what they do."""

    def begin_spans(self) -> None: ...

    def fetch_spans(self) -> list[EngineLane]: ...


class Profile:
    """Of one rank. `begin_step` and `end_step` come in pairs; those of the last step of the window are collective, and
    so is `finish`. `group` holds every rank and works on the CPU; None: this process is alone.

    A window that a stop cuts short is written as far as it got, and a run that goes on inside it writes the rest beside
    it: `trace.2.json.gz`. A run that ends by an error writes nothing. `say` is told what could not be written: a
    picture is no reason to end a run.
    """

    def __init__(
        self,
        config: ProfileConfig | None,
        run_dir: Path,
        spans: Spans,
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._directory, self._spans = config, run_dir / PROFILE_DIR, spans
        self._rank, self._group, self._say = rank, group, say
        self._engine: Profiled | None = None
        self._engine_since: int | None = None
        self._engine_lanes: list[Lane] = []
        self._operators: torch.profiler.profile | None = None
        self._steps: list[int] = []

    def begin_step(self, number: int) -> None:
        """`number` counts from 1 over the stages of the recipe."""
        config = self._config
        if config is None or not config.first_step <= number < config.first_step + config.steps:
            return
        if not self._spans.is_on:
            self._spans.start()
            self._begin_engine()
            if config.operators:
                self._operators = torch.profiler.profile(activities=_activities())
                self._operators.start()
        self._steps.append(number)

    def end_step(self, number: int) -> Path | None:
        """What was written, on rank 0 at the end of the window."""
        config = self._config
        if config is None or not self._spans.is_on or number < config.first_step + config.steps - 1:
            return None
        return self.finish()

    def finish(self) -> Path | None:
        """Write what there is, if a window is open; what was written, on rank 0."""
        if not self._spans.is_on:
            return None
        self._end_engine()
        spans = self._spans.stop()
        if self._operators is not None:
            self._operators.stop()
            self._write(f"operators_rank_{self._rank}.json.gz", self._write_operators)
            self._operators = None
        lanes = all_gather_object(self._lane(spans), self._group)
        engines, self._engine_lanes = self._engine_lanes, []
        steps, self._steps = self._steps, []
        if self._rank:
            return None
        about = {
            "first_step": steps[0],
            "last_step": steps[-1],
            "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        return self._write(TRACE_NAME, Trace(lanes=[*lanes, *engines], about=about).write)

    def _write(self, name: str, write: Callable[[Path], None]) -> Path | None:
        """What was written."""
        try:
            path = _unused(self._directory / name)
            self._directory.mkdir(parents=True, exist_ok=True)
            write(path)
        # torch has errors of its own for a file that it cannot write
        except (OSError, RuntimeError) as error:
            self._say(f"run.profile: {self._directory / name} was not written ({error}); the run goes on")
            return None
        return path

    def _write_operators(self, path: Path) -> None:
        assert self._operators is not None
        self._operators.export_chrome_trace(str(path))

    def _lane(self, spans: Sequence[Span]) -> Lane:
        """In rank 0's time. Collective."""
        offset = offset_to_first(clock_id(), rank=self._rank, group=self._group)
        shift = offset.offset_ns
        return Lane(
            process=TRAINER,
            number=self._rank,
            name=f"rank {self._rank} on {socket.gethostname()} (pid {os.getpid()})",
            spans=[Span(s.name, s.start_ns + shift, s.end_ns + shift, s.args) for s in spans],
            error_ns=offset.error_ns,
        )

    @contextmanager
    def engines(self, engine: Profiled | None) -> Iterator[None]:
        """While the engine of a stage runs; `engine` on the driving rank alone."""
        self._engine = engine
        if self._spans.is_on:
            self._begin_engine()
        try:
            yield
            self._end_engine()
        finally:
            self._engine = self._engine_since = None

    def _begin_engine(self) -> None:
        if self._engine is None:
            return
        # one that is lost is found and replaced by whoever needs it next: a picture is no reason to end a run
        with suppress(EngineError):
            self._engine.begin_spans()
        self._engine_since = time.monotonic_ns()

    def _end_engine(self) -> None:
        since, self._engine_since = self._engine_since, None
        if self._engine is None or since is None:
            return
        until = time.monotonic_ns()
        try:
            found = self._engine.fetch_spans()
        except EngineError:
            return  # lost, see above
        known = {lane.number: lane for lane in self._engine_lanes}
        for lane in found:
            before = known.get(lane.replica)
            known[lane.replica] = Lane(
                process=ENGINES,
                number=lane.replica,
                name=lane.name,
                spans=[*(before.spans if before else ()), *lane.spans],
                error_ns=max(lane.error_ns, before.error_ns if before else 0),
                watched_ns=(before.watched_ns[0] if before and before.watched_ns else since, until),
            )
        self._engine_lanes = list(known.values())


def _activities() -> list[Any]:
    cpu, cuda = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
    return [cpu, cuda] if has_accelerator() else [cpu]


def _unused(path: Path) -> Path:
    """`path`, or with a number where an earlier start of the run wrote one: trace.json.gz, trace.2.json.gz."""
    stem, _, ending = path.name.partition(".")
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{stem}.{number}.{ending}")
    return found
