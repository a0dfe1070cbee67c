"""What a data file holds, counted in one pass: the numbers behind `megatron-rl data`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_rl.data.chat import render_conversation, render_prompt
from megatron_rl.data.prompts import content_hash, prompts_from_rows
from megatron_rl.data.rows import Row, iter_rows
from megatron_rl.data.schemas import UnusableRow, read_fields
from megatron_rl.data.sft_data import conversation
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.types import Message
from megatron_rl.errors import DataError
from megatron_rl.recipe.dataset import PLACE, ConversationConfig, DatasetConfig

Kind = Literal["prompts", "conversations"]

_CONVERSATION_KEYS = ("messages", "conversations", "conversation", "response", "completion")
_LISTED_ROWS = 5  # of each reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a file is read: what a stage of a recipe would say."""

    kind: Kind | None = None  # None: told from the first row
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    columns: ConversationConfig = field(default_factory=ConversationConfig)
    template: str = PLACE
    truncation: Literal["drop", "left"] = "drop"
    max_tokens: int | None = None  # of a prompt, or of a whole conversation


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One example as the trainer sees it: pieces of text, and whether their tokens are trained on.

    The response of a prompt is not written yet, so its place is an empty trained piece.
    """

    id: str
    pieces: Sequence[tuple[str, bool]]
    tokens: int | None
    answer: str = ""
    difficulty: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Counts of one file: num_rows = kept + sum(dropped)."""

    file: str
    kind: Kind
    num_rows: int
    kept: int
    dropped: Mapping[str, int]  # reason: rows
    dropped_rows: Mapping[str, Sequence[int]]  # reason: numbers of its first rows, from 1
    schemas: Mapping[str, int]
    columns: Sequence[str]
    renamed: int = 0
    truncated: int = 0
    repeated: int = 0  # kept problems that stand there twice under other ids
    conflicting: int = 0  # of those, with another gold
    sources: Mapping[str, int] = field(default_factory=dict)
    gold_types: Mapping[str, int] = field(default_factory=dict)
    difficulty: Mapping[str, int] = field(default_factory=dict)  # band: prompts
    tokens: Mapping[str, int] = field(default_factory=dict)  # p50, p95, max and more; empty without tokenizer
    shown: Sequence[Shown] = ()


def survey_file(path: str | Path, reading: Reading, *, tokenizer: Tokenizer | None, num_shown: int) -> Survey:
    """Read the whole file. Raises DataError for one that is broken or a chat template that does not fit."""
    first = next(iter_rows(path), None)
    kind = reading.kind or kind_of(first or {})
    if kind == "prompts":
        return _prompts(path, reading, tokenizer, num_shown)
    return _conversations(path, reading, tokenizer, num_shown)


def kind_of(row: Row) -> Kind:
    """Conversations have turns or a response; a problem with an answer, even with a worked solution, is a prompt."""
    is_prompt = "reward_model" in row or not any(key in row for key in _CONVERSATION_KEYS)
    return "prompts" if is_prompt else "conversations"


class _Watched:
    """Rows on their way to the reader: counted by schema, and by the reason why they cannot be used."""

    def __init__(self, path: str | Path, dataset: DatasetConfig) -> None:
        self._path, self._dataset = path, dataset
        self.num_rows = 0
        self.schemas: Counter[str] = Counter()
        self.columns: dict[str, None] = {}
        self.where: dict[str, list[int]] = {}

    def __iter__(self) -> Iterator[Row]:
        for row in iter_rows(self._path):
            self.num_rows += 1
            self.columns |= dict.fromkeys(row)
            try:
                self.schemas[read_fields(row, self._dataset).schema] += 1
            except UnusableRow as unusable:
                note(self.where, unusable.reason, self.num_rows)
            yield row


def note(where: dict[str, list[int]], reason: str, number: int) -> None:
    """Remember the first few rows of a reason."""
    rows = where.setdefault(reason, [])
    if len(rows) < _LISTED_ROWS:
        rows.append(number)


def _prompts(path: str | Path, reading: Reading, tokenizer: Tokenizer | None, num_shown: int) -> Survey:
    rows = _Watched(path, reading.dataset)
    prompts, dropped, renamed = prompts_from_rows(
        rows, dataset=reading.dataset, template=reading.template, place=str(path)
    )
    lengths: list[int] = []
    shown: list[Shown] = []
    kept, truncated = [], 0
    for prompt in prompts:
        ids = None if tokenizer is None else render_prompt(tokenizer, prompt.messages)
        if ids is not None and reading.max_tokens is not None and len(ids) > reading.max_tokens:
            if reading.truncation == "drop":
                dropped["too_long"] += 1
                continue
            truncated += 1
            ids = ids[-reading.max_tokens :]
        kept.append(prompt)
        if ids is not None:
            lengths.append(len(ids))
        if len(shown) < num_shown:
            pieces = _plain(prompt.messages) if tokenizer is None else [(tokenizer.decode(ids or []), False)]
            shown.append(
                Shown(
                    id=prompt.id,
                    pieces=[*pieces, ("", True)],
                    tokens=None if ids is None else len(ids),
                    answer=repr(prompt.answer),
                    difficulty=prompt.difficulty,
                )
            )
    repeated, conflicting = _repeats([(prompt.messages, prompt.answer) for prompt in kept])
    return Survey(
        file=str(path),
        kind="prompts",
        num_rows=rows.num_rows,
        kept=len(kept),
        dropped=dict(dropped),
        dropped_rows=rows.where,
        schemas=dict(rows.schemas),
        columns=list(rows.columns),
        renamed=renamed,
        truncated=truncated,
        repeated=repeated,
        conflicting=conflicting,
        sources=_counted(prompt.data_source or "(none)" for prompt in kept),
        gold_types=_counted(type(prompt.answer).__name__ for prompt in kept),
        difficulty=histogram([prompt.difficulty for prompt in kept]),
        tokens=_spread(lengths),
        shown=shown,
    )


