"""Grade a file of responses: read and check all rows first, grade, write whole, sum up."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import DataError
from megatron_rl.rewards.protocol import Grade
from megatron_rl.score.graders import GRADERS, BadCase, ScoreOptions
from megatron_rl.train.files import write_atomically

_MAX_LISTED = 10
_SAME_SCORE = 1e-9  # 0.1 + 0.2 of tests that passed is 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row: `content` is what the reward's grader read; `expected` is 0 to 1, None where the row has none."""

    id: str | int
    content: Any
    expected: float | None


def score_file(cases: Path, *, reward: str, out: Path | None, workers: int, timeout_s: float | None) -> int:
    """Exit code 0 once everything is written. Raises DataError for rows that are no cases, before any is graded."""
    with closing(GRADERS[reward](ScoreOptions(workers=workers, timeout_s=timeout_s))) as grader:
        read = read_cases(cases, grader.read)
        began = time.monotonic()
        grades = grader.grade([case.content for case in read])
        seconds = time.monotonic() - began
    lines = "".join(_line(case, grade) for case, grade in zip(read, grades, strict=True))
    if out is None:
        sys.stdout.write(lines)
        sys.stdout.flush()
    else:
        write_atomically(out, lines.encode("ascii"))
    print(summary(read, grades, seconds=seconds), file=sys.stderr)
    return 0


def read_cases(path: Path, read: Callable[[dict[str, Any]], Any]) -> list[Case]:
    """Every line of the file as a case. Raises DataError with up to ten faults, each as `file:line`."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a file with one JSON object a line")
    found, faults = [], []
    # only \n ends a line: JSON strings may hold other line breaks
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(_read_case(line, read))
        except BadCase as fault:
            faults.append(f"{path}:{number}: {fault}")
    if faults:
        more = f"\n... and {len(faults) - _MAX_LISTED} more" if len(faults) > _MAX_LISTED else ""
        raise DataError("\n".join(faults[:_MAX_LISTED]) + more)
    if not found:
        raise DataError(f"{path}: the file is empty; need one JSON object a line")
    return found


def _read_case(line: bytes, read: Callable[[dict[str, Any]], Any]) -> Case:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadCase(f"not JSON ({error}); need one object a line") from None
    if not isinstance(row, dict):
        raise BadCase(f"got {type(row).__name__}, need an object with `id` and `response`")
    absent = [f"`{key}`" for key in ("id", "response") if key not in row]
    if absent:
        raise BadCase(f"no {' and no '.join(absent)}; need an object with `id` and `response`")
    identity = row["id"]
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise BadCase(f"`id` is {json.dumps(identity)[:80]}, need a string or a whole number")
    if not isinstance(row["response"], str):
        raise BadCase(
            f"`response` is {json.dumps(row['response'])[:80]}, need what the model wrote as a string"
        )
    expected = row.get("expected")
    # true and false are 1 and 0
    if expected is not None and not (isinstance(expected, bool | int | float) and 0 <= expected <= 1):
        raise BadCase(f"`expected` is {json.dumps(expected)[:80]}, need true, false or a score from 0 to 1")
    return Case(id=identity, content=read(row), expected=None if expected is None else float(expected))


def _line(case: Case, grade: Grade) -> str:
    # ASCII: whatever a response holds, the line can be read again
    return (
        json.dumps(
            {
                "id": case.id,
                "score": grade.score,
                "verdict": grade.verdict.value if grade.verdict is not None else None,
                "reason": grade.reason,
                "seconds": round(grade.seconds, 6),
            }
        )
        + "\n"
    )


def summary(cases: Sequence[Case], grades: Sequence[Grade], *, seconds: float) -> str:
    """Counts by verdict, mean score, speed, and where rows carry `expected`, how many scores are that."""
    verdicts = Counter(grade.verdict.value if grade.verdict is not None else "none" for grade in grades)
    mean = sum(grade.score for grade in grades) / len(grades)
    lines = [
        f"{len(grades)} graded in {seconds:.2f} s, mean score {mean:.4f}",
        "  ".join(f"{name} {count}" for name, count in sorted(verdicts.items())),
    ]
    known = [(case, grade) for case, grade in zip(cases, grades, strict=True) if case.expected is not None]
    if known:
        other = [
            (case, grade) for case, grade in known if abs(grade.score - (case.expected or 0.0)) > _SAME_SCORE
        ]
        lines.append(f"as expected: {len(known) - len(other)} of {len(known)}")
        lines += [
            f"  {case.id}: expected {case.expected:g}, got {grade.score:g}"
            for case, grade in other[:_MAX_LISTED]
        ]
        if len(other) > _MAX_LISTED:
            lines.append(f"  ... and {len(other) - _MAX_LISTED} more")
    return "\n".join(lines)
