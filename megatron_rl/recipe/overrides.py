"""Dotted overrides from the command line: `stages.1.optimizer.lr=1e-6`. Values are read as YAML.

`*` in the place of a list's position stands for every entry that has what follows: `stages.*.engine.tp=2`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_origin

from megatron_rl.errors import RecipeError
from megatron_rl.recipe import shape
from megatron_rl.recipe.problems import Problem, shortened, show, unknown_key
from megatron_rl.recipe.yaml_text import parse_value

STAR = "*"


@dataclass(frozen=True, slots=True)
class Override:
    """One `path=value`; `text` is what the user typed."""

    path: tuple[str, ...]
    value: Any
    text: str


def parse_override(text: str) -> Override:
    """Raises RecipeError for text that is not `path=value` or whose value is not YAML."""
    path, equals, value = text.partition("=")
    parts = tuple(path.strip().split("."))
    if not equals or not all(parts):
        raise RecipeError(f"override {shortened(repr(text))}: must look like path=value, such as layout.tp=2")
    try:
        return Override(parts, parse_value(value), text)
    except RecipeError as error:
        raise RecipeError(f"override {shortened(repr(text))}: {error}") from None


def apply_overrides(
    data: Any, overrides: Sequence[Override], schema: Any
) -> tuple[Any, list[Override], list[Problem]]:
    """A copy of the raw recipe with all overrides set, in order; one override for each place that was set, without
    `*`; and a problem for each that has no place.

    A path must exist in the schema. Keys that the file leaves out may be set, list positions must be there.
    """
    data, each = copy.deepcopy(data), []
    problems = []
    for override in overrides:
        for single in _without_stars(data, override, schema):
            each.append(single)
            text = _set(data, single, schema)
            if text is not None:
                problems.append(Problem(".".join(single.path), text))
    return data, each, problems


def _without_stars(data: Any, override: Override, schema: Any) -> list[Override]:
    """One for each entry that the first `*` stands for, and so on; itself where no entry has what follows."""
    if STAR not in override.path:
        return [override]
    depth = override.path.index(STAR)
    before, after = override.path[:depth], override.path[depth + 1 :]
    bare, node = shape.narrow(schema, data), data
    for key in before:
        node, bare = shape.below(node, key), shape.child(bare, key)
        bare = shape.narrow(bare, node)
    found = []
    for position, entry in enumerate(node if isinstance(node, list) else ()):
        config = shape.narrow(shape.child(bare, str(position)), entry)
        has_it = not after or not dataclasses.is_dataclass(config) or after[0] in shape.field_types(config)  # type: ignore[arg-type]
        if has_it:
            single = dataclasses.replace(override, path=(*before, str(position), *after))
            found += _without_stars(data, single, schema)
    return found or [override]


def _set(node: Any, override: Override, schema: Any) -> str | None:
    """Set one value in place; what is wrong, or None."""
    for depth, key in enumerate(override.path):
        bare = shape.narrow(schema, node)
        refusal = _refusal(node, key, bare, ".".join(override.path[:depth]) or "the recipe")
        if refusal is not None:
            return refusal
        position: Any = int(key) if isinstance(node, list) else key
        schema = shape.child(bare, key)
        if depth == len(override.path) - 1:
            node[position] = copy.deepcopy(override.value)
        elif shape.below(node, key) is None:
            # a list that the file leaves out has no position to set, a mapping can start empty
            is_list = get_origin(shape.narrow(schema, None)) is tuple
            node[position] = [] if is_list else {}
        node = shape.below(node, key)
    return None


def _refusal(node: Any, key: str, bare: Any, where: str) -> str | None:
    """Why `key` cannot be set in `node`, or None."""
    if isinstance(node, list):
        if key == STAR:
            return f"no entry of {where} has such a key" if node else f"{where} is empty"
        if key.isdecimal() and int(key) < len(node):
            return None
        positions = f"its positions are 0 to {len(node) - 1}" if node else "it is empty"
        return f"{where} is a list and has no entry {key!r}; {positions}"
    if not isinstance(node, dict):
        return f"{where} is {show(node)}, which has no keys"
    if dataclasses.is_dataclass(bare) and key not in shape.field_types(bare):  # type: ignore[arg-type]
        return unknown_key(key, bare)  # type: ignore[arg-type]
    return None
