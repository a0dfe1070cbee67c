"""A run that starts from an imported checkpoint, and its export in vLLM and transformers, through the command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.rollout.vllm_engine import VllmEngine
from tests.helpers.checkpoints import same_bytes, tensors_of
from tests.helpers.engine import hf_logprobs
from tests.helpers.quickstart import ROOT, train

SMALL = (
    "stages.0.data=small/sft.jsonl",
    "stages.0.steps=4",
    "stages.0.global_batch_size=16",
    "stages.0.schedule.warmup_steps=2",
    "stages.1.prompts=small/train.jsonl",
    "stages.1.iterations=1",
    "stages.1.prompts_per_iteration=8",
    "stages.1.group_size=4",
    "stages.1.curriculum=[{iterations: 1, difficulty: [2, 5]}]",
    "stages.1.rewards={math_answer: 1.0, format: 0.1}",
    "stages.1.algorithm.drop_zero_advantage=false",
    "stages.1.schedule.warmup_steps=0",
    "stages.1.eval=null",
    "checkpoint={every_steps: 2, keep: 1}",
)
PROMPT = [3, 5, 7, 11, 13, 17, 19, 23]
BOUND = 1e-4  # float32 against float32, other kernels


def convert(place: Path, *args: str) -> str:
    """What the tool prints, called as a user would from `place`."""
    command = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py"), *args]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def imported(place: Path) -> Path:
    convert(place, "import", "models/tiny", "imported", "--tp", "2")
    return place / "imported"


@pytest.fixture(scope="module")
def run_dir(place: Path, imported: Path) -> Path:
    """SFT and RL at tp 2, from the import alone: no HF directory with weights is named."""
    start = ("model.hf_path=imported/hf", "model.checkpoint=imported", "layout.tp=2")
    done = train(place, run_dir := place / "runs" / "from import", *SMALL, *start, "--nproc", "2")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "starting from the weights of imported" in done.stdout
    return run_dir


@pytest.fixture(scope="module")
def exported(place: Path, run_dir: Path) -> Path:
    convert(place, "export", "runs/from import", "exported", "--max-file-gb", "0.001")
    return place / "exported"


@pytest.mark.timeout(600)
def test_the_tool_exports_what_the_run_exports(run_dir: Path, exported: Path) -> None:
    assert len(list(exported.glob("*.safetensors"))) > 1
    assert same_bytes(tensors_of(run_dir / "model"), tensors_of(exported)) == []
    for path in sorted((run_dir / "model").iterdir()):
        if path.suffix != ".safetensors":
            assert path.read_bytes() == (exported / path.name).read_bytes(), path.name


@pytest.mark.timeout(600)
def test_transformers_opens_an_export_with_nothing_else_at_hand(exported: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    alone = Path(shutil.copytree(exported, tmp_path / "alone"))
    tokenizer, original = (
        AutoTokenizer.from_pretrained(path) for path in (alone, exported.parent / "models" / "tiny")
    )
    messages = [{"role": "user", "content": "4+7-1"}]
    ids, wanted = (t.apply_chat_template(messages, add_generation_prompt=True) for t in (tokenizer, original))
    assert ids == wanted
    model = AutoModelForCausalLM.from_pretrained(alone)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.dtype == torch.float32


@pytest.mark.timeout(600)
def test_vllm_opens_an_export_and_computes_what_transformers_computes(exported: Path, tmp_path: Path) -> None:
    with VllmEngine.start(
        EngineConfig(), hf_path=exported, dtype="float32", spec=ModelSpec.from_hf(exported), max_model_len=64, seed=0,
        log_dir=tmp_path,
    ) as engine:  # fmt: skip
        scores = engine.score(PROMPT)
    assert scores == pytest.approx(hf_logprobs(exported, PROMPT), abs=BOUND)
