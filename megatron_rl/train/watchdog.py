"""Ranks watch over each other: one that gives no sign of life, or is waited for in vain, ends the run.

Every rank writes a beat about once a second to the store where the group met; rank 0 watches all others, and they
watch rank 0. Before the end every rank that still can writes the stacks of its threads.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType

from torch.distributed import PrefixStore, Store, TCPStore

from megatron_rl.errors import LostPeerError
from megatron_rl.parallel.collectives import is_lost_peer
from megatron_rl.train.phases import Phase, others_are, read_phase
from megatron_rl.train.process_state import ProcessState, process_state
from megatron_rl.train.rank_process import RankProcess

BEAT_S = 1.0
# from a verdict to the end: every rank hears of it, and writes its stacks
VERDICT_S = 2.5 * BEAT_S
# a process that holds its interpreter for a long call in C is at work: it runs, or has used some of the CPU
BUSY_FRAC = 0.01

_VERDICT = "verdict"


class Silence:
    """How long one rank has been silent, counted in the watcher's own turns.

    A watcher that did not run itself (a suspended machine, a debugger) does not count that time.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._beat: bytes | None = None
        self._checked_at: float | None = None

    def observe(self, beat: bytes | None, *, now: float) -> float:
        """Seconds of silence so far, where `beat` is the last that came and `now` a monotonic clock."""
        passed = 0.0 if self._checked_at is None else now - self._checked_at
        self._checked_at = now
        if beat != self._beat:
            self._beat, self.seconds = beat, 0.0
        else:
            self.seconds += min(passed, 2 * BEAT_S)
        return self.seconds


