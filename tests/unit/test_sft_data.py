"""Supervised data: what is kept, and that a batch is a function of its step alone."""

from __future__ import annotations

import json

import pytest

from megatron_rl.data.pack import pack
from megatron_rl.data.sft_data import build_sft_data, conversation, load_sft_data
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import DataError
from megatron_rl.recipe.dataset import ConversationConfig
from tests.helpers.tokenizers import CHATML, write_hf_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_hf_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=CHATML))


def _build(tokenizer, count, seed=1):
    rows = [{"id": str(i), "prompt": f"{i}", "response": f"it is {i}"} for i in range(count)]
    return build_sft_data(rows, tokenizer=tokenizer, max_sample_tokens=100, seed=seed)


def _ids(samples):
    return [sample.sample_id for sample in samples]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]},
        {"prompt": "1+1", "response": "2"},
        {"prompt": [{"content": "1+1", "role": "user"}], "response": "2"},
        {"problem": "1+1", "solution": "2", "answer": "2"},
        {"question": "1+1", "solution": "2"},
        {"conversations": [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]},
        {
            "conversations": [{"value": "1+1", "from": "user"}, {"value": "2", "from": "assistant"}],
            "system": "",
        },
        {"problem": "1+1", "generated_solution": "2", "expected_answer": "2"},
    ],
    ids=[
        "messages",
        "prompt",
        "prompt_messages",
        "problem",
        "question",
        "from_value",
        "user_value",
        "generated",
    ],
)
def test_every_schema_gives_the_same_sample(tokenizer, row):
    sample = build_sft_data([row], tokenizer=tokenizer, max_sample_tokens=100, seed=1).sample(0)
    text = tokenizer.decode(sample.token_ids)
    assert text == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert sample.num_trained_tokens == 2
    assert sample.rollout_logprobs is None


def test_rows_that_cannot_train_are_dropped_and_counted(tokenizer):
    rows = [
        {"prompt": "1", "response": "2"},
        {"prompt": "1", "response": "2" * 200},
        {"messages": [{"role": "user", "content": "1"}]},
        {"messages": "nonsense"},
        {"prompt": "1", "response": " "},
        {"text": "1"},
    ]
    data = build_sft_data(rows, tokenizer=tokenizer, max_sample_tokens=100, seed=1)
    assert len(data) == 1
    assert data.dropped == {"too_long": 1, "untrained": 2, "no_messages": 2}


