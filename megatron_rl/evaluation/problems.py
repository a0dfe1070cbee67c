"""The problems of an evaluation: which of a file's, and none left out in silence.

Files for avg@32 may hold each row 32 times over. `data.prompts` takes rows of equal content for one problem: left
apart they would pass for 32, and the standard error over problems would be far too small.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.data.prompts import PromptSet
from megatron_rl.data.types import Prompt
from megatron_rl.errors import DataError
from megatron_rl.rewards.code_gold import BadGold, read_gold
from megatron_rl.rewards.math_answer import gold_strings

_DATE_KEYS = ("date", "contest_date")
_COPY = "duplicate"  # the one reason to leave a row out that leaves no problem out


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Problems dated in [since, until): the last day is not part of it. None: no bound on that side."""

    since: datetime.date | None = None
    until: datetime.date | None = None

    def __bool__(self) -> bool:
        return self.since is not None or self.until is not None

    def __contains__(self, day: datetime.date) -> bool:
        return (self.since is None or self.since <= day) and (self.until is None or day < self.until)


def select_problems(
    name: str, prompts: PromptSet, *, window: Window = Window(), limit: int | None = None
) -> PromptSet:
    """Those dated inside `window`, the first `limit` of them. Raises DataError for undated ones, and for none."""
    kept: Sequence[Prompt] = prompts.prompts
    dropped = dict(prompts.dropped)
    if window:
        days = {prompt.id: _day(prompt) for prompt in kept}
        undated = [id_ for id_, day in days.items() if day is None]
        if undated:
            raise DataError(
                f"{name}: {len(undated)} of {len(kept)} problems carry no date (the first is {undated[0]!r}), so that "
                f"a window cannot choose them; need `{'` or `'.join(_DATE_KEYS)}` as YYYY-MM-DD in each row"
            )
        kept = [prompt for prompt in kept if (day := days[prompt.id]) is not None and day in window]
        dropped["outside_window"] = len(days) - len(kept)
        if not kept:
            known = sorted(day for day in days.values() if day is not None)
            raise DataError(
                f"{name}: no problem lies in [{window.since or 'the first'}, {window.until or 'the last'}); those of "
                f"the file are from {known[0]} to {known[-1]}"
            )
    shown = tuple(kept[:limit])
    dropped["beyond_limit"] = len(kept) - len(shown)
    return replace(prompts, prompts=shown, dropped=dropped)


def without_bad_golds(prompts: PromptSet, *, reward: str) -> PromptSet:
    """Those whose gold the reward can grade by; the others dropped as `bad_gold`."""
    can_grade = _can_grade_programs if reward == "code_tests" else gold_strings
    kept = tuple(prompt for prompt in prompts.prompts if can_grade(prompt.answer))
    dropped = {**prompts.dropped, "bad_gold": len(prompts.prompts) - len(kept)}
    return replace(prompts, prompts=kept, dropped=dropped)


def check_complete(name: str, path: str, prompts: PromptSet) -> None:
    """Raises DataError if rows of the file cannot be evaluated: a smaller set is another benchmark."""
    lost = {reason: count for reason, count in prompts.dropped.items() if count and reason != _COPY}
    if lost or not prompts.prompts:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(lost.items()))
        longer = "raise --max-prompt-tokens (too_long), " if "too_long" in lost else ""
        raise DataError(
            f"{name}: {sum(lost.values())} of {prompts.num_rows} rows of {path} cannot be evaluated ({reasons}), which "
            f"would make it another benchmark; {longer}mend the file (`megatron-rl data FILE` names the rows), or give "
            f"--skip-unusable to evaluate the rest"
        )


def _can_grade_programs(gold: Any) -> bool:
    try:
        read_gold(gold)
    except BadGold:
        return False
    return True


def _day(prompt: Prompt) -> datetime.date | None:
    value = next((prompt.meta[key] for key in _DATE_KEYS if prompt.meta.get(key)), None)
    if isinstance(value, datetime.date):
        return value.date() if isinstance(value, datetime.datetime) else value
    try:
        return datetime.date.fromisoformat(str(value)[:10])
    except ValueError:
        return None


def set_counts(prompts: PromptSet) -> Mapping[str, Any]:
    """Rows of the file, problems evaluated, and rows left out by reason, for the results."""
    return {
        "rows": prompts.num_rows,
        "problems": len(prompts.prompts),
        "left_out": {reason: count for reason, count in sorted(prompts.dropped.items()) if count},
    }
