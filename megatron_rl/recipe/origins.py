"""Where each value of a recipe came from, and the resolved recipe that shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from megatron_rl.recipe import shape
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.yaml_text import format_value

Origin = Literal["file", "override", "compat", "default"]
Path = tuple[str, ...]

_INDENT = "  "


def leaf_origins(
    recipe: Recipe, data: Any, override_paths: Sequence[Path], compat_paths: Sequence[Path] = ()
) -> dict[str, Origin]:
    """Dotted path of each leaf to its origin. `data` is the raw recipe, overrides and `compat` applied.

    Leaves are scalars, lists of scalars, and empty lists and mappings.
    """
    origins = {".".join(path): _origin(path, data, override_paths) for path, _ in leaves(recipe)}
    return origins | {".".join(path): "compat" for path in compat_paths}


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each leaf of a config tree with its path, in the order of the schema."""
    children = _children(value)
    if children is None:
        yield path, value
        return
    for key, below in children:
        yield from leaves(below, (*path, key))


def format_resolved(recipe: Recipe, origins: Mapping[str, Origin]) -> str:
    """The complete recipe as YAML, with the origin of each value as a comment behind it."""
    header = "# resolved recipe: every value with its origin (file, override, compat or default)"
    return "\n".join([header, *_block(recipe, (), origins, "")]) + "\n"


def _origin(path: Path, data: Any, override_paths: Sequence[Path]) -> Origin:
    for key in path:
        present = key in data if isinstance(data, dict) else shape.below(data, key) is not None
        if not present:
            return "default"
        data = shape.below(data, key)
    # an override above the leaf holds it; one below replaced a part of a list
    is_override = any(path[: len(o)] == o or o[: len(path)] == path for o in override_paths)
    return "override" if is_override else "file"


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """Named parts of a config, a mapping or a list of configs; None for a leaf."""
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, dict) and value:
        return list(value.items())
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return [(str(i), entry) for i, entry in enumerate(value)]
    return None


def _block(value: Any, path: Path, origins: Mapping[str, Origin], indent: str) -> Iterator[str]:
    for key, below in _children(value) or ():
        here = (*path, key)
        if isinstance(value, tuple):
            first, *rest = _block(below, here, origins, indent + _INDENT)
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        elif _children(below) is None:
            yield f"{indent}{format_value(key)}: {format_value(below)}  # {origins['.'.join(here)]}"
        else:
            yield f"{indent}{format_value(key)}:"
            yield from _block(below, here, origins, indent + _INDENT)
