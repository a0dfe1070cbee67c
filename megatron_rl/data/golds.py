"""Golds of math problems: whether answers can be compared with one at all, and one answer that it calls right."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from megatron_rl.data.code_gold import is_code_gold

_LATEX_WORD = re.compile(r"\\[A-Za-z]+")
_LABELS = (("a", "b"), ("i", "ii"), ("1", "2"))
_MAX_PROSE_WORDS = 8


def gold_fault(gold: Any) -> str | None:
    """Why no grader could compare answers with this gold, by its form alone; None if nothing speaks against it."""
    if is_code_gold(gold):
        return "code"
    text = gold if isinstance(gold, str) else ""
    if any(_is_labelled(text, first, second) for first, second in _LABELS):
        return "multi_part"
    plain = [word for word in re.findall(r"[^\W\d_]{2,}", _LATEX_WORD.sub(" ", text))]
    return "prose" if len(plain) > _MAX_PROSE_WORDS else None


def _is_labelled(text: str, first: str, second: str) -> bool:
    """Parts such as `(a) 3 (b) 4` or `1) 3; 2) 4`. Neither f(1) nor a border of an interval is a label."""
    both = all(re.search(rf"(?<![\w\\]){re.escape(f'({label})')}", text) for label in (first, second))
    return both or (text.lstrip().startswith(f"{first})") and f" {second})" in text)


def first_gold(answer: Any) -> str:
    """One answer that the gold itself calls right, as text."""
    if isinstance(answer, str) and answer.lstrip()[:1] in ("[", '"'):
        with suppress(ValueError, RecursionError):
            decoded = json.loads(answer)
            texts = decoded if isinstance(decoded, list) else [decoded]
            if texts and all(isinstance(text, str) for text in texts):
                return first_gold(texts)
    if isinstance(answer, list | tuple):
        return first_gold(answer[0]) if answer else ""
    text = repr(answer) if isinstance(answer, float) else str(answer)
    # a gold that is written as a box already
    found = re.fullmatch(r"\s*\$?\\boxed\{(.*)\}\$?\s*", text, re.DOTALL)
    return found.group(1) if found else text
