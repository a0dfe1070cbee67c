"""Drawing without replacement: a seeded order per epoch, and a cursor over it that fits in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megatron_rl.errors import DataError


@lru_cache(maxsize=4)
def permutation(size: int, *, seed: int, epoch: int) -> tuple[int, ...]:
    """An order of range(size) that depends on its arguments alone: indices sorted by BLAKE2b(seed, epoch,
    index).

    Not on Python's hash, nor on the generator of any library version.
    """

    def key(index: int) -> tuple[bytes, int]:
        return hashlib.blake2b(b"%d:%d:%d" % (seed, epoch, index), digest_size=8).digest(), index

    return tuple(sorted(range(size), key=key))


@dataclass(frozen=True, kw_only=True, slots=True)
class CursorState:
    """Where a cursor stands: `position` draws of `epoch` are done.

    `deferred` are indices that this epoch draws last, since one take crossed the epoch's border and had them
    already from the epoch before.
    """

    seed: int
    size: int
    epoch: int = 0
    position: int = 0
    deferred: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` is the inverse."""
        return {
            "seed": self.seed,
            "size": self.size,
            "epoch": self.epoch,
            "position": self.position,
            "deferred": list(self.deferred),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CursorState:
        """Raises DataError for a dict that `to_dict` did not write."""
        try:
            return cls(**{**data, "deferred": tuple(data["deferred"])})
        except (KeyError, TypeError) as error:
            raise DataError(
                f"cursor state: got keys {sorted(data)}, which is not a saved cursor ({error})"
            ) from error


class PromptCursor:
    """Draws indices of a pool: each exactly once per epoch, in an order that is f(seed, epoch)."""

    def __init__(self, size: int, *, seed: int) -> None:
        """Raises DataError for an empty pool."""
        if size < 1:
            raise DataError(f"prompt pool: got {size} prompts, need at least 1")
        self._state = CursorState(seed=seed, size=size)

    @property
    def state(self) -> CursorState:
        return self._state

    def restore(self, state: CursorState) -> None:
        """Continue from `state`. Raises DataError if it belongs to a pool of another size."""
        if state.size != self._state.size:
            raise DataError(
                f"prompt pool: holds {self._state.size} prompts, but the saved cursor belongs to "
                f"{state.size}; resume with the same data, length limit and curriculum, or start a new run"
            )
        self._state = state

    def take(self, count: int, *, after: Sequence[int] = ()) -> list[int]:
        """The next `count` indices, over epoch borders; none twice unless `count` exceeds the pool.

        `after` are indices that were taken just before and are not wanted again: none of them comes up unless the
        pool has no others left.
        """
        if after and self._state.position == 0 and not self._state.deferred:
            # they ended the epoch before
            self._state = replace(self._state, deferred=tuple(sorted(after)))
        taken: list[int] = []
        while len(taken) < count:
            state = self._state
            end = min(state.size, state.position + count - len(taken))
            taken += _epoch_order(state)[state.position : end]
            if end < state.size:
                self._state = _moved(state, position=end)
            else:
                crosses = len(taken) < count <= state.size - len(after)
                self._state = CursorState(
                    seed=state.seed,
                    size=state.size,
                    epoch=state.epoch + 1,
                    deferred=tuple(sorted([*after, *taken])) if crosses else (),
                )
        return taken


def _moved(state: CursorState, *, position: int) -> CursorState:
    return CursorState(
        seed=state.seed, size=state.size, epoch=state.epoch, position=position, deferred=state.deferred
    )


def _epoch_order(state: CursorState) -> list[int]:
    order = permutation(state.size, seed=state.seed, epoch=state.epoch)
    last = frozenset(state.deferred)
    return [i for i in order if i not in last] + [i for i in order if i in last]
