"""What goes wrong for a user ends in one clear message, in good time, with no process and no half file left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.model.checkpoint_files import find_latest
from tests.helpers.processes import assert_nothing_is_left, ended, processes_of, wait_for
from tests.helpers.quickstart import lines, start

USER_ERROR, INTERRUPTED = 2, 130
ENGINE, GRADER = "megatron_rl.rollout.vllm_worker", "megatron_rl.rewards.worker"
SMALL = (
    "stages.0.data=small/sft.jsonl",
    "stages.0.steps=2",
    "stages.0.global_batch_size=8",
    "stages.0.optimizer.lr=1e-5",
    "stages.0.schedule={kind: constant}",
    "stages.1.prompts=small/train.jsonl",
    "stages.1.curriculum=[]",
    "stages.1.prompts_per_iteration=16",
    "stages.1.group_size=8",
    "stages.1.updates_per_rollout=1",
    "stages.1.eval=null",
    "checkpoint={every_steps: 1, keep: 2}",
)


@pytest.fixture(scope="module")
def here(place: Path) -> Path:
    """`place` with data and models that cannot be used, or not easily."""
    small = place / "small"
    prompts = (small / "train.jsonl").read_text().splitlines()
    (small / "broken.jsonl").write_text("\n".join([*prompts[:2], prompts[2][:-9], *prompts[3:]]) + "\n")
    (small / "algebra.jsonl").write_text("".join(needing_algebra(json.loads(line)) for line in prompts))
    write_bad_models(place / "models" / "tiny", small)
    return place


def needing_algebra(row: dict[str, Any]) -> str:
    """The same problem, its answer in a form that only a grading process can compare with a number."""
    answer = int(row["reward_model"]["ground_truth"])
    row["reward_model"]["ground_truth"] = f"{'-' if answer < 0 else ''}\\sqrt{{{answer**2}}}"
    return json.dumps(row) + "\n"


def write_bad_models(tiny: Path, root: Path) -> None:
    shutil.copytree(tiny, root / "no_shard")
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    (root / "no_shard" / "model.safetensors").rename(root / "no_shard" / first)
    index = {"weight_map": {"model.embed_tokens.weight": first, "model.norm.weight": second}}
    (root / "no_shard" / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copytree(tiny, root / "mamba")
    config = json.loads((tiny / "config.json").read_text())
    config |= {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (root / "mamba" / "config.json").write_text(json.dumps(config))


def is_one_message(errors: str, pattern: str) -> bool:
    """Whether stderr is one error block, and nothing else, that begins with the pattern."""
    assert "Traceback" not in errors, errors
    assert errors.count("error: ") == 1, errors
    return re.match(rf"error: {pattern}", errors) is not None


@dataclass(frozen=True)
class Refused:
    """A run that must end by itself before its first step, and how its one message begins."""

    message: str
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


PORT = "THE_TAKEN_PORT"
REFUSED = {
    "world": Refused(r"(.|\n)*does not divide the 3 processes", ("--nproc", "3", "layout.tp=2")),
    "architecture": Refused(
        r"(.|\n)*small/mamba/config\.json: architectures: got \[.MambaForCausalLM.\], must be one of",
        ("model.hf_path=small/mamba",),
    ),
    "shard": Refused(
        r"small/no_shard: .* names model-00002-of-00002\.safetensors, not there",
        ("model.hf_path=small/no_shard",),
    ),
    # of the second stage: no step of the first may be lost to it
    "line": Refused(r"(.|\n)*small/broken\.jsonl:3: ", ("stages.1.prompts=small/broken.jsonl",)),
    "empty": Refused(
        r"small/train\.jsonl: no prompt is left of 500 rows", ("stages.1.sampling.max_prompt_tokens=1",)
    ),
    # as is what only vLLM can tell, of values that fit its types
    "options": Refused(
        r"stages\.1\.engine\.vllm: .*max_num_batched_tokens \(16\) is smaller than max_model_len .*; "
        r"vLLM was given engine\.vllm: \{max_num_batched_tokens: 16\}, correct or remove what it does not take",
        ("stages.1.engine.vllm.max_num_batched_tokens=16",),
    ),
    "rendezvous": Refused(
        rf"process group: rank 0 cannot listen on 127\.0\.0\.1:{PORT} ", environment={"MASTER_PORT": PORT}
    ),
}


@pytest.fixture(scope="module")
def taken_port() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


@pytest.fixture(scope="module")
def refusals(here: Path, taken_port: str) -> dict[str, tuple[int, str, str]]:
    """Exit code and output of each; all at once, since loading libraries is what takes time."""
    running = {
        case: start(
            here, here / "runs" / case, *SMALL, *refused.options,
            environment={name: value.replace(PORT, taken_port) for name, value in refused.environment.items()},
        )
        for case, refused in REFUSED.items()
    }  # fmt: skip
    return {case: ended(process) for case, process in running.items()}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_before_the_first_step(
    refusals: dict[str, tuple[int, str, str]], here: Path, taken_port: str, case: str
) -> None:
    code, output, errors = refusals[case]
    assert code == USER_ERROR, errors
    assert is_one_message(errors, REFUSED[case].message.replace(PORT, taken_port)), errors
    assert "sft 1/2" not in output
    assert not (here / "runs" / case / "checkpoints").exists()
    assert_nothing_is_left(here / "runs" / case)


def test_a_taken_engine_port_is_named(here: Path, taken_port: str) -> None:
    run_dir = here / "runs" / "engine_port"
    code, _, errors = ended(start(here, run_dir, *SMALL, f"stages.1.engine.port={taken_port}"))
    assert code == USER_ERROR
    assert is_one_message(errors, rf"engine\.port: port {taken_port} cannot be used"), errors
    assert_nothing_is_left(run_dir)


def test_a_gap_over_the_bound_ends_every_rank_with_its_cause(here: Path) -> None:
    run_dir = here / "runs" / "gap"
    options = ("--nproc", "2", "stages.1.engine.parity_bound=1e-12")
    code, _, errors = ended(start(here, run_dir, *SMALL, *options), timeout_s=280)
    assert code == USER_ERROR
    assert is_one_message(
        errors,
        r"rank \d of 2 failed first \(exit code 2\)\n"
        r"  parity: after the transfer of weight version 0 trainer and engine differ by \S+ nats at .* bound 1e-12\): "
        r"bound below rounding: .* explains 0\.0003; raise engine\.parity_bound",
    ), errors
    (record,) = json.loads((run_dir / "parity.json").read_text())
    assert (record["fault"], record["weight_version"], record["step"]) == ("bound below rounding", 0, 2)
    assert 0 < record["max"] < 1e-4
    assert_nothing_is_left(run_dir)


def test_ctrl_c_in_sft_ends_every_rank_and_leaves_a_checkpoint_to_resume_from(here: Path) -> None:
    run_dir = here / "runs" / "ctrl_c_sft"
    process = start(here, run_dir, *SMALL, "stages.0.steps=100000", "--nproc", "2")
    wait_for(lambda: process.poll() is not None or num_steps(run_dir) >= 3, "the third step")
    process.send_signal(signal.SIGINT)
    code, _, errors = ended(process, timeout_s=40)
    assert (code, errors) == (INTERRUPTED, "interrupted: all 2 ranks have ended\n")
    assert_nothing_is_left(run_dir)
    saved = find_latest(run_dir / "checkpoints")
    assert saved is not None
    assert saved.optimizer_steps >= 2


def num_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.timeout(900)
def test_a_killed_grader_a_ctrl_c_and_a_killed_engine(here: Path, beginner: Path) -> None:
    """One run, interrupted and taken up again: an engine takes most of the time of a start."""
    run_dir = here / "runs" / "faults"
    options = (
        *SMALL, f"model.hf_path={beginner}", "stages.1.prompts=small/algebra.jsonl", "stages.1.engine.restarts=0",
    )  # fmt: skip
    process = start(here, run_dir, *options)
    wait_for(lambda: process.poll() is not None or bool(processes_of(run_dir, GRADER)), "a grading process")
    wait_for(lambda: process.poll() is not None or num_steps(run_dir) >= 3, "the first iteration")
    (grader,) = processes_of(run_dir, GRADER)
    os.kill(grader, signal.SIGKILL)
    killed_after = num_steps(run_dir)
    wait_for(
        lambda: process.poll() is not None or num_steps(run_dir) >= killed_after + 2, "two more iterations"
    )
    # into the generation of the next one, which is most of an iteration
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    code, _, errors = ended(process, timeout_s=60)
    assert (code, errors) == (INTERRUPTED, "interrupted\n")
    assert_nothing_is_left(run_dir)
    assert_every_verdict_is_right(run_dir)

    process, steps = start(here, run_dir, *options, "--resume"), num_steps(run_dir)
    wait_for(
        lambda: process.poll() is not None or num_steps(run_dir) > steps, "an iteration after the resume"
    )
    (engine,) = processes_of(run_dir, ENGINE)
    os.kill(engine, signal.SIGKILL)
    code, _, errors = ended(process, timeout_s=60)
    assert code == USER_ERROR
    message, _, log = errors.partition("; log ")
    assert is_one_message(
        message, rf"engine replica 0 \(pid {engine}\): died \(signal SIGKILL\) while \w+$"
    ), errors
    assert f"{run_dir}/logs/engine_0.log ends with" in log
    assert_nothing_is_left(run_dir)
    assert [line["step"] for line in lines(run_dir)] == list(range(1, num_steps(run_dir) + 1))


@pytest.mark.timeout(900)
def test_every_rank_takes_part_in_a_restart_and_ends_when_none_is_left(here: Path, beginner: Path) -> None:
    run_dir = here / "runs" / "restarts"
    options = ("--nproc", "2", f"model.hf_path={beginner}", "stages.1.engine.restarts=1", "checkpoint=null")
    process = start(here, run_dir, *SMALL, *options)
    first, second = (kill_engine_after(process, run_dir, steps) for steps in (3, 5))
    code, output, errors = ended(process, timeout_s=300)
    assert code == USER_ERROR
    assert f"engine replica 0 (pid {first}): died (signal SIGKILL) while" in output
    assert is_one_message(
        errors,
        rf"rank \d of 2 failed first \(exit code 2\)\n"
        rf"  engine replica 0 \(pid {second}\): died \(signal SIGKILL\) while \w+; log ",
    ), errors
    assert "engine.restarts: 1 of 1 were used in this stage" in errors
    counts = [line.get("engine/restarts", 0) for line in lines(run_dir)]
    assert sorted(set(counts)) == [0, 1] and counts == sorted(counts)
    assert_nothing_is_left(run_dir)


def kill_engine_after(process: subprocess.Popen[str], run_dir: Path, steps: int) -> int:
    # the restart of one that was killed just before may not have begun
    wait_for(
        lambda: (
            process.poll() is not None
            or (num_steps(run_dir) >= steps and bool(processes_of(run_dir, ENGINE)))
        ),
        f"step {steps}",
    )
    (engine,) = processes_of(run_dir, ENGINE)
    os.kill(engine, signal.SIGKILL)
    return engine


def assert_every_verdict_is_right(run_dir: Path) -> None:
    answers = {}
    for row in lines(run_dir.parents[1] / "small", "train.jsonl"):
        answers[row["prompt"][-1]["content"]] = int(row["reward_model"]["ground_truth"])
    rollouts = [
        rollout
        for path in sorted((run_dir / "rollouts").glob("iter_*"))
        for rollout in lines(run_dir, f"rollouts/{path.name}")
    ]
    numbers = [re.search(r"</think>\\boxed\{(-?\d+)\}$", rollout["completion"]) for rollout in rollouts]
    judged = [(rollout, int(number[1])) for rollout, number in zip(rollouts, numbers, strict=True) if number]
    assert len(judged) > 20
    for rollout, number in judged:
        want = "correct" if number == answers[rollout["prompt"]] else "wrong"
        assert rollout["verdict"] == want, (rollout, number)
    assert not any(rollout["verdict"] == "error" for rollout in rollouts)
    assert any(rollout["verdict"] == "correct" for rollout, _ in judged)
