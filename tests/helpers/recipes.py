"""A small recipe with its model directory and data files, for tests of recipes and the command line."""

from __future__ import annotations

import json
from pathlib import Path

RECIPE = """\
name: small
model: {hf_path: model, dtype: float32}
layout: {tp: 1, pp: 1, vpp: 1, sp: false}
run: {seed: 1, deterministic: true}
stages:
  - kind: sft
    data: sft.jsonl
    steps: 20
    global_batch_size: 8
    tokens_per_microbatch: 512
    max_sample_tokens: 128
    optimizer: {lr: 1e-3}
    schedule: {kind: cosine, warmup_steps: 2, min_lr: 1e-4}
  - kind: rl
    prompts: train.jsonl
    rewards: {math_answer: 1.0, format: 0.1}
    iterations: 6
    prompts_per_iteration: 8
    group_size: 4
    updates_per_rollout: 2
    tokens_per_microbatch: 512
    sampling: {max_response_tokens: 64, max_prompt_tokens: 32}
    curriculum:
      - {iterations: 2, difficulty: [2, 3]}
      - {iterations: 4, difficulty: [3, 5]}
    optimizer: {lr: 2e-5}
    eval: {every: 2, sets: {heldout: heldout.jsonl}, samples: 2}
checkpoint: {every_steps: 5}
"""

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def write_recipe(directory: Path, *, text: str = RECIPE) -> Path:
    """Write recipe.yaml, what it names, and nothing else. The recipe's paths start at `directory`."""
    (directory / "model").mkdir(parents=True)
    (directory / "model" / "config.json").write_text(json.dumps(CONFIG))
    for name in ("sft", "train", "heldout"):
        (directory / f"{name}.jsonl").write_text("{}\n")
    path = directory / "recipe.yaml"
    path.write_text(text)
    return path