def test_no_sample_left_is_an_error_with_the_counts(tokenizer, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1", "response": "2" * 50}) + "\n" + json.dumps({"text": "1"}))
    with pytest.raises(DataError, match=r"rows\.jsonl: no sample is left \(no_messages 1, too_long 1\)"):
        load_sft_data(file, tokenizer=tokenizer, max_sample_tokens=20, seed=1)


def test_row_that_the_template_refuses_is_an_error_that_names_it(tmp_path):
    tokenizer = load_tokenizer(write_hf_tokenizer(tmp_path, template="{{ raise_exception('no') }}"))
    with pytest.raises(DataError, match="rows: row 0: chat template"):
        build_sft_data([{"prompt": "1", "response": "2"}], tokenizer=tokenizer, max_sample_tokens=9, seed=1)


@pytest.mark.parametrize("global_batch_size", [1, 3, 7, 20])
def test_every_epoch_holds_every_sample_once(tokenizer, global_batch_size):
    data = _build(tokenizer, 7)
    drawn = [name for step in range(21) for name in _ids(data.batch(step, global_batch_size))]
    for epoch in range(len(drawn) // 7):
        assert sorted(drawn[7 * epoch : 7 * epoch + 7]) == sorted("0123456")


def test_order_differs_between_epochs_and_seeds(tokenizer):
    data = _build(tokenizer, 30)
    first, second = _ids(data.batch(0, 30)), _ids(data.batch(1, 30))
    assert first != second
    assert first != _ids(_build(tokenizer, 30, seed=2).batch(0, 30))


def test_batch_depends_on_its_step_alone(tokenizer):
    data, fresh = _build(tokenizer, 10), _build(tokenizer, 10)
    in_order = [data.batch(step, 4) for step in range(6)]
    assert fresh.batch(5, 4) == in_order[5]
    assert fresh.batch(2, 4) == in_order[2]


def _trained(tokenizer, sample):
    pairs = zip(sample.token_ids, sample.loss_mask, strict=True)
    return tokenizer.decode([token for token, trained in pairs if trained])


def test_loss_is_on_every_turn_of_the_assistant_and_on_nothing_else(tokenizer):
    turns = [("system", "be brief"), ("human", "1+1"), ("gpt", "2"), ("human", "2+2"), ("gpt", "4")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    sample = build_sft_data([row], tokenizer=tokenizer, max_sample_tokens=200, seed=1).sample(0)
    assert _trained(tokenizer, sample) == "2<|im_end|>4<|im_end|>"
    assert "<|im_start|>system\nbe brief<|im_end|>" in tokenizer.decode(sample.token_ids)


@pytest.mark.parametrize(
    "answer",
    [
        "<think>\nadd\n</think>\n\n42",
        "<|begin_of_thought|>\nadd\n<|end_of_thought|>\n\n<|begin_of_solution|>42<|end_of_solution|>",
    ],
    ids=["think", "thought_marks"],
)
def test_what_an_answer_thinks_is_trained_on_whole(tokenizer, answer):
    turns = [{"from": "user", "value": "40+2"}, {"from": "assistant", "value": answer}]
    row = {"system": "think first", "conversations": turns}
    sample = build_sft_data([row], tokenizer=tokenizer, max_sample_tokens=300, seed=1).sample(0)
    assert _trained(tokenizer, sample) == "<think>\nadd\n</think>\n\n42<|im_end|>"
    assert tokenizer.decode(sample.token_ids).startswith("<|im_start|>system\nthink first")


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"q": {"text": "1+1"}, "a": "2", "messages": "else"}, {"prompt": "q.text", "response": "a"}),
        ({"chat": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}, {"messages": "chat"}),
    ],
    ids=["pair", "turns"],
)  # fmt: skip
def test_conversations_come_from_the_columns_that_are_named(row, columns):
    wanted = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    assert conversation(row, ConversationConfig(**columns)) == wanted


def test_long_samples_fill_32k_micro_batches_and_stay_apart(tokenizer):
    """A wrong border between documents would show in positions, in cu_seqlens or in the text between them."""
    lengths = [20_000, 12_000, 700, 9_000, 23_000, 60]
    rows = [{"id": f"s{i}", "prompt": "p", "response": "x" * n} for i, n in enumerate(lengths)]
    data = build_sft_data(rows, tokenizer=tokenizer, max_sample_tokens=32_769, seed=1)
    samples = [data.sample(i) for i in range(len(data))]
    batches = pack(samples, tokens_per_microbatch=32_768)
    assert len(batches) == 2
    assert sum(sample.packed_length for sample in samples) / (2 * 32_768) > 0.98
    assert max(batch.num_tokens for batch in batches) <= 32_768
    assert sorted(i for batch in batches for i in batch.sample_index) == list(range(6))
    for batch in batches:
        bounds = batch.cu_seqlens.tolist()
        for number, index in enumerate(batch.sample_index):
            start, end = bounds[number], bounds[number + 1]
            ids, mask = list(samples[index].token_ids), list(samples[index].loss_mask)
            assert batch.input_ids[start:end].tolist() == ids[:-1]
            assert batch.labels[start:end].tolist() == ids[1:]
            assert batch.loss_mask[start:end].tolist() == mask[1:]
            assert batch.position_ids[start:end].tolist() == list(range(len(ids) - 1))


def test_its_digest_is_that_of_tokens_and_masks_in_order(tokenizer):
    rows = [{"prompt": "1+1", "response": "2"}, {"prompt": "2+2", "response": "4"}]

    def digest(rows):
        return build_sft_data(rows, tokenizer=tokenizer, max_sample_tokens=100, seed=1).digest()

    named = [{**row, "id": f"other-{i}"} for i, row in enumerate(rows)]
    assert digest(rows) == digest(named)
    others = [rows[::-1], rows[:1], [*rows, rows[0]], [rows[0], {"prompt": "2+", "response": "24"}]]
    assert len({digest(each) for each in [rows, *others]}) == 5
