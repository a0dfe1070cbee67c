"""The main job, run as a user runs it: the command line, real processes, real vLLM, a real improvement."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.recipe.load import load_recipe
from tests.helpers.chrome_trace import read_trace
from tests.helpers.quickstart import lines, train

ITERATIONS = 24
SHORTER = (
    f"stages.1.iterations={ITERATIONS}",
    "stages.1.curriculum=[{iterations: 12, difficulty: [2, 4]}, {iterations: 12, difficulty: [3, 7]}]",
    f"stages.1.eval.every={ITERATIONS}",
)
# measured after 20 iterations: +14 to +22 points over three seeds; a model that learns nothing stays within +-4,
# twice the standard error over the 255 problems
MIN_GAIN = 0.08

LAYOUTS = {
    "tp1": (),
    # profiled from the last SFT step into RL, which changes no number
    "tp2-pp2": ("--nproc", "4", "layout.tp=2", "layout.pp=2", "run.profile={first_step: 4, steps: 2}"),
    "dp2": ("--nproc", "2"),
}
BRIEF = (
    "stages.0.steps=4",
    "stages.0.schedule.warmup_steps=2",
    "stages.0.optimizer.lr=1e-5",
    "stages.1.iterations=2",
    "stages.1.curriculum=[]",
    "stages.1.prompts_per_iteration=8",
    "stages.1.schedule.warmup_steps=0",
    "stages.1.eval=null",
)
RL_METRICS = [
    "reward/mean",
    "reward/std",
    "reward/zero_advantage_frac",
    "rollout/tokens",
    "rollout/response_tokens_mean",
    "rollout/truncated_frac",
    "rollout/weight_version",
    "policy/loss",
    "policy/grad_norm",
    "policy/clip_high_frac",
    "policy/clip_low_frac",
    "policy/entropy",
    "policy/kl_old",
    "mismatch/mean",
    "mismatch/p99",
    "mismatch/max",
    "optim/lr",
    "time/generate_s",
    "time/reward_s",
    "time/logprob_s",
    "time/train_s",
    "time/sync_s",
    "time/other_s",
    "time/iteration_s",
    "throughput/tokens_per_s",
]


@pytest.fixture(scope="session")
def learned(place: Path) -> Path:
    """Run directory of the shipped recipe with fewer RL iterations."""
    run_dir = place / "runs" / "learned"
    done = train(place, run_dir, "--nproc", "2", *SHORTER, timeout_s=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "avg@4" in done.stdout and "report.html" in done.stdout
    return run_dir


@pytest.mark.timeout(1000)
def test_rl_raises_held_out_accuracy_of_the_shipped_recipe(learned: Path) -> None:
    start, end = lines(learned, "eval.jsonl")
    assert (start["iteration"], end["iteration"]) == (0, ITERATIONS)
    assert end["avg_at_k"] - start["avg_at_k"] >= MIN_GAIN, (start["avg_at_k"], end["avg_at_k"])


@pytest.mark.timeout(1000)
def test_a_run_leaves_the_records_that_it_promises(learned: Path) -> None:
    steps = lines(learned)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    rl = [line for line in steps if line["stage"] == "rl"]
    assert [line["iteration"] for line in rl] == list(range(1, ITERATIONS + 1))
    assert all(rl[-1][name] is not None for name in RL_METRICS)
    assert rl[-1]["eval/heldout/avg_at_k"] == lines(learned, "eval.jsonl")[-1]["avg_at_k"]
    # engine and trainer agree on every sampled token of the run
    assert max(line["mismatch/max"] for line in rl if "mismatch/max" in line) < 1e-3
    rollouts = lines(learned, f"rollouts/iter_{ITERATIONS:06d}.jsonl")
    assert {"prompt", "completion", "reward", "parts", "finish", "weight_version"} <= rollouts[0].keys()
    assert len(rollouts) == 512
    board = EventAccumulator(str(learned / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("reward/mean")] == [line["step"] for line in rl]
    assert load_recipe(learned / "recipe.resolved.yaml").recipe.stages[1].kind == "rl"
    for name in (
        "plan.json",
        "parity.json",
        "report.html",
        "model/model.safetensors",
        "model/tokenizer.json",
    ):
        assert (learned / name).stat().st_size > 0


@pytest.fixture(scope="module")
def of_layouts(learned: Path, place: Path) -> dict[str, Path]:
    """Run directories by name of the layout."""
    run_dirs = {name: place / "runs" / name for name in LAYOUTS}
    for name, options in LAYOUTS.items():
        done = train(place, run_dirs[name], *options, *BRIEF, f"model.hf_path={learned / 'model'}")
        assert done.returncode == 0, (name, done.stderr[-3000:])
    return run_dirs


@pytest.mark.timeout(1000)
def test_layouts_give_the_same_sft_curve_and_the_same_first_rewards(of_layouts: dict[str, Path]) -> None:
    curves = {name: lines(run_dir) for name, run_dir in of_layouts.items()}
    reference = curves.pop("tp1")
    assert 0 < reference[-1]["reward/mean"] < 1, (
        "rewards must differ between rollouts for this to mean anything"
    )
    for name, curve in curves.items():
        for want, got in zip(reference, curve, strict=True):
            if want["stage"] == "sft":
                assert got["sft/loss"] == pytest.approx(want["sft/loss"], rel=1e-5), (name, want["step"])
            else:
                assert got["reward/mean"] == want["reward/mean"], (name, want["step"])
                assert got["rollout/tokens"] == want["rollout/tokens"], (name, want["step"])


@pytest.mark.timeout(1000)
def test_a_profile_shows_what_every_rank_and_engine_did_on_one_clock(of_layouts: dict[str, Path]) -> None:
    lanes = read_trace(of_layouts["tp2-pp2"] / "profile" / "trace.json.gz")
    assert [name.partition(" (")[0].partition(" on ")[0] for name in lanes] == [
        "rank 0", "rank 1", "rank 2", "rank 3", "engine replica 0",
    ]  # fmt: skip
    *ranks, engine = lanes.values()
    for rank in ranks:
        # the window lies across the stages
        assert [e.name for e in rank if e.name.startswith(("sft", "rl"))] == ["sft step 4", "rl step 0", "rl step 1"]
        assert {"train", "generate", "logprob", "sync"} <= {e.name for e in rank}
        assert {"forward", "backward", "sum gradients", "optimizer step"} <= {e.name for e in rank}
        assert {"transfer", "parity"} <= {e.name for e in rank if e.inside[-1:] == ("sync",)}
        for e in rank:
            if e.name in ("backward", "optimizer step"):
                assert e.inside[-1] == "train"
    # stages of a pipeline wait for each other; one of them sends weights in a bucket
    assert any("recv" in e.name for rank in ranks for e in rank)
    assert any(e.name == "send bucket" and e.inside[-2:] == ("sync", "transfer") for rank in ranks for e in rank)
    generate = next(e for e in ranks[0] if e.name == "generate" and "rl step 1" in e.inside)
    within = [e for e in engine if e.name == "generate" and e.start >= generate.start and e.end <= generate.end]
    assert len(within) == 1
    assert {e.name for e in engine if e.inside == ("generate",)} == {"prefill", "decode"}
    assert {"idle", "receive weights", "commit weights", "score"} <= {e.name for e in engine if not e.inside}
    receive = [e for e in engine if e.name == "receive weights"]
    transfers = [e for e in ranks[0] if e.name == "transfer"]
    assert len(receive) == len(transfers) > 0
    assert all(a.start <= b.start and b.end <= a.end for a, b in zip(transfers, receive, strict=True))
