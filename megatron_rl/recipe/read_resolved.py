"""A resolved recipe read back as a table: each value with what set it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.yaml_text import format_value, parse_document

_ORIGIN = re.compile(r"#\s*(file|override|compat|default)\s*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One leaf of a recipe: its dotted path, its value as YAML, and what set it (empty: not known)."""

    path: str
    value: str
    origin: str


def read_resolved(text: str) -> list[Setting]:
    """Every leaf of `recipe.resolved.yaml` in its order; nothing for text that is no recipe."""
    try:
        document = parse_document(text, source="resolved recipe")
    except RecipeError:
        return []
    lines = text.splitlines()
    settings = []
    for path, value in _leaves(document.data):
        number = document.lines.get(path, 0)
        found = _ORIGIN.search(lines[number - 1]) if 0 < number <= len(lines) else None
        settings.append(Setting(path=path, value=format_value(value), origin=found.group(1) if found else ""))
    return settings


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    below: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        below = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        below = list(enumerate(value))
    if not below:
        if path:
            yield path, value
        return
    for key, item in below:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))
