"""The twins of the shipped recipes, run by the command line: every stage in turn, with a stop and a resume between."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.train.stopping import STOPPED
from tests.helpers.quickstart import ROOT, lines, start, train

RECIPES = ROOT / "recipes"
FULL = (
    "stages.0.steps=80",
    "stages.0.global_batch_size=32",
    *(f"stages.{stage}.iterations={count}" for stage, count in ((1, 3), (2, 2))),
    *(f"stages.{stage}.dynamic_sampling.generate_prompts=16" for stage in (1, 2)),
    *(f"stages.{stage}.prompts_per_iteration=8" for stage in (1, 2)),
    *(f"stages.{stage}.schedule.warmup_steps=2" for stage in (1, 2)),
    *(f"stages.{stage}.eval=null" for stage in (1, 2)),
    "checkpoint.every_steps=1000",
)
REAL = [
    {"problem": f"A box holds {n} pens. How many pens do {n + 1} boxes hold?", "answer": str(n * (n + 1))}
    for n in range(2, 12)
]


def wait_for(file: Path, *, stage: str, process: subprocess.Popen[str], timeout_s: float = 240.0) -> None:
    """Until a step of the stage is in the metrics."""
    deadline = time.monotonic() + timeout_s
    while not (file.exists() and f'"stage": "{stage}"' in file.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1][-3000:]
        time.sleep(0.2)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models/twin and data/twins, made by the tools as recipes/README.md says."""
    place = tmp_path_factory.mktemp("twins")
    (place / "real.jsonl").write_text("".join(json.dumps(row) + "\n" for row in REAL))
    tools = {
        "make_tiny_model.py": ["--out", "models/twin", "--alphabet", "bytes"],
        "make_twin_data.py": ["--out", "data/twins", "--size", "160", "--real", "real.jsonl"],
    }
    for tool, options in tools.items():
        command = [sys.executable, str(ROOT / "tools" / tool), *options]
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=place, env=environment, check=True, capture_output=True, timeout=120)
    return place


@pytest.fixture(scope="module")
def klear(twins: Path) -> Path:
    """A finished run of the twin of full.yaml, stopped in its math stage and taken up again."""
    run_dir, recipe = twins / "runs" / "klear", RECIPES / "klear_reasoner_8b" / "full_tiny.yaml"
    process = start(twins, run_dir, *FULL, recipe=recipe)
    try:
        wait_for(run_dir / "metrics.jsonl", stage="rl1", process=process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == STOPPED
    finally:
        process.kill()
        process.communicate()
    done = train(twins, run_dir, "--resume", *FULL, recipe=recipe)
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir


@pytest.mark.timeout(900)
def test_klears_three_stages_run_in_sequence_and_resume_between_them(klear: Path) -> None:
    steps = lines(klear)
    assert [line["step"] for line in steps] == list(range(1, 80 + 3 + 2 + 1))
    assert [line["stage"] for line in steps] == ["sft"] * 80 + ["rl1"] * 3 + ["rl2"] * 2
    assert (klear / "model" / "model.safetensors").is_file()
    assert json.loads((klear / "model" / "config.json").read_text())["max_position_embeddings"] == 640


@pytest.mark.timeout(900)
def test_the_code_stage_graded_programs_by_their_tests(klear: Path) -> None:
    rollouts: list[dict[str, Any]] = []
    for number in (4, 5):
        rollouts += lines(klear, f"rollouts/iter_{number:06d}.jsonl")
    assert rollouts and all(set(one["parts"]) == {"code_tests"} for one in rollouts)
    scores = [one["parts"]["code_tests"] for one in rollouts]
    assert all(0 <= score <= 1 for score in scores)
    programs = [one for one in rollouts if "```python" in one["completion"]]
    assert len(programs) > len(rollouts) / 2, rollouts[0]


@pytest.mark.timeout(900)
def test_compass_thinkers_stages_score_their_prompts_and_run(twins: Path, klear: Path) -> None:
    run_dir = twins / "runs" / "compass"
    options = [f"model.hf_path={klear / 'model'}", "stages.2.eval=null"]
    for stage in range(3):
        options += [
            f"stages.{stage}.iterations=2",
            f"stages.{stage}.curriculum=[{{iterations: 2, pass_rate: [0, 1]}}]",
            f"stages.{stage}.promote=null",
            f"stages.{stage}.rescore.samples=2",
            f"stages.{stage}.rescore.drop_above=1.0",
            f"stages.{stage}.prompts_per_iteration=4",
            f"stages.{stage}.dynamic_sampling.generate_prompts=8",
        ]
    done = train(
        twins, run_dir, *options, recipe=RECIPES / "compass_thinker_7b" / "curriculum_30k_tiny.yaml"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line["stage"] for line in lines(run_dir)] == ["rl1"] * 2 + ["rl2"] * 2 + ["rl3"] * 2
    for stage in ("rl1", "rl2", "rl3"):
        assert len(lines(run_dir, f"rescore/{stage}.jsonl")) > 100
