"""How the rows of a stage's data file are read, where recognising their schema is not enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.types import PositiveFloat, Text

PLACE = "{problem}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DifficultyConfig:
    """Where a row says how hard it is, and what its number means.

    Read as value / denominator where higher is harder, and as 1 - value / denominator where it is easier, as a pass
    rate is.
    """

    column: Text  # dotted, such as extra_info.model_difficulty.DeepSeek-R1-Distill-Qwen-7B
    higher_is: Literal["harder", "easier"] = "harder"
    denominator: PositiveFloat = 1.0  # 16 for "solved by so many of 16 samples"


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    """Columns are dotted paths into a row; null: recognised from the schema (megatron_rl/data/README.md)."""

    prompt: Text | None = None  # the problem: text, or chat messages
    answer: Text | None = None  # the gold
    id: Text | None = None
    difficulty: DifficultyConfig | None = (
        None  # null: `difficulty`, or a pass rate under one of its known names
    )
    unwrap: Text | None = (
        None  # instruction that the file wraps around each problem, with {problem}: taken away
    )
    # what counts as the same row: equal id and content, or equal content whatever the id
    duplicates: Literal["id", "content"] = "id"
    keep_columns: tuple[Text, ...] | None = None  # extra columns that prompts carry along; null: all


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationConfig:
    """Columns of supervised conversations, dotted; null: recognised from the schema."""

    messages: Text | None = None  # list of turns: role and content, or from and value
    prompt: Text | None = None  # with `response`, instead of `messages`
    response: Text | None = None
    system: Text | None = None  # column with the system turn


def template_problems(template: str, path: str) -> Iterator[Problem]:
    """A text that a problem is put into names its place once."""
    if template.count(PLACE) != 1:
        yield Problem(
            path,
            f"holds {PLACE} {template.count(PLACE)} times, must hold it once: the place of the problem, as in "
            f'"{PLACE}\\n\\nPut the final answer within \\\\boxed{{}}."',
        )


def dataset_problems(dataset: DatasetConfig, path: str) -> Iterator[Problem]:
    if dataset.unwrap is not None:
        yield from template_problems(dataset.unwrap, f"{path}.unwrap")
        if dataset.unwrap.strip() == PLACE:
            yield Problem(f"{path}.unwrap", "holds nothing around the problem; remove it")


def conversation_problems(columns: ConversationConfig, path: str) -> Iterator[Problem]:
    if (columns.prompt is None) != (columns.response is None):
        given, missing = ("prompt", "response") if columns.response is None else ("response", "prompt")
        yield Problem(f"{path}.{missing}", f"is missing; {path}.{given} names one half of a conversation")
    if columns.messages is not None and columns.prompt is not None:
        yield Problem(f"{path}.messages", "cannot stand beside prompt and response; name one of the two")
