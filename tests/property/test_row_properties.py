"""Whatever JSON stands in the columns that schemas know, a row is a prompt or is counted under one reason."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.columns import column, number
from megatron_rl.data.golds import first_gold, gold_fault
from megatron_rl.data.overlap import EvaluationIndex, normalised, words
from megatron_rl.data.prompts import prompts_from_rows
from megatron_rl.data.sft_data import conversation

NAMES = [
    "prompt", "problem", "question", "answer", "final_answer", "expected_answer", "reward_model", "ground_truth",
    "extra_info", "index", "id", "data_source", "difficulty", "pass_rate", "question_content", "public_test_cases",
    "private_test_cases", "metadata", "starter_code", "problem_is_valid", "question_type", "problem_type", "turns",
    "messages", "conversations", "response", "role", "content", "from", "value", "system", "inputs", "outputs",
    "functional", "fn_name", "llama8b_solve_rate", "contest_date",
]  # fmt: skip
TEXTS = st.sampled_from(
    ["", " ", "1", "1/2", "proof", "user", "assistant", "[", "{", '["1"]', '{"inputs": 1}', "=\ud800", "WyJh"]
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True, allow_infinity=True) | st.text() | TEXTS
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)
ROWS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, max_size=4))
def test_every_row_becomes_a_prompt_or_is_counted(rows):
    prompts, dropped, _ = prompts_from_rows(rows)
    assert len(prompts) + dropped.total() == len(rows)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.messages[-1]["content"].strip()
        gold_fault(prompt.answer), first_gold(prompt.answer)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_every_row_is_a_conversation_of_text_or_none(row):
    for message in conversation(row) or ():
        assert isinstance(message["role"], str) and isinstance(message["content"], str)


@given(VALUES, st.text(max_size=12))
def test_a_column_of_any_value_is_found_or_none(value, path):
    assert column({"a": value}, "a") is value
    column({"a": value}, path)
    found = number(value)
    assert found is None or found == found


@given(st.text(), st.text())
def test_a_text_is_found_in_an_index_that_holds_it(text, other):
    index = EvaluationIndex(9)
    index.add(text, name="e", problem_id="1")
    assert (index.find(f"{other} {text}") is not None) or len(words(text)) < 9
    assert (index.find(text) is not None) == bool(words(text))
    assert normalised(normalised(text)) == normalised(text) or "\\" in text
