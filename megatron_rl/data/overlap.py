"""When two problems are the same, and when one repeats a part of an evaluation problem."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from megatron_rl.data.types import Message

# Chinese, Japanese and Korean characters are words of their own; every other run of letters and digits is one
_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|(?:(?![{_IDEOGRAPHS}])[^\W_])+")
# spacing and sizes of LaTeX, which change how a problem looks and not what it asks
_LOOKS = re.compile(r"\\[,;:!>]|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|[\s$~]+")
_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")


def problem_text(messages: Sequence[Message]) -> str:
    """What is asked: the last turn."""
    return messages[-1]["content"]


def words(text: str) -> list[str]:
    """Lower-case runs of letters or digits, in order; punctuation and LaTeX signs are borders."""
    return _WORD.findall(text.lower())


def normalised(text: str) -> str:
    """Text without case, white space, dollar signs and LaTeX spacing. Signs stay: `3+4` and `3-4` differ."""
    return _LOOKS.sub("", _FRACTION.sub(r"\\frac", text).lower()).rstrip(".?!")


class EvaluationIndex:
    """Runs of `n` words of evaluation problems; a problem of fewer words counts as one run of all of them."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._runs: dict[str, tuple[str, str]] = {}  # run: (file, id of the problem)
        self._short: dict[str, tuple[str, str]] = {}
        self.hits: Counter[str] = Counter()  # problems found, by evaluation file
        self.common_runs: Counter[str] = Counter()  # first run that each was found by

    def add(self, text: str, *, name: str, problem_id: str) -> None:
        """`name` is the evaluation file's."""
        found = words(text)
        # a problem of signs alone, such as a figure: nothing to find it by
        if 0 < len(found) < self._n:
            self._short.setdefault(" ".join(found), (name, problem_id))
        for run in self._all_runs(found):
            self._runs.setdefault(run, (name, problem_id))

    def find(self, text: str) -> str | None:
        """`file: id` of an evaluation problem that shares a run with `text`, counted in `hits`, or None."""
        found = words(text)
        short = self._short.get(" ".join(found)) if len(found) < self._n else None
        run = next((run for run in self._all_runs(found) if run in self._runs), None)
        place = short or (None if run is None else self._runs[run])
        if place is None:
            return None
        self.hits[place[0]] += 1
        self.common_runs[run or " ".join(found)] += 1
        return ": ".join(place)

    def _all_runs(self, found: Sequence[str]) -> list[str]:
        return [" ".join(found[i : i + self._n]) for i in range(len(found) - self._n + 1)]
