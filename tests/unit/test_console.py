"""The live view: one line per step, silent on other ranks."""

import io

import pytest

from megatron_rl.train.console import Console, format_seconds, key_numbers


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_each_step_is_one_plain_line_with_pace_and_eta_when_not_on_a_terminal():
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, clock=clock)
    console.begin("1 rl", total=100)
    for index in (1, 2):
        clock.now += 3.0
        console.step(index, 100, {"reward/mean": 0.5, "policy/entropy": 1.25})
    console.say("saved a checkpoint")
    console.close()
    assert stream.getvalue().splitlines() == [
        "1 rl 1/100  reward 0.500  entropy 1.250  3.00 s/step  ETA 4m57s",
        "1 rl 2/100  reward 0.500  entropy 1.250  3.00 s/step  ETA 4m54s",
        "saved a checkpoint",
    ]


def test_eta_follows_the_recent_pace():
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, clock=clock)
    console.begin("sft", total=200)
    for index in range(1, 101):
        clock.now += 50.0 if index <= 50 else 1.0
        console.step(index, 200, {})
    assert stream.getvalue().splitlines()[-1].endswith("1.00 s/step  ETA 1m40s")


def test_ranks_other_than_the_first_print_nothing():
    stream = Terminal()
    console = Console(enabled=False, stream=stream)
    console.begin("rl", total=2)
    console.step(1, 2, {"reward/mean": 0.5})
    console.say("text")
    console.close()
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_with_the_same_numbers():
    stream = Terminal()
    console = Console(stream=stream)
    console.begin("rl", total=10)
    console.step(3, 10, {"reward/mean": 0.5})
    console.say("[not markup]")
    console.close()
    console.close()
    shown = stream.getvalue()
    assert "3/10" in shown
    assert "[not markup]" in shown


def test_the_log_holds_plain_lines_also_where_the_terminal_shows_a_bar():
    log = io.StringIO()
    console = Console(stream=Terminal(), log=log, clock=Clock())
    console.begin("rl", total=10)
    console.step(3, 10, {"reward/mean": 0.5})
    console.say("[not markup]")
    console.close()
    assert log.getvalue().splitlines() == ["rl 3/10  reward 0.500  0.00 s/step  ETA 0s", "[not markup]"]


def test_key_numbers_are_few_and_evaluations_come_first():
    metrics = {
        "reward/mean": 0.5, "policy/loss": 0.1, "rollout/response_tokens_mean": 31.0, "policy/entropy": 1.0,
        "mismatch/max": 1e-5, "policy/grad_norm": 0.3, "optim/lr": 1e-6, "eval/heldout/avg_at_k": 0.625,
    }  # fmt: skip
    shown = key_numbers(metrics).split("  ")
    assert shown[0] == "heldout 62.5 %"
    assert shown[1] == "reward 0.500"
    assert len(shown) == 6


def test_numbers_that_are_not_finite_are_told_beside_the_key_numbers():
    shown = key_numbers({"reward/mean": 0.5, "records/not_finite": 2})
    assert shown == "reward 0.500  NOT FINITE 2"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (605, "10m05s"), (7500, "2h05m")]
)
def test_durations_are_short(seconds, text):
    assert format_seconds(seconds) == text
