"""A profile is a Chrome trace of the steps asked for: lanes that nest, engines on the trainer's clock."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.errors import LostEngineError
from megatron_rl.parallel.clocks import offset_of
from megatron_rl.platform.spans import Span, Spans
from megatron_rl.recipe.profile_checks import passed_window
from megatron_rl.recipe.schema import ProfileConfig
from megatron_rl.rollout.spans import EngineSpans, begin_spans, fetch_spans
from megatron_rl.train.chrome_trace import ENGINES, TRAINER, Lane, Trace, with_idle
from megatron_rl.train.metrics import Meter
from megatron_rl.train.phases import PhaseFile
from megatron_rl.train.profile import Profile
from megatron_rl.train.schedule_spans import ScheduleSpans
from tests.helpers.chrome_trace import lanes_of, read_trace


class Clock:
    """Nanoseconds that pass when they are told to, and one at every look."""

    def __init__(self, start: int = 0) -> None:
        self.now = start

    def __call__(self) -> int:
        self.now += 1
        return self.now


def _lanes(spans: list[Span]) -> Any:
    return lanes_of(Trace(lanes=[Lane(process=TRAINER, number=0, name="rank 0", spans=spans)]).to_json())


@pytest.mark.parametrize("seed", range(30))
def test_whatever_begins_and_ends_in_any_order_the_lane_nests(seed):
    rng, clock = random.Random(seed), Clock()
    spans = Spans(lambda: clock() * 1000)
    spans.start()

    def some(depth: int) -> None:
        for _ in range(rng.randint(1, 6)):
            match rng.randint(0, 6):
                case 0:
                    spans.begin_step(f"step {rng.randint(0, 3)}")
                case 1:
                    spans.enter(rng.choice(("train", "sync")))
                case 2:
                    spans.leave()
                case 3:
                    spans.begin(rng.choice("ab"))
                case 4:
                    spans.end(rng.choice("ab"))
                case _ if depth < 3:
                    with spans.span("inner"):
                        some(depth + 1)

    some(0)
    lanes = _lanes(spans.stop())
    assert all(event.end >= event.start for event in lanes["rank 0"])


def test_nothing_is_kept_while_nobody_wants_a_trace_and_what_is_open_is_not_of_it():
    spans = Spans(Clock())
    with spans.span("before"):
        spans.enter("train")
        spans.start()
        with spans.span("inside", bytes=3):
            spans.note(tokens=2)
    assert spans.stop() == [Span("inside", 1, 2, {"bytes": 3, "tokens": 2})]
    spans.begin("after")
    spans.end("after")
    assert spans.stop() == []


def test_phases_of_a_step_follow_the_meter_and_lie_in_the_step(tmp_path):
    phases = PhaseFile(tmp_path, 0)
    phases.spans.start()
    for step in (1, 2):
        phases.begin_step("rl", step, "generate")
        meter = Meter(entering=phases.enter, leaving=phases.spans.leave)
        for name in ("generate", "reward"):
            with meter.span(name):
                time.sleep(0.001)
    found = [(event.name, event.inside) for event in _lanes(phases.spans.stop())["rank 0"]]
    assert found == [
        (name, inside)
        for step in ("rl step 1", "rl step 2")
        for name, inside in ((step, ()), ("generate", (step,)), ("reward", (step,)))
    ]


def test_micro_batches_are_numbered_and_pipeline_waits_keep_their_names():
    spans = Spans(Clock())
    spans.start()
    timers = ScheduleSpans(spans)
    timers("forward-backward", log_level=1).start(barrier=True)
    for _ in range(2):
        timers("forward-recv", log_level=2).start()
        timers("forward-recv").stop()
        timers("forward-compute", log_level=2).start()
        spans.note(tokens=7)
        timers("forward-compute").stop()
    timers("backward-compute", log_level=2).start()
    timers("backward-compute").stop()
    timers("embedding-grads-all-reduce", log_level=1).start()
    timers("embedding-grads-all-reduce").stop()
    timers("forward-backward").stop()
    assert [(span.name, dict(span.args)) for span in spans.stop()] == [
        ("forward-recv", {}),
        ("forward", {"microbatch": 0, "tokens": 7}),
        ("forward-recv", {}),
        ("forward", {"microbatch": 1, "tokens": 7}),
        ("backward", {"microbatch": 0}),
    ]


class Replica:
    """The engine's side of a profile as its owner reaches it, perhaps on another machine, whose clock is ahead."""

    def __init__(self, *, ahead_ns: int = 0) -> None:
        self.replica, self.name, self._ahead_ns = 3, "engine replica 3", ahead_ns
        self.spans = EngineSpans(lambda: time.monotonic_ns() + ahead_ns)
        self.waiting, self.running = [0], []
        scheduler = SimpleNamespace(waiting=self.waiting, running=self.running)
        core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))

    def ask(self, cmd: str, *, timeout_s: float, **fields: Any) -> Any:
        assert cmd == "spans"
        answer = json.loads(json.dumps(self.spans.answer(fields)))
        return {**answer, "clock": "of another machine"} if self._ahead_ns else answer

    def generate(self, steps: int) -> None:
        self.waiting.append(0)
        for step in range(steps):
            self.spans.step(self.waiting.clear, self.llm, lambda step=step: step < steps - 1)


