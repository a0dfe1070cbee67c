"""A rank's phase file always holds one whole record, the last."""

from __future__ import annotations

import ast
import json
import os
import socket
import time

from megatron_rl.train.metrics import Meter
from megatron_rl.train.phases import PHASES, PhaseFile, phase_path, read_phase
from tests.helpers.source import project_modules


def test_every_change_is_in_the_file_at_once_and_none_is_left_of_the_one_before(tmp_path):
    phases = PhaseFile(tmp_path, 1)
    sizes = set()
    for stage, step, phase in (("sft", 0, "load"), ("a_long_name", 123456789, "generate"), ("rl", 3, "save")):
        before = time.time()
        phases.begin_step(stage, step, phase)
        found = read_phase(tmp_path, 1)
        assert found == phases.current
        assert (found.stage, found.step, found.phase) == (stage, step, phase)
        assert (found.pid, found.host) == (os.getpid(), socket.gethostname())
        assert before <= found.since <= time.time()
        sizes.add(phase_path(tmp_path, 1).stat().st_size)
    assert len(sizes) == 1
    assert json.loads((tmp_path / "logs" / "rank_1.phase").read_text())["phase"] == "save"


def test_entering_the_same_phase_again_keeps_its_time(tmp_path):
    phases = PhaseFile(tmp_path, 0)
    phases.begin_step("sft", 1, "train")
    since = phases.current.since
    phases.enter("train")
    assert phases.current.since == since
    phases.begin_step("sft", 2, "train")
    assert phases.current.since > since


def test_the_spans_of_a_step_are_phases(tmp_path):
    phases = PhaseFile(tmp_path, 0)
    meter = Meter(entering=phases.enter)
    for name in ("generate", "reward", "logprob", "train", "sync"):
        with meter.span(name):
            assert read_phase(tmp_path, 0).phase == name


def test_a_file_that_is_missing_or_broken_has_no_phase(tmp_path):
    assert read_phase(tmp_path, 0) is None
    phase_path(tmp_path, 0).parent.mkdir()
    for content in (b"", b'{"stage": "rl", "st', b"[]", b'{"stage": "rl"}'):
        phase_path(tmp_path, 0).write_bytes(content)
        assert read_phase(tmp_path, 0) is None


def test_everything_that_a_loop_times_or_enters_is_a_phase():
    """A span or phase of another name would end the run where it is first met."""
    named = {
        (node.args[0].value, module.where(node))
        for module in project_modules()
        if module.name.startswith("megatron_rl.train.")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (
            (node.func.attr == "span" and ast.unparse(node.func.value).endswith("meter"))
            or (node.func.attr == "enter" and ast.unparse(node.func.value).endswith("phases"))
        )
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert {"sleep", "wait", "sync", "eval", "save"} <= {name for name, _ in named}
    assert sorted(place for name, place in named if name not in PHASES) == []
