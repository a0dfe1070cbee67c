"""What a stage says of its data reaches the prompts that it trains on and those that it is evaluated on."""

from __future__ import annotations

import json

import pytest

from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.recipe.load import load_recipe
from megatron_rl.train.rl_data import load_rl_data
from tests.helpers.tokenizers import CHATML, write_hf_tokenizer

RECIPE = """
name: toy
model: {{hf_path: {place}}}
stages:
  - kind: rl
    prompts: {place}/train.jsonl
    dataset:
      prompt: task.text
      answer: task.gold
      unwrap: "Solve: {{problem}}"
      difficulty: {{column: solved, higher_is: easier, denominator: 16}}
    prompt_template: "{{problem}} Box it."
    rewards: {{math_answer: 1.0}}
    iterations: 1
    prompts_per_iteration: 2
    group_size: 2
    sampling: {{max_response_tokens: 8, max_prompt_tokens: 30, prompt_truncation: {truncation}}}
    optimizer: {{lr: 1.0e-6}}
    eval: {{every: 1, sets: {{aime: {place}/eval.jsonl}}}}
"""
TRAIN = [
    {"task": {"text": "Solve: 1+1", "gold": 2}, "solved": 4},
    {"task": {"text": "2+2", "gold": 4}, "solved": 8},
    {"task": {"text": "Solve: 3+3+3+3+3+3", "gold": 18}, "solved": 0},
]
EVAL = [
    {"prompt": [{"role": "user", "content": "5+5"}], "reward_model": {"ground_truth": "10"}, "extra_info": {"index": i}}
    for i in range(3)
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = write_hf_tokenizer(tmp_path_factory.mktemp("place"), template=CHATML)
    for name, rows in (("train", TRAIN), ("eval", EVAL)):
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return place


def _load(place, truncation):
    file = place / f"{truncation}.yaml"
    file.write_text(RECIPE.format(place=place, truncation=truncation))
    stage = load_recipe(file).recipe.stages[0]
    tokenizer = load_tokenizer(place)
    data = load_rl_data(stage, tokenizer, run_seed=1, stage_index=0)
    return data, [tokenizer.decode(data.prompts.token_ids[prompt.id]) for prompt in data.prompts.prompts]


def test_columns_template_and_difficulty_reach_the_training_prompts(place):
    data, texts = _load(place, "drop")
    assert texts[0] == "<|im_start|>user\n1+1 Box it.<|im_end|>\n<|im_start|>assistant\n"
    assert [(prompt.answer, prompt.difficulty) for prompt in data.prompts.prompts] == [(2, 0.75), (4, 0.5)]
    assert data.prompts.dropped == {"too_long": 1}


def test_a_repeated_evaluation_problem_counts_once_and_has_the_same_template(place):
    data, _ = _load(place, "drop")
    (prompt,) = data.eval_sets["aime"].prompts
    assert prompt.messages[-1]["content"] == "5+5 Box it."
    assert data.eval_sets["aime"].dropped["duplicate"] == 2


def test_left_truncation_keeps_the_opening_of_the_answer_and_is_counted(place):
    data, texts = _load(place, "left")
    assert len(texts) == 3
    assert len(data.prompts.token_ids[data.prompts.prompts[2].id]) == 30
    assert texts[2].endswith("3 Box it.<|im_end|>\n<|im_start|>assistant\n")
    assert "1 cut on the left" in data.summary()
