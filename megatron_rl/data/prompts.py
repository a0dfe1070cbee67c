"""Public row schemas to prompts: what is kept, and what is dropped for which reason.

What a row says is up to `data.schemas`; this owns ids, duplicates, the prompt's wording and its length.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_rl.data.columns import column
from megatron_rl.data.rows import Row, iter_rows
from megatron_rl.data.schemas import Fields, UnusableRow, read_fields, row_difficulty
from megatron_rl.data.types import Message, Prompt
from megatron_rl.errors import DataError
from megatron_rl.recipe.dataset import PLACE, DatasetConfig
from megatron_rl.recipe.stages import RlStage

Render = Callable[[Sequence[Message]], Sequence[int]]

_AS_RECOGNISED = DatasetConfig()

NAME_COLUMNS = (
    "a row needs `prompt` with `reward_model.ground_truth`, or `problem`/`question` with `answer`/`final_answer`; "
    "else name its columns in the recipe: dataset.prompt and dataset.answer"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Prompts in file order, ids unique, with what became of every row: num_rows = kept + sum(dropped)."""

    prompts: Sequence[Prompt]
    token_ids: Mapping[str, Sequence[int]]  # prompt id: rendered ids, as the engine gets them
    dropped: Mapping[str, int]  # reason: rows
    renamed: int = 0  # rows whose id another row with other content had already
    truncated: int = 0  # prompts that lost tokens on the left

    @property
    def num_rows(self) -> int:
        return len(self.prompts) + sum(self.dropped.values())

    def digest(self) -> str:
        """sha256 of what decides draws, seeds and rewards: all of a prompt; of its text the tokens count."""
        lines = [
            [p.id, list(self.token_ids[p.id]), p.answer, p.difficulty, p.data_source, dict(p.meta)]
            for p in self.prompts
        ]
        return hashlib.sha256(json.dumps(lines, sort_keys=True, default=repr).encode()).hexdigest()

    def summary(self) -> str:
        """One line: rows kept, dropped by reason, renamed, cut."""
        cut = f" ({self.truncated} cut on the left to the longest allowed)" if self.truncated else ""
        return f"kept {len(self.prompts)} of {self.num_rows} rows{_reasons(self.dropped, self.renamed)}{cut}"


def load_prompts(
    path: str | Path,
    *,
    render: Render,
    max_prompt_tokens: int,
    dataset: DatasetConfig = _AS_RECOGNISED,
    template: str = PLACE,
    truncation: Literal["drop", "left"] = "drop",
) -> PromptSet:
    """Read a prompt file; `render` gives the token ids that the engine will be sent (`chat.render_prompt`).

    Drops and counts rows by the reasons of megatron_rl/data/README.md. A prompt of more than `max_prompt_tokens` is
    dropped as `too_long`, or loses its first tokens with truncation `left`. Raises DataError for a broken file, for a
    column of `dataset` that no row has, and when no row is left.
    """
    prompts, dropped, renamed = prompts_from_rows(
        iter_rows(path), dataset=dataset, template=template, place=str(path)
    )
    kept: list[Prompt] = []
    token_ids: dict[str, Sequence[int]] = {}
    truncated = 0
    for prompt in prompts:
        ids = tuple(render(prompt.messages))
        if len(ids) > max_prompt_tokens and truncation == "drop":
            dropped["too_long"] += 1
            continue
        truncated += len(ids) > max_prompt_tokens
        kept.append(prompt)
        token_ids[prompt.id] = ids[-max_prompt_tokens:]
    if not kept:
        raise DataError(
            f"{path}: no prompt is left of {sum(dropped.values())} rows{_reasons(dropped, renamed)}; "
            f"{_advice(dropped, dataset, max_prompt_tokens)}`megatron-rl data FILE` shows what is read"
        )
    if dataset.difficulty is not None and all(prompt.difficulty is None for prompt in kept):
        raise DataError(
            f"{path}: no row has a number in dataset.difficulty.column = {dataset.difficulty.column}; "
            "`megatron-rl data FILE` shows the columns"
        )
    return PromptSet(
        prompts=tuple(kept), token_ids=token_ids, dropped=dict(dropped), renamed=renamed, truncated=truncated
    )


def _advice(dropped: Mapping[str, int], dataset: DatasetConfig, max_prompt_tokens: int) -> str:
    """What helps against the reasons at hand, each followed by a semicolon."""
    advice = ""
    if dropped.get("too_long"):
        advice += f"raise max_prompt_tokens = {max_prompt_tokens} or cut prompts (prompt_truncation: left); "
    if dropped.get("no_prompt") or dropped.get("no_answer"):
        named = [f"dataset.{key} = {name}" for key in ("prompt", "answer") if (name := getattr(dataset, key))]
        if named:
            advice += f"{' and '.join(named)} must be columns of the file; "
        else:
            advice += f"{NAME_COLUMNS}; "
    return advice