@pytest.mark.parametrize("ahead_ns", [0, 5_000_000_000])
def test_steps_of_an_engine_are_put_together_and_are_on_the_owner_s_clock(ahead_ns):
    replica = Replica(ahead_ns=ahead_ns)
    replica.generate(2)
    began = time.monotonic_ns()
    begin_spans(replica, timeout_s=1)
    with replica.spans.command("receive", lambda: False):
        pass
    for steps in (4, 1):
        replica.generate(steps)
        time.sleep(0.03)
    with replica.spans.command("score", lambda: False):
        pass
    ended = time.monotonic_ns()
    lane = fetch_spans(replica, timeout_s=1)
    assert (lane.error_ns > 0) == bool(ahead_ns)
    assert lane.error_ns < 1_000_000_000
    for span in lane.spans:
        assert began - lane.error_ns <= span.start_ns <= span.end_ns <= ended + lane.error_ns
    events = lanes_of(
        Trace(lanes=[Lane(process=ENGINES, number=3, name=lane.name, spans=lane.spans)]).to_json()
    )["engine replica 3"]
    assert [(e.name, e.inside, e.args.get("steps")) for e in events] == [
        ("receive weights", (), None),
        ("generate", (), None),
        ("prefill", ("generate",), 1),
        ("decode", ("generate",), 3),
        ("generate", (), None),
        ("prefill", ("generate",), 1),
        ("score", (), None),
    ]
    # fetched is gone
    assert fetch_spans(replica, timeout_s=1).spans == []


def test_the_quickest_answer_tells_the_offset_best_and_bounds_its_error():
    found = offset_of([(0, 1_000_500, 2_000), (10_000, 1_010_030, 10_100), (20_000, 1_020_900, 21_000)])
    assert (found.offset_ns, found.error_ns) == (999_980, 50)


def test_gaps_of_a_watched_lane_are_idleness():
    ms = 1_000_000
    spans = [
        Span("generate", 5 * ms, 9 * ms),
        Span("decode", 6 * ms, 9 * ms),
        Span("score", 9 * ms + 10, 20 * ms),
    ]
    lane = Lane(process=ENGINES, number=0, name="engine", spans=spans, watched_ns=(0, 30 * ms))
    assert [(s.name, s.start_ns, s.end_ns) for s in with_idle(lane) if s.name == "idle"] == [
        ("idle", 0, 5 * ms),
        ("idle", 20 * ms, 30 * ms),
    ]


def _profile(
    place: Any, config: ProfileConfig | None, spans: Spans, say: Callable[[str], None] = pytest.fail
) -> Profile:
    return Profile(config, place, spans, rank=0, group=None, say=say)


def _run(profile: Profile, spans: Spans, numbers: range) -> list[int]:
    """The steps after which something was written."""
    written = []
    for number in numbers:
        profile.begin_step(number)
        spans.begin_step(f"step {number}")
        torch.ones(2).add(1)
        if profile.end_step(number) is not None:
            written.append(number)
    return written


