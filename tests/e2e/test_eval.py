"""`megatron-rl eval` as a user runs it, against the evaluations that the run itself made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.quickstart import ROOT, lines, run_environment, train

SET = "heldout"
SAMPLES, TOKENS, PROMPT_TOKENS, PROMPTS = 4, 96, 64, 24
RECIPE = f"""
name: evaluated
model: {{hf_path: beginner, dtype: float32}}
run: {{seed: 3}}
stages:
  - kind: rl
    prompts: small/train.jsonl
    rewards: {{math_answer: 1.0}}
    iterations: 1
    prompts_per_iteration: 8
    group_size: 4
    tokens_per_microbatch: 4096
    sampling: {{max_prompt_tokens: {PROMPT_TOKENS}, max_response_tokens: 64}}
    algorithm: {{drop_zero_advantage: false}}
    engine: {{max_concurrent: 64}}
    optimizer: {{lr: 1.0e-3}}
    eval:
      every: 1
      sets: {{{SET}: data/quickstart/heldout.jsonl}}
      samples: {SAMPLES}
      pass_at: [1, 2]
      temperature: 0.8
      top_p: 0.95
      top_k: 20
      max_response_tokens: {TOKENS}
      max_prompts: {PROMPTS}
checkpoint: {{every_steps: 1}}
"""


def run(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=place,
        env=run_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.timeout(900)
def test_eval_of_the_exported_checkpoint_is_the_evaluation_that_the_run_made(
    place: Path, beginner: Path
) -> None:
    recipe = place / "evaluated.yaml"
    recipe.write_text(RECIPE)
    run_dir = place / "runs" / "evaluated"
    done = train(place, run_dir, f"model.hf_path={beginner}", recipe=recipe)
    assert done.returncode == 0, done.stderr[-3000:]
    before, inline = lines(run_dir, "eval.jsonl")

    done = run(place, str(ROOT / "tools" / "convert_checkpoint.py"), "export", str(run_dir), "exported")
    assert done.returncode == 0, done.stderr[-3000:]
    options = (
        f"--n {SAMPLES} --pass-at 1,2 --temperature 0.8 --top-p 0.95 --top-k 20 --seed 3 --limit {PROMPTS}"
    )
    limits = f"--max-tokens {TOKENS} --max-prompt-tokens {PROMPT_TOKENS} --max-concurrent 64"
    data = f"{SET}={place / 'data' / 'quickstart' / 'heldout.jsonl'}"
    outputs = ("--out", "eval.json", "--samples-out", "samples.jsonl", "--data", data)
    done = run(
        place, "-m", "megatron_rl", "eval", "--model", "exported", *outputs, *options.split(), *limits.split()
    )
    assert done.returncode == 0, done.stderr[-3000:]

    report: dict[str, Any] = json.loads((place / "eval.json").read_text())
    (found,) = report["sets"]
    assert found["problems"] == inline["problems"]
    assert found["problems"] != before["problems"], "weights must have changed for this to mean anything"
    assert found["estimates"]["avg_at_k"]["value"] == inline["avg_at_k"]
    metrics = lines(run_dir)[-1]
    for name in ("pass_at_1", "pass_at_2", "cons_at_k"):
        assert found["estimates"][name]["value"] == metrics[f"eval/{SET}/{name}"], name
    assert 0 < sum(problem["num_correct"] for problem in found["problems"]) < SAMPLES * PROMPTS

    samples = lines(place, "samples.jsonl")
    assert len(samples) == SAMPLES * PROMPTS == found["samples"]
    assert sum(sample["verdict"] == "correct" for sample in samples) == sum(
        p["num_correct"] for p in found["problems"]
    )
    assert f"avg@{SAMPLES}" in done.stdout and "pass@2" in done.stdout
