"""Which prompts an iteration draws: all of them, or those of the difficulty window it falls into."""

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
    ) -> None:
        """`iterations` are those of the stage, checked against the windows' when given.

        Raises DataError for windows that hold no prompt or prompts without difficulty, RecipeError for
        windows whose iterations do not sum to `iterations`.
        """
        check_windows(prompts, windows, iterations=iterations)
        self._windows = tuple(windows)
        self._pools = [_pool(prompts, window) for window in windows] or [list(prompts)]
        # The window's number is part of the seed: equal windows draw in different orders.
        self._cursors = [
            PromptCursor(len(pool), seed=seed * 1_000_003 + number) for number, pool in enumerate(self._pools)
        ]

    def window(self, iteration: int) -> CurriculumWindow | None:
        """The window of `iteration` (from 0); None without curriculum. Raises RecipeError beyond the last."""
        return self._windows[self._number(iteration)] if self._windows else None

    def pool_size(self, iteration: int) -> int:
        """Prompts that `iteration` can draw from."""
        return len(self._pools[self._number(iteration)])

    def take(self, iteration: int, count: int) -> list[Prompt]:
        """The next `count` prompts for `iteration`: none twice unless the pool is smaller than `count`."""
        number = self._number(iteration)
        pool = self._pools[number]
        return [pool[index] for index in self._cursors[number].take(count)]

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
    prompts: Sequence[Prompt], windows: Sequence[CurriculumWindow], *, iterations: int | None = None
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
    missing = [prompt.id for prompt in prompts if prompt.difficulty is None]
    if missing:
        raise DataError(
            f"curriculum: {len(missing)} of {len(prompts)} prompts carry no difficulty "
            f"(first: {missing[0]}); add `extra_info.difficulty` or `difficulty` to the rows, "
            "or leave the curriculum empty"
        )
    for number, window in enumerate(windows):
        if not _pool(prompts, window):
            raise DataError(
                f"curriculum.{number}.difficulty: no prompt lies in {list(window.difficulty)}; "
                f"the data has {_bands(prompts)}"
            )


def _pool(prompts: Sequence[Prompt], window: CurriculumWindow) -> list[Prompt]:
    low, high = window.difficulty
    return [
        prompt for prompt in prompts if prompt.difficulty is not None and low <= prompt.difficulty <= high
    ]


def _bands(prompts: Sequence[Prompt]) -> str:
    counts = Counter(prompt.difficulty for prompt in prompts if prompt.difficulty is not None)
    if len(counts) > 12:
        return f"{len(prompts)} prompts of difficulty {min(counts):g} to {max(counts):g}"
    return "difficulty: prompts " + ", ".join(f"{band:g}: {counts[band]}" for band in sorted(counts))
