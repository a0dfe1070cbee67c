"""tools/soak.py: what it measures of a tree of processes, and when it says that something grows."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import psutil
import pytest

from megatron_rl.errors import MegatronRLError
from megatron_rl.recipe.load import load_recipe
from tests.helpers.source import ROOT

MEMORY, FILES = "memory MiB", "files"


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("soak", ROOT / "tools" / "soak.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    # as for a script, whose own directory comes first
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    yield module
    del sys.modules["soak"]


def judged(tool: ModuleType, values: Sequence[float], unit: str) -> Any:
    return tool.judge(f"trainer: {unit}", values, tool.BOUNDS[unit])


def test_noise_spikes_and_a_warm_up_are_flat(tool: ModuleType) -> None:
    rng = random.Random(0)
    noise = [700 + rng.gauss(0, 3) for _ in range(300)]
    assert judged(tool, noise, MEMORY).is_flat
    spikes = [value + 200 * (number % 50 == 49) for number, value in enumerate(noise)]
    assert judged(tool, spikes, MEMORY).is_flat
    assert judged(tool, [value - 4 * max(0, 70 - n) for n, value in enumerate(noise)], MEMORY).is_flat
    assert judged(tool, [40 + rng.choice((0, 0, 1, 3)) for _ in range(300)], FILES).is_flat


def test_memory_that_is_given_back_is_flat(tool: ModuleType) -> None:
    assert judged(tool, [700 - 0.05 * number for number in range(300)], MEMORY).is_flat


@pytest.mark.parametrize("per_iteration", [0.1, 1.0], ids="{} MiB".format)
def test_a_memory_leak_under_noise_is_refused(tool: ModuleType, per_iteration: float) -> None:
    rng = random.Random(1)
    result = judged(tool, [700 + per_iteration * n + rng.gauss(0, 3) for n in range(300)], MEMORY)
    assert not result.is_flat
    assert result.growth == pytest.approx(225 * per_iteration, rel=0.2)


@pytest.mark.parametrize("every", [1, 10, 100], ids="every {} iterations".format)
@pytest.mark.parametrize("unit", ["files", "sockets", "threads", "processes"])
def test_one_more_of_something_countable_is_refused(tool: ModuleType, unit: str, every: int) -> None:
    assert not judged(tool, [20 + number // every for number in range(300)], unit).is_flat


def test_a_value_that_jumps_to_and_fro_is_refused(tool: ModuleType) -> None:
    result = judged(tool, [20 + 10 * (number % 2) for number in range(300)], "threads")
    assert result.spread > result.spread_bound


def test_too_few_iterations_are_no_proof(tool: ModuleType) -> None:
    with pytest.raises(MegatronRLError, match="must be at least 12; raise --iterations"):
        judged(tool, [1.0] * 14, FILES)


def test_a_kind_that_appears_late_counts_from_nothing_and_the_tree_is_judged_too(tool: ModuleType) -> None:
    kinds = [f"trainer: {unit}" for unit in tool.BOUNDS]
    samples = [dict.fromkeys(kinds, 1.0) for _ in range(100)]
    for sample in samples[60:]:
        sample["helper: processes"] = 1.0
    results = {each.name: each for each in tool.judge_all(samples)}
    assert not results["helper: processes"].is_flat
    assert not results["all: processes"].is_flat
    assert results["all: files"].is_flat
    text = tool.verdict(list(results.values()), num_samples=100)
    assert text == "NOT FLAT over the last 75 of 100 iterations: helper: processes, all: processes"
    assert tool.table(list(results.values())).count("NOT FLAT") == 2


def test_a_tree_of_processes_is_measured_by_kind(tool: ModuleType) -> None:
    code = "import sys, socket; s = socket.socket(); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "megatron_rl.rewards.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        found = tool.measure(psutil.Process(process.pid))
        process.stdin.close()
    assert found["grader: processes"] == found["grader: threads"] == found["grader: sockets"] == 1
    assert found["grader: files"] == 4
    assert 3 < found["grader: memory MiB"] < 100
    assert {name.split(": ")[0] for name in found} == {"grader"}
    # it has ended: nothing is measured, and nothing is raised
    assert tool.measure(psutil.Process()) != {}


def test_a_recipe_needs_one_rl_stage(tool: ModuleType) -> None:
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml").recipe
    assert tool.rl_stage(recipe) == 1
    alone = load_recipe(
        ROOT / "recipes" / "quickstart.yaml",
        [
            "stages=[{kind: sft, data: x, steps: 1, global_batch_size: 8, tokens_per_microbatch: 64, "
            "max_sample_tokens: 64, optimizer: {lr: 1e-4}, schedule: {kind: constant}}]"
        ],
    ).recipe
    with pytest.raises(MegatronRLError, match="has 0 RL stages"):
        tool.rl_stage(alone)
