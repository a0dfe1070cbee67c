"""What an engine process does when, for the profile of a run: kept there, fetched by the owner of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.parallel.clocks import ClockOffset, offset_of
from megatron_rl.platform.spans import Span, Spans, clock_id
from megatron_rl.rollout.wire import Message

# steps of one kind this close to each other are one span
_MERGE_NS = 20_000_000
_ROUNDS = 5
_NAMES = {
    "receive": "receive weights",
    "commit": "commit weights",
    "score": "score",
    "init_transfer": "connect",
}


class EngineSpans:
    """On the side of the engine: `generate` from the first step of requests to the last, and in it `prefill` (steps
    that take up prompts, whatever else they do) and `decode`; the other commands under names of their own."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._spans = Spans(clock)
        self._steps: list[Span] = []
        self._generate_ns: tuple[int, int] | None = None  # of the one that is open
        self._generate_at = 0  # where it goes among the steps: before its own

    @property
    def is_on(self) -> bool:
        return self._spans.is_on

    def answer(self, message: Message) -> Message:
        """To the command `spans`: `record` true begins, false ends and gives what there is, null asks for the time."""
        spans: list[Span] = []
        if message["record"] is not None and self.is_on:
            self._close_generate()
            spans, self._steps = [*self._spans.stop(), *self._steps], []
        if message["record"]:
            self._spans.start()
        wire = [[span.name, span.start_ns, span.end_ns, dict(span.args)] for span in spans]
        return {"now_ns": self._clock(), "clock": clock_id(), "spans": wire}

    @contextmanager
    def command(self, cmd: str, is_busy: Callable[[], bool]) -> Iterator[None]:
        """Around a command."""
        if not self.is_on or cmd not in _NAMES:
            yield
            return
        try:
            with self._spans.span(_NAMES[cmd]):
                yield
        finally:
            if self._generate_ns is not None:
                # it steps whatever runs
                self._generate_ns = self._generate_ns[0], self._clock()
                if not is_busy():
                    self._close_generate()

    def step(self, run: Callable[[], None], llm: Any, is_busy: Callable[[], bool]) -> None:
        """`run` makes one step of the requests that `llm` has."""
        if not self.is_on:
            run()
            return
        name, start = "prefill" if _takes_up_prompts(llm) else "decode", self._clock()
        try:
            run()
        finally:
            end = self._clock()
            last = self._steps[-1] if self._steps else None
            if (
                last is not None
                and self._generate_ns is not None
                and last.name == name
                and last.end_ns == self._generate_ns[1]
                and start - last.end_ns < _MERGE_NS
            ):
                busy = int(last.args["busy_us"]) + (end - start) // 1000
                args = {"steps": int(last.args["steps"]) + 1, "busy_us": busy}
                self._steps[-1] = Span(name, last.start_ns, end, args)
            else:
                self._steps.append(Span(name, start, end, {"steps": 1, "busy_us": (end - start) // 1000}))
            if self._generate_ns is None:
                self._generate_ns, self._generate_at = (start, end), len(self._steps) - 1
            self._generate_ns = self._generate_ns[0], end
            if not is_busy():
                self._close_generate()

    def _close_generate(self) -> None:
        if self._generate_ns is not None:
            self._steps.insert(self._generate_at, Span("generate", *self._generate_ns))
        self._generate_ns = None


def _takes_up_prompts(llm: Any) -> bool:
    """Whether the next step of vLLM, which runs in this process, computes prompts."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return bool(scheduler.waiting) or any(
        request.num_computed_tokens < request.num_prompt_tokens for request in scheduler.running
    )


class Asked(Protocol):
    """A replica as its owner sees it."""

    @property
    def replica(self) -> int: ...

    @property
    def name(self) -> str: ...

    def ask(self, cmd: str, *, timeout_s: float, **fields: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLane:
    """What one replica did, in the owner's time, right within `error_ns`."""

    replica: int
    name: str  # with host and process
    error_ns: int
    spans: Sequence[Span]


def begin_spans(replica: Asked, *, timeout_s: float) -> None:
    """From now on the replica keeps its spans; what it has kept goes."""
    replica.ask("spans", timeout_s=timeout_s, record=True)


def fetch_spans(
    replica: Asked, *, timeout_s: float, clock: Callable[[], int] = time.monotonic_ns
) -> EngineLane:
    """End keeping spans. None of a replica that was started meanwhile."""
    answer = replica.ask("spans", timeout_s=timeout_s, record=False)
    offset = ClockOffset()
    if answer["clock"] != clock_id():
        rounds = []
        for _ in range(_ROUNDS):
            asked = clock()
            theirs = replica.ask("spans", timeout_s=timeout_s, record=None)["now_ns"]
            rounds.append((asked, theirs, clock()))
        offset = offset_of(rounds)
    shift = offset.offset_ns
    spans = [Span(name, start - shift, end - shift, args) for name, start, end, args in answer["spans"]]
    return EngineLane(replica=replica.replica, name=replica.name, error_ns=offset.error_ns, spans=spans)
