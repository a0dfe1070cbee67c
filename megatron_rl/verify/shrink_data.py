"""The first rows of a recipe's data files, as many as a small run reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_rl.data.chat import render_prompt
from megatron_rl.data.curriculum import is_in_window, window_bounds
from megatron_rl.data.prompts import prompts_from_rows
from megatron_rl.data.rows import Row, read_rows
from megatron_rl.data.sft_data import build_sft_data
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import DataError
from megatron_rl.recipe.dataset import DatasetConfig
from megatron_rl.recipe.stages import CurriculumWindow, SftStage

ROWS = 64  # of each file, or of each window of a curriculum
_TRIED = 4096  # rows that are looked at
_PROMPT_TOKENS, _SAMPLE_TOKENS = 256, 512  # longer rows are passed over where shorter ones are found


def cut_samples(stage: SftStage, out: Path, tokenizer: Tokenizer) -> int:
    """Write the first conversations that fit; the tokens of the longest. Raises DataError when none does."""

    source, max_tokens = stage.data, stage.max_sample_tokens

    def length(row: Row) -> int | None:
        try:
            data = build_sft_data(
                [row], tokenizer=tokenizer, max_sample_tokens=max_tokens, seed=0, columns=stage.columns
            )
        except DataError:
            return None
        return len(data.tokens)

    rows = read_rows(source)[:_TRIED]
    chosen = _first(rows, length, count=ROWS, limits=(_SAMPLE_TOKENS, max_tokens))
    if not chosen:
        raise DataError(
            f"{source}: none of the first {len(rows)} rows is a conversation of at most {max_tokens} tokens"
        )
    _write(out, (row for row, _ in chosen))
    return max(tokens for _, tokens in chosen)


def cut_prompts(
    source: str,
    out: Path,
    tokenizer: Tokenizer,
    windows: Sequence[CurriculumWindow],
    *,
    max_tokens: int,
    dataset: DatasetConfig,
    template: str,
) -> int:
    """Write the first prompts that fit, so many for each window; the tokens of the longest.

    Raises DataError when none does.
    """

    def length(row: Row, window: CurriculumWindow | None) -> int | None:
        prompts, _, _ = prompts_from_rows([row], dataset=dataset, template=template)
        if not prompts or (window is not None and not is_in_window(prompts[0], window, {})):
            return None
        return len(render_prompt(tokenizer, prompts[0].messages))

    rows = read_rows(source)
    chosen: list[tuple[Row, int]] = []
    for window in windows or (None,):
        found = _first(
            rows,
            lambda row, window=window: length(row, window),  # type: ignore[misc]
            count=ROWS,
            limits=(_PROMPT_TOKENS, max_tokens),
        )
        if not found:
            where = "" if window is None else " with a {} in {}".format(*window_bounds(window))
            raise DataError(f"{source}: no prompt of at most {max_tokens} tokens{where}")
        chosen += [pair for pair in found if pair not in chosen]
    _write(out, (row for row, _ in chosen))
    return max(tokens for _, tokens in chosen)


def _first(
    rows: Sequence[Row], length: Callable[[Row], int | None], *, count: int, limits: tuple[int, int]
) -> list[tuple[Row, int]]:
    """The first `count` rows within the smaller limit, or within the larger one where that leaves nothing."""
    found: list[tuple[Row, int]] = []
    longer: list[tuple[Row, int]] = []
    for row in rows:
        tokens = length(row)
        if tokens is None or tokens > limits[1]:
            continue
        (found if tokens <= limits[0] else longer).append((row, tokens))
        if len(found) == count:
            break
    return found or longer[:count]


def _write(out: Path, rows: Iterable[Row]) -> None:
    # parquet has dates; no reader here looks at one
    out.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
