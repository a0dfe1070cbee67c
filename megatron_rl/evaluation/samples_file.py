"""Every sample of an evaluation as a line of JSON; the file has its name only once it is complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_rl.data.types import RolloutGroup
from megatron_rl.train.files import to_json


class SamplesFile:
    """A context manager: leaving it publishes the file, or takes away what was begun if there was an error.

    `path` None: nothing is written. What one call brought is on the disk before the next begins.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._beside = None if path is None else path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._stream = None if self._beside is None else self._beside.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is None or self._beside is None or self._path is None:
            return
        self._stream.close()
        if kind is None:
            os.replace(self._beside, self._path)
        else:
            self._beside.unlink(missing_ok=True)

    def write(self, name: str, groups: Sequence[RolloutGroup], seed: Callable[[str, int], int]) -> None:
        """The samples of some problems of set `name`; `seed` is that of their draw."""
        if self._stream is None:
            return
        for group in groups:
            for rollout in group.rollouts:
                line = {
                    "set": name,
                    "id": group.prompt.id,
                    "sample": rollout.sample_index,
                    "seed": seed(group.prompt.id, rollout.sample_index),
                    "verdict": rollout.reward.verdict.value,
                    "reason": rollout.reward.reason,
                    "finish": rollout.completion.finish.value,
                    "num_tokens": len(rollout.completion.token_ids),
                    "response": rollout.text,
                }
                self._stream.write(to_json(line) + b"\n")
        self._stream.flush()
