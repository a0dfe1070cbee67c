"""Supervised conversations as training samples, in an order that is a pure function of seed and step."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.data.chat import render_conversation
from megatron_rl.data.columns import column
from megatron_rl.data.cursor import permutation
from megatron_rl.data.rows import Row, iter_rows
from megatron_rl.data.schemas import parse_messages
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.types import Message, TrainSample
from megatron_rl.errors import DataError
from megatron_rl.recipe.dataset import ConversationConfig

# (question, answer) columns of the schemas that are not conversations yet.
_PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("problem", "generated_solution"),
    ("problem", "solution"),
    ("question", "response"),
    ("question", "solution"),
    ("question", "answer"),
    ("input", "output"),
)
_TURN_KEYS = ("messages", "conversations", "conversation")
# OpenThoughts-114k marks reasoning and answer by words of its own
_THOUGHT_MARKS = (
    ("<|begin_of_thought|>", "<think>"),
    ("<|end_of_thought|>", "</think>"),
    ("<|begin_of_solution|>", ""),
    ("<|end_of_solution|>", ""),
)
_AS_RECOGNISED = ConversationConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class SftData:
    """Rendered samples, stored flat: a million of Python's integers would not fit where these do."""

    seed: int
    sample_ids: tuple[str, ...]
    offsets: np.ndarray  # [N + 1] int64, where each sample starts
    tokens: np.ndarray  # [all tokens] int32
    mask: np.ndarray  # [all tokens] bool
    dropped: Mapping[str, int]  # reason: rows

    def __len__(self) -> int:
        return len(self.sample_ids)

    def sample(self, index: int) -> TrainSample:
        """Sample `index` in file order."""
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return TrainSample(
            token_ids=self.tokens[span].tolist(),
            loss_mask=self.mask[span].tolist(),
            sample_id=self.sample_ids[index],
        )

    def batch(self, step: int, global_batch_size: int) -> list[TrainSample]:
        """Samples of optimizer step `step` (from 0), the same on every rank and after every resume.

        All samples once per epoch, in an order that is f(seed, epoch); a batch may cross the border of two
        epochs.
        """
        first = step * global_batch_size
        places = (divmod(place, len(self)) for place in range(first, first + global_batch_size))
        return [
            self.sample(permutation(len(self), seed=self.seed, epoch=epoch)[offset])
            for epoch, offset in places
        ]

    def digest(self) -> str:
        """sha256 of what batches are made of: tokens and masks of every sample, in order."""
        digest = hashlib.sha256()
        for array in (self.offsets, self.tokens, self.mask):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def summary(self) -> str:
        """One line: samples kept, rows dropped by reason, tokens."""
        reasons = "".join(f", dropped {count} {reason}" for reason, count in sorted(self.dropped.items()))
        return f"kept {len(self)} samples{reasons}; {len(self.tokens)} tokens, {int(self.mask.sum())} trained"


def load_sft_data(
    path: str | Path,
    *,
    tokenizer: Tokenizer,
    max_sample_tokens: int,
    seed: int,
    columns: ConversationConfig = _AS_RECOGNISED,
) -> SftData:
    """Read and render conversations: the schemas of `conversation`.

    Drops and counts rows: `no_messages` (none of these), `too_long` (more than `max_sample_tokens`),
    `untrained` (no token of the assistant). Raises DataError when no sample is left, or the chat template
    does not fit.
    """
    return build_sft_data(
        iter_rows(path),
        tokenizer=tokenizer,
        max_sample_tokens=max_sample_tokens,
        seed=seed,
        columns=columns,
        place=str(path),
    )


def build_sft_data(
    rows: Iterable[Row],
    *,
    tokenizer: Tokenizer,
    max_sample_tokens: int,
    seed: int,
    columns: ConversationConfig = _AS_RECOGNISED,
    place: str = "rows",
) -> SftData:
    """`load_sft_data` for rows already read; `place` opens the error messages."""
    dropped: Counter[str] = Counter()
    names: list[str] = []
    tokens: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for number, row in enumerate(rows):
        messages = conversation(row, columns)
        if messages is None:
            dropped["no_messages"] += 1
            continue
        token_ids, loss_mask = _rendered(tokenizer, messages, f"{place}: row {number}")
        if len(token_ids) > max_sample_tokens or not any(loss_mask[1:]):
            dropped["too_long" if len(token_ids) > max_sample_tokens else "untrained"] += 1
            continue
        names.append(_name(row, number))
        tokens.append(np.array(token_ids, dtype=np.int32))
        masks.append(np.array(loss_mask, dtype=np.bool_))
    if not names:
        reasons = (
            ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items()))
            or "the file has no rows"
        )
        raise DataError(
            f"{place}: no sample is left ({reasons}); max_sample_tokens is {max_sample_tokens}, and a row "
            "needs `messages` or `conversations`, or `prompt` and `response`, or `problem` and `solution`"
        )
    return SftData(
        seed=seed,
        sample_ids=tuple(names),
        offsets=np.cumsum([0, *(len(ids) for ids in tokens)]),
        tokens=np.concatenate(tokens),
        mask=np.concatenate(masks),
        dropped=dict(dropped),
    )


def conversation(row: Row, columns: ConversationConfig = _AS_RECOGNISED) -> list[Message] | None:
    """The turns of a row: `messages` or `conversations`, or a question column and an answer column; None if neither.

    A system turn comes from the turns themselves, else from a column `system`. What an answer thinks stays whole.
    """
    messages = _turns(row, columns)
    if messages is None:
        return None
    system = column(row, columns.system or "system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return [_with_think_tags(message) if message["role"] == "assistant" else message for message in messages]


def _turns(row: Row, columns: ConversationConfig) -> list[Message] | None:
    if columns.messages is not None:
        return parse_messages(column(row, columns.messages))
    pairs = _PAIRS if columns.prompt is None else ((columns.prompt, columns.response or ""),)
    if columns.prompt is None:
        key = next((key for key in _TURN_KEYS if key in row), None)
        if key is not None:
            return parse_messages(row[key])
    for question, answer in pairs:
        messages = parse_messages(column(row, question))
        response: Any = column(row, answer)
        if messages is not None and isinstance(response, str) and response.strip():
            return [*messages, {"role": "assistant", "content": response}]
    return None


def _with_think_tags(message: Message) -> Message:
    content = message["content"]
    if _THOUGHT_MARKS[0][0] not in content:
        return message
    for mark, tag in _THOUGHT_MARKS:
        content = content.replace(mark, tag)
    return {**message, "content": content.strip()}


def _rendered(tokenizer: Tokenizer, messages: list[Message], place: str) -> tuple[list[int], list[bool]]:
    try:
        return render_conversation(tokenizer, messages)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def _name(row: Row, number: int) -> str:
    return str(row["id"]) if row.get("id") is not None else f"row-{number}"
