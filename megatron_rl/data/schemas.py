"""What a row of a public data set says: problem, gold, and why it cannot be used.

One adapter per schema, tried in order; the first that knows the row answers. The gold stays as the row holds it, save
for code problems of LiveCodeBench, whose tests are compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.code_gold import is_code_gold, livecodebench_gold
from megatron_rl.data.columns import column, is_empty_answer, number
from megatron_rl.data.rows import TURNS, Row
from megatron_rl.data.types import Message
from megatron_rl.errors import DataError
from megatron_rl.recipe.dataset import DatasetConfig, DifficultyConfig
from megatron_rl.rewards.code_gold import BadGold, read_gold

_QUESTION_KEYS = ("prompt", "problem", "question")
_ANSWER_KEYS = ("final_answer", "expected_answer", "answer")
_GSM8K_MARK = "\n#### "
# shares of right answers, so that 1 - value is the difficulty
_PASS_RATES = ("extra_info.pass_rate", "pass_rate", "llama8b_solve_rate", "pass_rate_72b_tir")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_LEVELS = {"easy": 1.0, "medium": 2.0, "hard": 3.0}


class UnusableRow(Exception):
    """Why a row is left out: one of the reasons that megatron_rl/data/README.md lists."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """A usable row. `used` are the columns that `messages` and `answer` came from."""

    schema: str
    messages: list[Message]
    answer: Any
    used: frozenset[str]
    meta: Mapping[str, Any]  # further facts, beside the row's own columns
    levels: Mapping[str, float]  # words that this schema uses for a difficulty


def read_fields(row: Row, dataset: DatasetConfig) -> Fields:
    """The problem and gold of a row. Raises UnusableRow with the reason why it has none."""
    for adapter in _ADAPTERS:
        fields = adapter(row, dataset)
        if fields is not None:
            return fields
    raise UnusableRow("no_prompt")


def row_difficulty(
    row: Row, config: DifficultyConfig | None, *, levels: Mapping[str, float] | None = None
) -> float | None:
    """How hard a row says it is, larger is harder; None if it does not. `levels` are words and their numbers.

    Raises DataError for a share above 1, so that a missing denominator is seen.
    """
    if config is not None:
        value = number(column(row, config.column))
        if value is None:
            return None
        share = value / config.denominator
        if config.higher_is == "harder":
            return share
        if not 0 <= share <= 1:
            raise DataError(
                f"difficulty: {config.column} is {value:g}, but a value that falls with the difficulty must be between "
                f"0 and denominator = {config.denominator:g}; set the denominator"
            )
        return 1 - share
    for name in ("extra_info.difficulty", "difficulty"):
        value = column(row, name)
        if value is not None:
            return (levels or {}).get(str(value).lower(), number(value))
    rates = (number(column(row, name)) for name in _PASS_RATES)
    return next((1 - rate for rate in rates if rate is not None and 0 <= rate <= 1), None)


def parse_messages(value: Any) -> list[Message] | None:
    """Chat messages out of a list of mappings (role/content or from/value, any key order) or one user's text.

    None if it is neither.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if value.strip() else None
    if not isinstance(value, Sequence) or not value:
        return None
    messages: list[Message] = []
    for entry in value:
        if not isinstance(entry, Mapping):
            return None
        role = entry.get("role", entry.get("from"))
        content = entry.get("content", entry.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        messages.append({"role": _ROLES.get(role, role), "content": content})
    return messages


def _chosen(row: Row, dataset: DatasetConfig) -> Fields | None:
    """Columns that the recipe names; what it leaves open is recognised."""
    if dataset.prompt is None and dataset.answer is None:
        return None
    asked = None if dataset.prompt is None else column(row, dataset.prompt)
    if dataset.prompt is None:
        asked, _ = _question(row)
    answer = _answer(row)[0] if dataset.answer is None else column(row, dataset.answer)
    used = {
        name.split(".")[0] for name in (dataset.prompt, dataset.answer) if name is not None and name in row
    }
    return _fields("columns", asked, answer, used=used)


def _livecodebench(row: Row, _: DatasetConfig) -> Fields | None:
    if not isinstance(row.get("question_content"), str):
        return None
    if not row["question_content"].strip():
        raise UnusableRow("no_prompt")
    try:
        gold = livecodebench_gold(row)
    except DataError:
        raise UnusableRow("bad_tests") from None
    starter = str(row.get("starter_code") or "").strip()
    how = (
        f"Complete this Python code, and give all of it in one ```python block:\n\n```python\n{starter}\n```"
        if starter
        else "Write a Python program that reads standard input and prints the answer; give it in one ```python block."
    )
    used = {"question_content", "public_test_cases", "private_test_cases", "starter_code"}
    meta = {"date": str(row.get("contest_date") or "")[:10]}
    asked = f"{row['question_content'].strip()}\n\n{how}"
    return _fields("livecodebench", asked, gold, used=used, meta=meta, levels=_LEVELS)


def _turns(row: Row, _: DatasetConfig) -> Fields | None:
    """ORZ: an array of two turns, the second of which holds the gold."""
    turns = row.get(TURNS)
    if not isinstance(turns, Sequence) or len(turns) < 2 or not isinstance(turns[-1], Mapping):
        return None
    gold = column(turns[-1], "ground_truth.value")
    return _fields("orz", list(turns[:-1]), gold, used={TURNS})


def _verl(row: Row, _: DatasetConfig) -> Fields | None:
    model = row.get("reward_model")
    if not isinstance(model, Mapping):
        return None
    asked, used = _question(row)
    rest = {key: value for key, value in model.items() if key != "ground_truth"}
    gold = model.get("ground_truth")
    schema = "verl"
    if is_code_gold(gold):
        schema = "verl code"
        _check_code(gold)
    return _fields(
        schema, asked, gold, used={*used, "reward_model"}, meta={"reward_model": rest} if rest else {}
    )


def _numina(row: Row, _: DatasetConfig) -> Fields | None:
    if "problem_is_valid" not in row and "question_type" not in row:
        return None
    for name in ("problem_is_valid", "solution_is_valid"):
        if str(row.get(name) or "yes").strip().lower() != "yes":
            raise UnusableRow("invalid")
    return _pair("numina", row, is_proof="proof" in str(row.get("question_type")).lower())


def _openmath(row: Row, _: DatasetConfig) -> Fields | None:
    if "expected_answer" not in row:
        return None
    return _pair("openmath", row, is_proof="proof" in str(row.get("problem_type")).lower())


def _plain(row: Row, _: DatasetConfig) -> Fields | None:
    return _pair("problem and answer", row, is_proof=False)


def _pair(schema: str, row: Row, *, is_proof: bool) -> Fields:
    asked, used = _question(row)
    answer, answer_key = _answer(row)
    word = answer.strip().lower() if isinstance(answer, str) else ""
    if is_proof or word == "proof":
        raise UnusableRow("proof")
    if word in ("notfound", "not found"):
        raise UnusableRow("no_answer")
    if is_code_gold(answer):
        _check_code(answer)
    return _fields(schema, asked, answer, used={*used, answer_key})


_ADAPTERS: tuple[Callable[[Row, DatasetConfig], Fields | None], ...] = (
    _chosen, _livecodebench, _turns, _verl, _numina, _openmath, _plain,
)  # fmt: skip


def _question(row: Row) -> tuple[Any, set[str]]:
    key = next((key for key in _QUESTION_KEYS if row.get(key)), None)
    return (None, set()) if key is None else (row[key], {key})


def _answer(row: Row) -> tuple[Any, str]:
    key = next((key for key in _ANSWER_KEYS if row.get(key) is not None), "")
    answer = row.get(key)
    # Raw GSM8K: the worked solution, then the number after this mark, with thousands separators.
    if isinstance(answer, str) and _GSM8K_MARK in answer:
        return answer.rsplit(_GSM8K_MARK, 1)[1].strip().replace(",", ""), key
    return answer, key


def _check_code(gold: Any) -> None:
    try:
        read_gold(gold)
    except BadGold as error:
        in_file, none = "cannot be read as" in str(error), str(error).startswith("no tests")
        raise UnusableRow("tests_in_file" if in_file else "no_answer" if none else "bad_tests") from None


def _fields(
    schema: str,
    asked: Any,
    answer: Any,
    *,
    used: set[str],
    meta: Mapping[str, Any] | None = None,
    levels: Mapping[str, float] | None = None,
) -> Fields:
    messages = parse_messages(asked)
    if messages is None or messages[-1]["role"] == "assistant" or not messages[-1]["content"].strip():
        raise UnusableRow("no_prompt")
    if is_empty_answer(answer):
        raise UnusableRow("no_answer")
    return Fields(
        schema=schema,
        messages=messages,
        answer=answer,
        used=frozenset(used),
        meta=meta or {},
        levels=levels or {},
    )