def test_the_window_is_written_once_and_another_start_writes_beside_it(tmp_path):
    spans, config = Spans(), ProfileConfig(first_step=3, steps=2)
    assert _run(_profile(tmp_path, config, spans), spans, range(1, 9)) == [4]
    (lane,) = read_trace(tmp_path / "profile" / "trace.json.gz").values()
    assert [event.name for event in lane] == ["step 3", "step 4"]
    # stopped after step 3 and resumed: both parts are there
    first = _profile(tmp_path / "stopped", config, spans)
    assert _run(first, spans, range(1, 4)) == []
    assert first.finish() == tmp_path / "stopped" / "profile" / "trace.json.gz"
    assert _run(_profile(tmp_path / "stopped", config, spans), spans, range(4, 6)) == [4]
    (rest,) = read_trace(tmp_path / "stopped" / "profile" / "trace.2.json.gz").values()
    assert [event.name for event in rest] == ["step 4"]
    # resumed behind the window, or without one
    assert _run(_profile(tmp_path / "late", config, spans), spans, range(5, 9)) == []
    assert _run(_profile(tmp_path / "late", None, spans), spans, range(1, 9)) == []
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize("operators", [False, True])
def test_what_cannot_be_written_is_said_and_ends_nothing(operators, tmp_path):
    (tmp_path / "profile").write_text("a file")
    spans, config, said = Spans(), ProfileConfig(first_step=1, steps=1, operators=operators), []
    assert _run(_profile(tmp_path, config, spans, said.append), spans, range(1, 4)) == []
    names = ["operators_rank_0.json.gz"] * operators + ["trace.json.gz"]
    assert [line.partition(" was not written (")[0] for line in said] == [
        f"run.profile: {tmp_path / 'profile' / name}" for name in names
    ]
    assert not spans.is_on


def test_a_window_that_was_passed_before_a_resume_is_said_with_the_step_to_ask_for():
    window = ProfileConfig(first_step=3, steps=2)
    assert passed_window(window, 3) is passed_window(window, 0) is passed_window(None, 9) is None
    assert (passed_window(window, 4) or "").startswith("run.profile: steps 3 to 4 were made before")
    assert (passed_window(window, 9) or "").endswith("unless first_step is 10 or more")


def test_an_engine_that_comes_and_goes_inside_the_window_has_one_lane(tmp_path):
    class Engine:
        def __init__(self) -> None:
            self.replica = Replica()

        def begin_spans(self) -> None:
            begin_spans(self.replica, timeout_s=1)

        def fetch_spans(self) -> list[Any]:
            return [fetch_spans(self.replica, timeout_s=1)]

    spans = Spans()
    profile = _profile(tmp_path, ProfileConfig(first_step=1, steps=3), spans)
    for number in (1, 2, 3):
        profile.begin_step(number)
        if number > 1:
            engine = Engine()
            with profile.engines(engine):
                engine.replica.generate(2)
        profile.end_step(number)
    lanes = read_trace(tmp_path / "profile" / "trace.json.gz")
    assert [event.name for event in lanes["engine replica 3"]].count("generate") == 2
    assert len(lanes) == 2


def test_a_lost_engine_has_no_lane_and_ends_nothing(tmp_path):
    class Lost:
        def begin_spans(self) -> None:
            raise LostEngineError("engine replica 0: lost")

        def fetch_spans(self) -> list[Any]:
            raise LostEngineError("engine replica 0: lost")

    spans = Spans()
    profile = _profile(tmp_path, ProfileConfig(first_step=1, steps=1), spans)
    with profile.engines(Lost()):
        assert _run(profile, spans, range(1, 3)) == [1]
    assert list(read_trace(tmp_path / "profile" / "trace.json.gz").values()) != []


def test_operators_of_torch_are_written_besides_where_asked_for(tmp_path):
    spans = Spans()
    _run(_profile(tmp_path, ProfileConfig(first_step=1, steps=1, operators=True), spans), spans, range(1, 3))
    with gzip.open(tmp_path / "profile" / "operators_rank_0.json.gz") as stream:
        names = {event.get("name") for event in json.load(stream)["traceEvents"]}
    assert "aten::add" in names