class Watchdog:
    """A context manager on every rank, inside which the ranks work together. One process alone needs none."""

    def __init__(self, process: RankProcess, *, address: str, port: int, silence_timeout_s: float) -> None:
        self._process, self._silence_timeout_s = process, silence_timeout_s
        self._address, self._port = address, port
        self._rank, self._world_size = process.place.rank, process.place.world_size
        self._watched = range(1, self._world_size) if self._rank == 0 else range(1)
        self._beats: dict[int, bytes] = {}
        self._closing = threading.Event()
        # what this rank says of the run, and what another one said
        self._to_tell: str | None = None
        self._told: str | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Watchdog:
        if self._world_size > 1:
            for action in (self._beat, self._judge):
                thread = threading.Thread(target=action, name=f"watchdog{action.__name__}", daemon=True)
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = None
        if self._world_size > 1 and error is not None and is_lost_peer(error):
            lost = self._explain(error)
        self._closing.set()
        for thread in self._threads:
            # one that waits for a store that does not answer is left alone
            thread.join(timeout=3 * BEAT_S)
        if lost is not None:
            raise LostPeerError(lost) from error

    def _explain(self, error: BaseException) -> str:
        """Why a peer seems lost, with where every rank is; has all ranks write their stacks first."""
        own = self._process.phases.current
        self._process.stacks.dump(f"{own}: {(str(error) or type(error).__name__).splitlines()[0]}")
        self._to_tell = json.dumps({"rank": self._rank, "message": ""})
        phases = {rank: read_phase(self._process.run_dir, rank) for rank in range(self._world_size)}
        phases[self._rank] = own
        time.sleep(VERDICT_S)
        return f"{error}\n{others_are(self._rank, phases)}\n{self._where_stacks_are()}"

    def _where_stacks_are(self) -> str:
        return f"stacks of all threads: {self._process.log_dir}/stacks_rank_*.txt"

    def _beat(self) -> None:
        """Write this rank's beat, read those that it watches, pass verdicts on."""
        store = self._connect()
        number = 0
        while not self._closing.wait(BEAT_S if number else 0.0):
            number += 1
            with suppress(RuntimeError):
                store = store or self._connect()
                if store is None:
                    continue
                store.set(f"beat/{self._rank}", json.dumps([number, asdict(self._process.phases.current)]))
                for rank in self._watched:
                    if store.check([f"beat/{rank}"]):
                        self._beats[rank] = store.get(f"beat/{rank}")
                if self._to_tell is not None:
                    store.set(_VERDICT, self._to_tell)
                elif self._told is None and store.check([_VERDICT]):
                    self._told = store.get(_VERDICT).decode()
        with suppress(RuntimeError):
            if store is not None and self._to_tell is None:
                store.set(f"beat/{self._rank}", "left")

    def _connect(self) -> Store | None:
        """A connection of its own: on the group's, somebody may be waiting. None while nobody listens."""
        with suppress(RuntimeError):
            patience = timedelta(seconds=max(10 * BEAT_S, self._silence_timeout_s))
            store = TCPStore(
                self._address, self._port, is_master=False, wait_for_workers=False, timeout=patience
            )
            return PrefixStore("watchdog", store)
        return None

    def _judge(self) -> None:
        silences = {rank: Silence() for rank in self._watched}
        used: dict[int, float] = {}
        while not self._closing.wait(BEAT_S):
            if self._told is not None:
                self._obey(json.loads(self._told))
                return
            for rank, silence in silences.items():
                beat = self._beats.get(rank)
                if beat == b"left":
                    continue
                seconds = silence.observe(beat, now=time.monotonic())
                if seconds < 2 * BEAT_S:
                    used.pop(rank, None)
                    continue
                phase = self._phase_of(rank, beat)
                state = process_state(phase.pid) if phase and phase.host == socket.gethostname() else None
                used.setdefault(rank, state.cpu_s if state else 0.0)
                if seconds > self._silence_timeout_s and not is_busy(state, used[rank], seconds):
                    self._condemn(rank, phase, state, seconds)
                    return

    def _phase_of(self, rank: int, beat: bytes | None) -> Phase | None:
        # the file is newer where both can be read
        on_disk = read_phase(self._process.run_dir, rank)
        return on_disk if on_disk or beat is None else Phase(**json.loads(beat)[1])

    def _condemn(self, rank: int, phase: Phase | None, state: ProcessState | None, seconds: float) -> None:
        message = silence_message(rank, phase, state, seconds, timeout_s=self._silence_timeout_s)
        message += f"\n{self._where_stacks_are()}"
        self._to_tell = json.dumps({"rank": self._rank, "message": message})
        if state is not None and phase is not None:
            with suppress(ProcessLookupError, PermissionError):
                if read_phase(self._process.run_dir, rank) == phase:
                    # it writes its stacks as soon as it goes on, whatever holds its interpreter
                    os.kill(phase.pid, signal.SIGUSR2)
                os.kill(phase.pid, signal.SIGCONT)
        self._process.stacks.dump(message.splitlines()[0])
        time.sleep(VERDICT_S)
        self._process.end(message, exit_code=1)

    def _obey(self, verdict: Mapping[str, str]) -> None:
        """What another rank said ends this one as well."""
        own = self._process.phases.current
        self._process.stacks.dump(f"{own}: rank {verdict['rank']} ends the run")
        time.sleep(VERDICT_S)
        message = verdict["message"]
        if not message:
            # this rank may know the cause: it has the time of a collective's failure to say it
            time.sleep(VERDICT_S)
            message = f"rank {verdict['rank']} waited for this one in vain ({own})"
            self._process.end(message, exit_code=1, is_consequence=True)
        self._process.end(message, exit_code=1)


def is_busy(state: ProcessState | None, cpu_s_before: float, seconds: float) -> bool:
    """Whether a process, seen from its own machine (else None), was at work during these seconds of silence."""
    if state is None or state.is_stopped:
        return False
    return state.letter == "R" or state.cpu_s - cpu_s_before > BUSY_FRAC * seconds


def silence_message(
    rank: int, phase: Phase | None, state: ProcessState | None, seconds: float, *, timeout_s: float
) -> str:
    """Which rank is silent, where it was last seen, and what its process is doing as far as that can be seen."""
    if phase is None:
        return f"rank {rank} has never been heard of ({seconds:.0f} s; run.silence_timeout_s = {timeout_s:g})"
    seen = f"; its process is {state}" if state is not None else ""
    return (
        f"rank {rank} (pid {phase.pid} on {phase.host}) has been silent for {seconds:.0f} s "
        f"(run.silence_timeout_s = {timeout_s:g}): {phase}{seen}"
    )