def _conversations(path: str | Path, reading: Reading, tokenizer: Tokenizer | None, num_shown: int) -> Survey:
    dropped: Counter[str] = Counter()
    schemas: Counter[str] = Counter()
    where: dict[str, list[int]] = {}
    columns: dict[str, None] = {}
    lengths: list[int] = []
    seen: list[tuple[list[Message], Any]] = []
    shown: list[Shown] = []
    num_rows = trained = 0
    for number, row in enumerate(iter_rows(path), start=1):
        num_rows = number
        columns |= dict.fromkeys(row)
        messages = conversation(row, reading.columns)
        reason = _unusable(messages)
        pieces: list[tuple[str, bool]] = []
        length, in_loss = None, 0
        if messages is not None and reason is None:
            pieces, length, in_loss = _rendered(tokenizer, messages, f"{path}: row {number}")
            if length is not None and reading.max_tokens is not None and length > reading.max_tokens:
                reason = "too_long"
        if messages is None or reason is not None:
            dropped[reason or "no_messages"] += 1
            note(where, reason or "no_messages", number)
            continue
        schemas[f"{len(messages)} turns"] += 1
        seen.append((messages, None))
        trained += in_loss
        lengths += [] if length is None else [length]
        if len(shown) < num_shown:
            shown.append(Shown(id=str(row.get("id", f"row-{number - 1}")), pieces=pieces, tokens=length))
    repeated, _ = _repeats(seen)
    spread = _spread(lengths)
    return Survey(
        file=str(path),
        kind="conversations",
        num_rows=num_rows,
        kept=len(seen),
        dropped=dict(dropped),
        dropped_rows=where,
        schemas=dict(schemas.most_common()),
        columns=list(columns),
        repeated=repeated,
        tokens=spread | {"trained": trained} if spread else {},
        shown=shown,
    )


def _unusable(messages: Sequence[Message] | None) -> str | None:
    if messages is None:
        return "no_messages"
    return None if any(message["role"] == "assistant" for message in messages) else "untrained"


def _rendered(
    tokenizer: Tokenizer | None, messages: list[Message], place: str
) -> tuple[list[tuple[str, bool]], int | None, int]:
    """(pieces, tokens, trained tokens)."""
    if tokenizer is None:
        return _plain(messages), None, 0
    try:
        ids, mask = render_conversation(tokenizer, messages)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
    pieces: list[tuple[list[int], bool]] = []
    for token, is_trained in zip(ids, mask, strict=True):
        if not pieces or pieces[-1][1] != is_trained:
            pieces.append(([], is_trained))
        pieces[-1][0].append(token)
    return [(tokenizer.decode(run), is_trained) for run, is_trained in pieces], len(ids), sum(mask)


def _plain(messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """Turns without a chat template: the role, then what it says."""
    pieces: list[tuple[str, bool]] = []
    for message in messages:
        is_trained = message["role"] == "assistant"
        pieces += [(f"{message['role']}: ", False), (message["content"], is_trained), ("\n", False)]
    return pieces


def _repeats(pairs: Sequence[tuple[Sequence[Message], Any]]) -> tuple[int, int]:
    """(texts that stood there before, of those with another gold)."""
    golds: dict[str, str] = {}
    repeated = conflicting = 0
    for messages, gold in pairs:
        key, value = content_hash(messages, None), content_hash([], gold)
        repeated += key in golds
        conflicting += golds.setdefault(key, value) != value
    return repeated, conflicting


def histogram(values: Sequence[float | None]) -> dict[str, int]:
    """Counts by value where there are few of them, else in ten bands; those without one as `none`."""
    known = sorted(value for value in values if value is not None)
    counts = Counter(known)
    if len(counts) > 12:
        low, high = known[0], known[-1]
        bands = Counter(min(9, int((value - low) / (high - low) * 10)) for value in known)
        edges = [low + (high - low) * i / 10 for i in range(11)]
        found = {f"{edges[i]:.3g} to {edges[i + 1]:.3g}": bands[i] for i in range(10)}
    else:
        found = {f"{value:g}": counts[value] for value in sorted(counts)}
    missing = len(values) - len(known)
    return found | ({"none": missing} if missing else {})


def _spread(lengths: Sequence[int]) -> dict[str, int]:
    if not lengths:
        return {}
    ordered = sorted(lengths)
    at = {"min": 0.0, "p50": 0.5, "p95": 0.95, "max": 1.0}
    return {name: ordered[round(share * (len(ordered) - 1))] for name, share in at.items()} | {
        "sum": sum(ordered)
    }


def _counted(names: Iterator[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())
