"""A recipe in a directory of its own, with a model, a tokenizer and a few rows of data, for `verify`."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.helpers.models import make_tiny_hf
from tests.helpers.tokenizers import CHATML, write_hf_tokenizer

RECIPE = """\
name: proof
model: {{hf_path: {place}/model, dtype: float32, spec: local}}
stages:
  - kind: sft
    data: {place}/sft.jsonl
    steps: 4
    global_batch_size: 6
    tokens_per_microbatch: 128
    max_sample_tokens: 64
    optimizer: {{lr: 1.0e-3}}
  - kind: rl
    prompts: {place}/prompts.jsonl
    rewards: {{math_answer: 1.0}}
    iterations: 2
    prompts_per_iteration: 4
    group_size: 3
    updates_per_rollout: 2
    tokens_per_microbatch: 128
    sampling: {{temperature: 0.8, max_prompt_tokens: 48, max_response_tokens: 16}}
    algorithm: {{surrogate: gppo, sft_on_positives: 0.1, aggregate: sequence_mean,
      kl: {{coefficient: 0.05}}, entropy: {{coefficient: 0.01}}}}
    optimizer: {{lr: 1.0e-3}}
checkpoint: {{every_steps: 2}}
"""


def write_proof(place: Path, **model: object) -> Path:
    """The recipe's file. By default a model as Qwen3's small ones are: tied, q/k norms, here with one kv head."""
    options: dict[str, object] = {
        "family": "qwen3",
        "tied": True,
        "kv_heads": 1,
        "num_layers": 2,
        "vocab": 120,
    }
    make_tiny_hf(place / "model", **(options | model))  # type: ignore[arg-type]
    write_hf_tokenizer(place / "model", template=CHATML)
    draw = random.Random(0)
    pairs = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(16)]
    with (place / "sft.jsonl").open("w") as stream:
        for a, b in pairs:
            answer = " ".join(["so"] * draw.randint(1, 3) + [str(a + b)])
            turns = [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": turns}) + "\n")
    with (place / "prompts.jsonl").open("w") as stream:
        for number, (a, b) in enumerate(pairs):
            row = {"id": str(number), "problem": f"{a}+{b}", "answer": str(a + b), "difficulty": number % 4}
            stream.write(json.dumps(row) + "\n")
    recipe = place / "recipe.yaml"
    recipe.write_text(RECIPE.format(place=place))
    return recipe
