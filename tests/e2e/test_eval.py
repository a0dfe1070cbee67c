"""`megatron-rl eval` as a user runs it, against the evaluations that the run itself made."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.rollout.engine import GenerateRequest
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.yarn import plan_yarn
from tests.helpers.engine import hf_logprobs, qwen2_spec, write_qwen2
from tests.helpers.processes import ended, mark_of, processes_of, wait_for
from tests.helpers.quickstart import ROOT, lines, run_environment, train

SET = "heldout"
# other tests export into the same place
EXPORT = "runs/evaluated_export"
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


def eval_with_a_killed_engine(place: Path, *options: str) -> tuple[int, str, str]:
    """Exit code and output of `megatron-rl eval` whose engine is killed as soon as it is ready."""
    logs = place / "eval_logs"
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl", "eval", "--log-dir", str(logs), *options],
        cwd=place,
        env=run_environment() | mark_of(logs),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    log = logs / "engine_0.log"

    def is_ready() -> bool:
        return process.poll() is not None or (log.exists() and "--- ready" in log.read_text())

    try:
        wait_for(is_ready, "the start of an engine")
        for engine in processes_of(logs, "megatron_rl.rollout.vllm_worker"):
            os.kill(engine, signal.SIGKILL)
    finally:
        code, output, errors = ended(process)
    return code, output, errors


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

    done = run(place, str(ROOT / "tools" / "convert_checkpoint.py"), "export", str(run_dir), EXPORT)
    assert done.returncode == 0, done.stderr[-3000:]
    options = (
        f"--n {SAMPLES} --pass-at 1,2 --temperature 0.8 --top-p 0.95 --top-k 20 --seed 3 --limit {PROMPTS}"
    )
    limits = f"--max-tokens {TOKENS} --max-prompt-tokens {PROMPT_TOKENS} --max-concurrent 64"
    data = f"{SET}={place / 'data' / 'quickstart' / 'heldout.jsonl'}"
    outputs = ("--out", "eval.json", "--samples-out", "samples.jsonl", "--data", data)
    code, output, errors = eval_with_a_killed_engine(
        place, "--model", EXPORT, *outputs, *options.split(), *limits.split()
    )
    assert code == 0, errors[-3000:]
    assert "died (signal SIGKILL)" in errors and "started again" in errors, errors[-3000:]

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
    assert f"avg@{SAMPLES}" in output and "pass@2" in output


@pytest.mark.timeout(300)
def test_an_engine_with_yarn_computes_what_transformers_does_beyond_the_models_positions(
    tmp_path: Path,
) -> None:
    model = write_qwen2(tmp_path / "model", seed=1, tied=True)
    spec = qwen2_spec(tied=True)
    yarn = plan_yarn(spec, factor=2.5)
    prompt = [(7 * i * i + i) % spec.vocab_size for i in range(spec.max_positions + 200)]
    stretched = shutil.copytree(model, tmp_path / "stretched")
    config = json.loads((model / "config.json").read_text())
    (stretched / "config.json").write_text(json.dumps({**config, **yarn.overrides(spec)}))

    with VllmEngine.start(
        EngineConfig(max_concurrent=8), hf_path=model, dtype="float32", spec=spec, yarn=yarn,
        max_model_len=yarn.max_positions, seed=0, log_dir=tmp_path,
    ) as engine:  # fmt: skip
        found = torch.tensor(engine.score(prompt))
        # more prompt tokens than a step takes: a prompt that was split would end its seeded request on CPU
        requests = [
            GenerateRequest(prompt_token_ids=[i, *prompt], seed=i, max_tokens=2, temperature=1.0)
            for i in range(8)
        ]
        assert [len(completion.token_ids) for completion in engine.generate(requests)] == [2] * 8

    expected = torch.tensor(hf_logprobs(stretched, prompt))
    plain = torch.tensor(hf_logprobs(model, prompt))
    # float32 against float32, other kernels
    assert (found - expected).abs().max() < 1e-3
    assert (plain - expected).abs().max() > 0.1, "YaRN must change log-probs for this to mean anything"
