"""The proofs as a user runs them, on a shrunk recipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.proofs import write_proof
from tests.helpers.quickstart import ROOT

SFT_ALONE = (
    "stages=[{kind: sft, data: %s/sft.jsonl, steps: 4, global_batch_size: 4, tokens_per_microbatch: 128, "
    + ("max_sample_tokens: 64, optimizer: {lr: 1.0e-3}}]")
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_proof(tmp_path_factory.mktemp("proof"))


def verify(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    settings = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    return subprocess.run(
        [sys.executable, "-m", "megatron_rl", "verify", *arguments],
        cwd=cwd,
        env={**os.environ, **settings, "TMPDIR": str(cwd)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=800,
    )


@pytest.mark.timeout(900)
def test_resume_is_proven_for_a_run_that_was_killed(recipe: Path, tmp_path: Path) -> None:
    done = verify("resume", str(recipe), "--kills", "1", SFT_ALONE % recipe.parent, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed (") >= 1
    assert "4 steps and 0 files of rollouts are bit for bit the same" in done.stdout
    # nothing is left in the directory for temporary files
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(900)
def test_parity_is_proven_between_trainer_engine_and_transformers(recipe: Path, tmp_path: Path) -> None:
    done = verify("parity", str(recipe), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for pair in ("trainer - transformers", "trainer - engine", "engine - transformers", "engine, as sampled"):
        assert pair in done.stdout
    assert "verdict: proven: 4 pairs" in done.stdout
    assert list(tmp_path.iterdir()) == []
