"""The quickstart as a user runs it: its recipe, its tools and the command line, in a directory of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.processes import mark_of

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def prepare(place: Path, *, seed: int = 1, sizes: Sequence[str] = ()) -> None:
    """Write models/tiny and data/quickstart below `place`, with the tools that launch/quickstart.sh calls.

    `sizes` are options of prepare_math_data.py for fewer problems than the quickstart's.
    """
    for tool, out, options in (
        ("make_tiny_model.py", "models/tiny", ()),
        ("prepare_math_data.py", "data/quickstart", sizes),
    ):
        command = [sys.executable, str(ROOT / "tools" / tool), "--out", out, "--seed", str(seed), *options]
        subprocess.run(
            command, cwd=place, env=run_environment(), check=True, capture_output=True, timeout=120
        )


def train(
    place: Path, run_dir: Path, *options: str, recipe: Path = RECIPE, timeout_s: float = 400.0
) -> subprocess.CompletedProcess[str]:
    """`megatron-rl train` from `place`; its whole process group is gone afterwards, whatever happened."""
    process = start(place, run_dir, *options, recipe=recipe)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def start(
    place: Path,
    run_dir: Path,
    *options: str,
    recipe: Path = RECIPE,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """The same command, running. Every process of the run carries a mark: see `processes.processes_of`."""
    command = [sys.executable, "-m", "megatron_rl", "train", str(recipe), "--run-dir", str(run_dir), *options]
    return subprocess.Popen(
        command,
        cwd=place,
        env=run_environment() | mark_of(run_dir) | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def lines(run_dir: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / file).read_text().splitlines()]


def run_environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