def stage_options(stage: RlStage, *, is_eval: bool = False) -> dict[str, Any]:
    """What `load_prompts` needs to know of a stage. Evaluation sets keep their own columns and repeat no problem."""
    return {
        "max_prompt_tokens": stage.sampling.max_prompt_tokens,
        "dataset": DatasetConfig(duplicates="content") if is_eval else stage.dataset,
        "template": stage.prompt_template,
        "truncation": stage.sampling.prompt_truncation,
    }


def prompts_from_rows(
    rows: Iterable[Row],
    *,
    dataset: DatasetConfig = _AS_RECOGNISED,
    template: str = PLACE,
    place: str = "rows",
) -> tuple[list[Prompt], Counter[str], int]:
    """(prompts, rows dropped by reason, rows renamed), before any rendering.

    A row without id gets one from its content, so it is the same in every run. Of rows with the same id,
    identical ones are dropped, different ones get the hash of their content appended. `place` opens the message of the
    DataError for a row whose difficulty contradicts `dataset`.
    """
    prompts: list[Prompt] = []
    dropped: Counter[str] = Counter()
    renamed = 0
    seen_ids: set[str] = set()
    seen_rows: set[tuple[str, str]] = set()
    for number, row in enumerate(rows, start=1):
        try:
            fields = read_fields(row, dataset)
        except UnusableRow as unusable:
            dropped[unusable.reason] += 1
            continue
        messages = fields.messages if dataset.unwrap is None else _unwrapped(fields.messages, dataset.unwrap)
        digest = content_hash(messages, fields.answer)
        try:
            prompt = _prompt(row, replace(fields, messages=messages), digest, dataset)
        except DataError as error:
            raise DataError(f"{place}: row {number}: dataset.{error}") from None
        same = ("" if dataset.duplicates == "content" else prompt.id, digest)
        if same in seen_rows:
            dropped["duplicate"] += 1
            continue
        seen_rows.add(same)
        if prompt.id in seen_ids:
            prompt = replace(prompt, id=f"{prompt.id}-{digest}")
            renamed += 1
        seen_ids.add(prompt.id)
        prompts.append(replace(prompt, messages=_worded(messages, template)))
    return prompts, dropped, renamed


def content_hash(messages: Sequence[Message], answer: Any) -> str:
    """16 hex digits of a problem and its gold."""
    content = json.dumps([list(messages), answer], sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def _worded(messages: list[Message], template: str) -> list[Message]:
    """The last turn put into the template."""
    if template == PLACE:
        return messages
    return [*messages[:-1], {**messages[-1], "content": template.replace(PLACE, messages[-1]["content"])}]


def _unwrapped(messages: list[Message], wrapping: str) -> list[Message]:
    """The last turn without the file's own instruction, where it carries it; spaces around do not count."""
    before, after = (part.strip() for part in wrapping.split(PLACE))
    content = messages[-1]["content"].strip()
    fits = content.startswith(before) and content.endswith(after) and len(content) > len(before) + len(after)
    if not fits:
        return messages
    inner = content.removeprefix(before).removesuffix(after).strip()
    return [*messages[:-1], {**messages[-1], "content": inner}]


def _prompt(row: Row, fields: Fields, digest: str, dataset: DatasetConfig) -> Prompt:
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    source = str(row.get("data_source") or "")
    taken = {"id", "data_source", "extra_info", *fields.used}
    meta = {**{key: value for key, value in row.items() if key not in taken}, **extra, **fields.meta}
    if dataset.keep_columns is not None:
        meta = {name: value for name, value in meta.items() if name in dataset.keep_columns}
    difficulty = row_difficulty(row, dataset.difficulty, levels=fields.levels)
    if dataset.difficulty is not None and dataset.difficulty.higher_is == "easier" and difficulty is not None:
        # what windows of pass rates go by
        meta["pass_rate"] = 1 - difficulty
    return Prompt(
        id=_row_id(row, extra, source, dataset.id) or digest,
        messages=fields.messages,
        answer=fields.answer,
        data_source=source,
        difficulty=difficulty,
        meta=meta,
    )


def _row_id(row: Row, extra: Mapping[str, Any], source: str, path: str | None) -> str:
    chosen = row.get("id", row.get("question_id")) if path is None else column(row, path)
    if chosen is not None:
        return str(chosen)
    index = extra.get("index") if extra.get("index") is not None else extra.get("id")
    if index is None:
        return ""
    return f"{source}-{index}" if source else str(index)


def _reasons(dropped: Mapping[str, int], renamed: int) -> str:
    parts = [f"{reason} {count}" for reason, count in sorted(dropped.items()) if count]
    text = f" (dropped: {', '.join(parts)})" if parts else ""
    return f"{text} ({renamed} with the id of another row got a new one)" if renamed else text
