"""Which prompts an iteration draws: all of them, or those of the difficulty or pass-rate window it falls into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.data.cursor import CursorState, PromptCursor
from megatron_rl.data.types import Prompt
from megatron_rl.errors import DataError, RecipeError
from megatron_rl.recipe.stages import CurriculumWindow


class CurriculumSampler:
    """Draws the prompts of each iteration without replacement; its state is what a checkpoint needs.

    Every window has its own cursor over its own pool, in the order of `prompts`. Without windows there is one
    pool of all prompts.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        windows: Sequence[CurriculumWindow],
        seed: int,
        *,
        iterations: int | None = None,
        pass_rates: Mapping[str, float] | None = None,
    ) -> None:
        """`iterations` are those of the stage, checked against the windows' when given.

        `pass_rates` are measured ones by prompt id, which count instead of those of the rows. Raises DataError for
        windows that hold no prompt, or where a prompt lacks what a window goes by, and RecipeError for windows whose
        iterations do not sum to `iterations`.
        """
        rates = pass_rates or {}
        check_windows(prompts, windows, iterations=iterations, pass_rates=rates)
        self._windows = tuple(windows)
        self._pools = [_pool(prompts, window, rates) for window in windows] or [list(prompts)]
        # The window's number is part of the seed: equal windows draw in different orders.
        self._cursors = [
            PromptCursor(len(pool), seed=seed * 1_000_003 + number) for number, pool in enumerate(self._pools)
        ]

        self._drawn: tuple[int, list[int]] = (-1, [])  # the last iteration, and what it has taken of its pool

    def window(self, iteration: int) -> CurriculumWindow | None:
        """The window of `iteration` (from 0); None without curriculum. Raises RecipeError beyond the last."""
        return self._windows[self._number(iteration)] if self._windows else None

    def pool_size(self, iteration: int) -> int:
        """Prompts that `iteration` can draw from."""
        return len(self._pools[self._number(iteration)])

    def take(self, iteration: int, count: int) -> list[Prompt]:
        """The next `count` prompts for `iteration`.

        None comes twice in one iteration, over all its takes, unless the pool is smaller than what it takes.
        """
        number = self._number(iteration)
        pool = self._pools[number]
        before = self._drawn[1] if self._drawn[0] == iteration else []
        indices = self._cursors[number].take(count, after=before)
        self._drawn = iteration, [*before, *indices]
        return [pool[index] for index in indices]

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON types: one cursor per window."""
        return {"cursors": [cursor.state.to_dict() for cursor in self._cursors]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises DataError when the state belongs to other windows or other data."""
        saved = state["cursors"]
        if len(saved) != len(self._cursors):
            raise DataError(
                f"curriculum: has {len(self._cursors)} windows, but the saved state has {len(saved)}; "
                "resume with the recipe that the checkpoint was written with"
            )
        for cursor, one in zip(self._cursors, saved, strict=True):
            cursor.restore(CursorState.from_dict(one))

    def _number(self, iteration: int) -> int:
        if not self._windows:
            return 0
        first = 0
        for number, window in enumerate(self._windows):
            first += window.iterations
            if iteration < first:
                return number
        raise RecipeError(
            f"curriculum: iteration {iteration} lies beyond the {first} iterations of its windows"
        )


def check_windows(
    prompts: Sequence[Prompt],
    windows: Sequence[CurriculumWindow],
    *,
    iterations: int | None = None,
    pass_rates: Mapping[str, float] | None = None,
) -> None:
    """Raise RecipeError or DataError for windows that these prompts cannot serve; none always fit."""
    if not windows:
        return
    total = sum(window.iterations for window in windows)
    if iterations is not None and total != iterations:
        parts = " + ".join(str(window.iterations) for window in windows)
        raise RecipeError(
            f"curriculum: windows cover {parts} = {total} iterations, but the stage has {iterations}"
        )
    rates = pass_rates or {}
    for number, window in enumerate(windows):
        name, (low, high) = window_bounds(window)
        values = {prompt.id: _value(prompt, window, rates) for prompt in prompts}
        missing = [prompt_id for prompt_id, value in values.items() if value is None]
        if missing:
            raise DataError(
                f"curriculum: {len(missing)} of {len(prompts)} prompts carry no {name} "
                f"(first: {missing[0]}); add `extra_info.{name}` or `{name}` to the rows, {_OTHER_WAYS[name]}"
            )
        if not any(value is not None and low <= value <= high for value in values.values()):
            raise DataError(
                f"curriculum.{number}.{name}: no prompt lies in {[low, high]}; "
                f"the data has {_bands(name, [value for value in values.values() if value is not None])}"
            )


_OTHER_WAYS = {
    "difficulty": "or leave the curriculum empty",
    "pass_rate": "set `rescore` to measure it, or leave the curriculum empty",
}
# shares of right answers, by the names of public data sets (ours, Big-Math, OpenMathReasoning)
_PASS_RATE_KEYS = ("pass_rate", "llama8b_solve_rate", "pass_rate_72b_tir")


def window_bounds(window: CurriculumWindow) -> tuple[str, tuple[float, float]]:
    """What the window goes by, difficulty or pass_rate, and its bounds, both included."""
    if window.difficulty is not None:
        return "difficulty", window.difficulty
    if window.pass_rate is None:
        raise RecipeError("curriculum: a window has neither difficulty nor pass_rate; give it one of them")
    return "pass_rate", window.pass_rate


def is_in_window(prompt: Prompt, window: CurriculumWindow, pass_rates: Mapping[str, float]) -> bool:
    """False also where the prompt does not have what the window goes by."""
    low, high = window_bounds(window)[1]
    value = _value(prompt, window, pass_rates)
    return value is not None and low <= value <= high


def row_pass_rate(prompt: Prompt) -> float | None:
    """The share of right answers that the row carries, of whichever model its data set was made with."""
    for key in _PASS_RATE_KEYS:
        value = prompt.meta.get(key)
        try:
            rate = float(value) if value is not None and not isinstance(value, bool) else None
        except (TypeError, ValueError):
            continue
        if rate is not None and 0.0 <= rate <= 1.0:
            return rate
    return None


def _value(prompt: Prompt, window: CurriculumWindow, pass_rates: Mapping[str, float]) -> float | None:
    if window.difficulty is not None:
        return prompt.difficulty
    return pass_rates.get(prompt.id, row_pass_rate(prompt))


def _pool(
    prompts: Sequence[Prompt], window: CurriculumWindow, pass_rates: Mapping[str, float]
) -> list[Prompt]:
    return [prompt for prompt in prompts if is_in_window(prompt, window, pass_rates)]


def _bands(name: str, values: Sequence[float]) -> str:
    counts = Counter(values)
    if len(counts) > 12:
        return f"{len(values)} prompts of {name} {min(counts):g} to {max(counts):g}"
    return f"{name}: prompts " + ", ".join(f"{band:g}: {counts[band]}" for band in sorted(counts))
