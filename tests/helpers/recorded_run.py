"""A small run as a training run records it, through the writers that a run uses: SFT, two RL stages, a resume."""

from __future__ import annotations

import math
from pathlib import Path

from megatron_rl.data.types import Completion, Finish, Prompt, RewardResult, Rollout, Verdict
from megatron_rl.evaluation.result import EvalProblem, EvalResult
from megatron_rl.train.records import RunRecords

# what a model may write that a page must not run
HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<!--<script>\u2028 \u0000 \udc80 \U0001f9ee \\u003cb\\u003e &lt;i&gt; ${1+1} $data"
)
SFT_STEPS, RL_ITERATIONS = 20, 12

RECIPE = """# resolved recipe: every value with its origin (file, override, compat or default)
name: demo  # file
run:
  seed: {seed}  # override
  torch_threads: 1  # default
stages:
  - kind: sft  # file
    steps: 20  # file
  - kind: rl  # file
    rewards: {{math_answer: 1.0}}  # file
    algorithm:
      surrogate: {surrogate}  # file
"""


def record_run(run_dir: Path, *, seed: int = 1, surrogate: str = "gppo") -> Path:
    """Write the run; it is resumed in the middle of its first RL stage."""
    records = RunRecords(run_dir)
    records.write_recipe(RECIPE.format(seed=seed, surrogate=surrogate))
    for step in range(1, SFT_STEPS + 1):
        metrics = {"sft/loss": 3.0 / step + 0.01 * seed, "sft/grad_norm": 1.0 / step, "optim/lr": 1e-4}
        records.log_step({**metrics, **_times(sft=True)}, stage="sft", iteration=step, step=step)
    records.write_eval(_evaluation(0, seed), stage="rl1", board=True)
    half = RL_ITERATIONS // 2
    for iteration in range(1, half):
        _record_iteration(records, iteration, seed)
    records.close()
    last = SFT_STEPS + half - 1
    resumed = RunRecords(run_dir, last_step=last, last_iteration=half - 1)
    for iteration in range(half, RL_ITERATIONS + 1):
        _record_iteration(resumed, iteration, seed)
    resumed.close()
    return run_dir


def _record_iteration(records: RunRecords, iteration: int, seed: int) -> None:
    stage = "rl1" if iteration <= 8 else "rl2"
    step = SFT_STEPS + iteration
    rollouts = [_rollout(iteration, index, seed) for index in range(24)]
    scores = [rollout.reward.score for rollout in rollouts]
    metrics = {
        "reward/mean": sum(scores) / len(scores),
        "reward/std": 0.3,
        "reward/correct_frac": sum(scores) / len(scores),
        "reward/wrong_frac": 1 - sum(scores) / len(scores),
        "reward/math_answer": sum(scores) / len(scores),
        "reward/zero_advantage_frac": 0.2,
        "rollout/response_tokens_mean": 20.0 + iteration,
        "rollout/response_tokens_std": 4.0,
        "rollout/truncated_frac": 0.05,
        "policy/loss": 0.01 * math.sin(iteration),
        "policy/entropy": 1.0 / iteration,
        "policy/clip_high_frac": 0.01,
        "policy/clip_low_frac": 0.002,
        "policy/grad_norm": 0.5,
        "policy/kl_old": float("nan") if iteration == 3 else 1e-4,
        "mismatch/mean": 1e-7,
        "mismatch/p99": 1e-6,
        "mismatch/max": 1e-5,
        "memory/rss_gib": 1.5,
        "engine/restarts": float(iteration >= 4),
        "curriculum/window": 1.0,
        "curriculum/promoted": float(iteration == 7),
        **_times(sft=False),
    }
    result = _evaluation(iteration, seed)
    is_evaluated = iteration % 3 == 0
    records.log_step(
        {**metrics, **(result.metrics() if is_evaluated else {})}, stage=stage, iteration=iteration, step=step
    )
    if is_evaluated:
        records.write_eval(result, stage=stage)
    records.write_rollouts(iteration, rollouts)
    records.write_tokens(iteration, [_tokens(rollout) for rollout in rollouts[:3]])
    gaps = {"mean": 1e-7, "p99": 1e-6, "max": 2e-6, "bound": 3e-4, "weight_version": iteration}
    records.write_sync(gaps, stage=stage, iteration=iteration, step=step)


def _times(*, sft: bool) -> dict[str, float]:
    spans = {"train": 0.5, "other": 0.1} | ({} if sft else {"generate": 2.0, "sync": 0.2, "reward": 0.3})
    times = {f"time/{name}_s": seconds for name, seconds in spans.items()}
    return {
        **times,
        "time/iteration_s": sum(spans.values()),
        "throughput/tokens_per_s": 900.0,
        "count/tokens": 5000.0,
    }


def _evaluation(iteration: int, seed: int) -> EvalResult:
    problems = tuple(
        EvalProblem(
            id=f"{level}-{number}",
            num_correct=min(4, (iteration + seed) // level),
            num_samples=4,
            difficulty=level,
        )
        for level in (2, 3, 5)
        for number in range(4)
    )
    return EvalResult(name="heldout", iteration=iteration, samples=4, problems=problems)


def _rollout(iteration: int, index: int, seed: int) -> Rollout:
    is_right = (index + iteration + seed) % 3 == 0
    level = (2, 3, 5)[index % 3]
    text = f"<think>{level} + {index} is easy</think>\\boxed{{{level + index}}}"
    if index == 1:
        text = f"<think>{HOSTILE}</think>{HOSTILE}"
    verdict = Verdict.CORRECT if is_right else Verdict.TRUNCATED if index == 5 else Verdict.WRONG
    return Rollout(
        prompt=Prompt(
            id=f"problem-{index // 4}",
            messages=[{"role": "user", "content": f"{level}+{index}=?"}],
            answer=str(level + index),
            difficulty=level,
        ),
        prompt_token_ids=[1, 2],
        sample_index=index % 4,
        completion=Completion(
            token_ids=list(range(index + 3)),
            logprobs=[-0.1] * (index + 3),
            finish=Finish.LENGTH if verdict is Verdict.TRUNCATED else Finish.STOP,
            weight_version=iteration,
        ),
        text=text,
        reward=RewardResult(
            score=float(is_right),
            parts={"math_answer": float(is_right)},
            verdict=verdict,
            task_score=float(is_right),
            reason="" if is_right else "not equal",
        ),
    )


def _tokens(rollout: Rollout) -> dict[str, object]:
    pieces = ["<think>", "2", " +", " 3", "</script>", "\u0000", "\\boxed"]
    num = len(pieces)
    return {
        "prompt_id": rollout.prompt.id,
        "sample_index": rollout.sample_index,
        "advantage": 0.7,
        "left_out": None,
        "token_ids": list(range(num)),
        "tokens": pieces,
        "rollout_logprobs": [-0.01 - 0.6 * index for index in range(num)],
        "old_logprobs": [-0.02 - 0.6 * index for index in range(num)],
        "logprobs": [0.2 * (index - 3) - 0.6 * index for index in range(num)],
        "clipped": [-1, 0, 0, 0, 0, 1, 1],
    }
