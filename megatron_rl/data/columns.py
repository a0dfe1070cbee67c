"""Values of rows: nested columns by dotted path, numbers, and emptiness."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def column(row: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where there is none. Names may hold dots themselves: `m.Qwen-1.5B`."""
    if path in row:
        return row[path]
    for end in (index for index, char in enumerate(path) if char == "."):
        inner = row.get(path[:end])
        if isinstance(inner, Mapping):
            found = column(inner, path[end + 1 :])
            if found is not None:
                return found
    return None


def number(value: Any) -> float | None:
    """A finite number, a text that holds one, or a fraction such as `5/8`; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.count("/") == 1:
        above, below = map(number, value.split("/"))
        return above / below if above is not None and below else None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


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


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    # Not JSON after all, such as the interval `[0, 1)`: an answer.
    except (ValueError, RecursionError):
        return text.strip("[]") or None
