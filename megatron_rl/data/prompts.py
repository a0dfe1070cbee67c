"""Public row schemas to prompts: what is kept, and what is dropped for which reason.

Knows the schemas of verl and Klear (`prompt`, `reward_model`, `extra_info`), of problem/answer sets, and of
question/answer sets such as GSM8K and DeepMath. The gold answer stays as the row holds it; rewards decode it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.data.rows import Row, read_rows
from megatron_rl.data.types import Message, Prompt
from megatron_rl.errors import DataError

Render = Callable[[Sequence[Message]], Sequence[int]]

_QUESTION_KEYS = ("problem", "question", "prompt")
_ANSWER_KEYS = ("final_answer", "answer")
_GSM8K_MARK = "\n#### "


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Prompts in file order, ids unique, with what became of every row: num_rows = kept + sum(dropped)."""

    prompts: Sequence[Prompt]
    token_ids: Mapping[str, Sequence[int]]  # prompt id: rendered ids, as the engine gets them
    dropped: Mapping[str, int]  # reason: rows
    renamed: int = 0  # rows whose id another row with other content had already

    @property
    def num_rows(self) -> int:
        return len(self.prompts) + sum(self.dropped.values())

    def summary(self) -> str:
        """One line: rows kept, dropped by reason, renamed."""
        return f"kept {len(self.prompts)} of {self.num_rows} rows{_reasons(self.dropped, self.renamed)}"


def load_prompts(path: str | Path, *, render: Render, max_prompt_tokens: int) -> PromptSet:
    """Read a prompt file; `render` gives the token ids that the engine will be sent (`chat.render_prompt`).

    Drops and counts rows: `no_prompt`, `no_answer` (nothing to grade against), `duplicate` (same id and
    content), `too_long` (more than `max_prompt_tokens`). Raises DataError for a broken file and when no row
    is left.
    """
    prompts, dropped, renamed = prompts_from_rows(read_rows(path))
    kept: list[Prompt] = []
    token_ids: dict[str, Sequence[int]] = {}
    for prompt in prompts:
        ids = tuple(render(prompt.messages))
        if len(ids) > max_prompt_tokens:
            dropped["too_long"] += 1
            continue
        kept.append(prompt)
        token_ids[prompt.id] = ids
    if not kept:
        raise DataError(
            f"{path}: no prompt is left of {sum(dropped.values())} rows{_reasons(dropped, renamed)}; "
            f"max_prompt_tokens is {max_prompt_tokens}, and a row needs `prompt` with "
            "`reward_model.ground_truth`, or `problem`/`question` with `answer`/`final_answer`"
        )
    return PromptSet(prompts=tuple(kept), token_ids=token_ids, dropped=dict(dropped), renamed=renamed)


def prompts_from_rows(rows: Iterable[Row]) -> tuple[list[Prompt], Counter[str], int]:
    """(prompts, rows dropped by reason, rows renamed), before any rendering.

    A row without id gets one from its content, so it is the same in every run. Of rows with the same id,
    identical ones are dropped, different ones get the hash of their content appended.
    """
    prompts: list[Prompt] = []
    dropped: Counter[str] = Counter()
    renamed = 0
    seen_ids: set[str] = set()
    seen_rows: set[tuple[str, str]] = set()
    for row in rows:
        messages, answer = _messages(row), _answer(row)
        if messages is None or is_empty_answer(answer):
            dropped["no_prompt" if messages is None else "no_answer"] += 1
            continue
        digest = _content_hash(messages, answer)
        prompt = _prompt(row, messages, answer, digest)
        if (prompt.id, digest) in seen_rows:
            dropped["duplicate"] += 1
            continue
        seen_rows.add((prompt.id, digest))
        if prompt.id in seen_ids:
            prompt = replace(prompt, id=f"{prompt.id}-{digest}")
            renamed += 1
        seen_ids.add(prompt.id)
        prompts.append(prompt)
    return prompts, dropped, renamed


def is_empty_answer(answer: Any) -> bool:
    """Null, NaN, blank text, a list without a real entry, or such a list as JSON: nothing to grade by."""
    if answer is None or (isinstance(answer, float) and math.isnan(answer)):
        return True
    if isinstance(answer, str):
        text = answer.strip()
        return not text or (text.startswith("[") and is_empty_answer(_decoded(text)))
    if isinstance(answer, Mapping):
        return not answer
    if isinstance(answer, Sequence):
        return all(is_empty_answer(entry) for entry in answer)
    return False


def parse_messages(value: Any) -> list[Message] | None:
    """Chat messages out of a list of mappings (any key order) or one user's text; None if it is neither."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if value.strip() else None
    if not isinstance(value, Sequence) or not value:
        return None
    messages: list[Message] = []
    for entry in value:
        if not isinstance(entry, Mapping):
            return None
        role, content = entry.get("role"), entry.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        messages.append({"role": role, "content": content})
    return messages


def _messages(row: Row) -> list[Message] | None:
    messages = parse_messages(next((row[key] for key in ("prompt", *_QUESTION_KEYS) if row.get(key)), None))
    if messages is None or messages[-1]["role"] == "assistant" or not messages[-1]["content"].strip():
        return None
    return messages


def _answer(row: Row) -> Any:
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping):
        return reward_model.get("ground_truth")
    answer = next((row[key] for key in _ANSWER_KEYS if row.get(key) is not None), None)
    # Raw GSM8K: the worked solution, then the number after this mark, with thousands separators.
    if isinstance(answer, str) and _GSM8K_MARK in answer:
        return answer.rsplit(_GSM8K_MARK, 1)[1].strip().replace(",", "")
    return answer


def _prompt(row: Row, messages: list[Message], answer: Any, digest: str) -> Prompt:
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    source = str(row.get("data_source") or "")
    known = {"id", "data_source", "difficulty", "extra_info", "reward_model", *_QUESTION_KEYS, *_ANSWER_KEYS}
    difficulty = extra.get("difficulty")
    return Prompt(
        id=_row_id(row, extra, source) or digest,
        messages=messages,
        answer=answer,
        data_source=source,
        difficulty=_number(row.get("difficulty") if difficulty is None else difficulty),
        meta={**{key: value for key, value in row.items() if key not in known}, **extra},
    )


def _row_id(row: Row, extra: Mapping[str, Any], source: str) -> str:
    if row.get("id") is not None:
        return str(row["id"])
    index = extra.get("index")
    if index is None:
        return ""
    return f"{source}-{index}" if source else str(index)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _content_hash(messages: Sequence[Message], answer: Any) -> str:
    content = json.dumps([list(messages), answer], sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    # Not JSON after all, such as the interval `[0, 1)`: an answer.
    except ValueError:
        return text.strip("[]") or None


def _reasons(dropped: Mapping[str, int], renamed: int) -> str:
    parts = [f"{reason} {count}" for reason, count in sorted(dropped.items()) if count]
    text = f" (dropped: {', '.join(parts)})" if parts else ""
    return f"{text} ({renamed} with the id of another row got a new one)" if renamed else text
