"""A recipe from its file and the overrides of the command line.

Types, ranges and unknown keys are checked here, all at once; `recipe.resolve` checks what fits together.
Paths inside a recipe (`model.hf_path`, data files) are relative to the current directory, not to the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.compat import expand_compat
from megatron_rl.recipe.epochs import with_steps
from megatron_rl.recipe.origins import Origin, format_resolved, leaf_origins
from megatron_rl.recipe.overrides import Override, apply_overrides, parse_override
from megatron_rl.recipe.problems import Problem, raise_problems, validation_problems
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.yaml_text import parse_document

# stands for a value that a recipe cannot know, such as a model that its source does not name
LEFT_OPEN = "???"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRecipe:
    """A validated recipe and where it came from."""

    recipe: Recipe
    source: str  # the file, as the user named it
    origins: Mapping[str, Origin]  # dotted path of each leaf
    places: Mapping[str, str]  # dotted path of what was written: `line 7` or `override`


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read, override and validate. Raises RecipeError listing every problem of the file and the overrides."""
    source = str(path)
    document = parse_document(_read(Path(path)), source=source)
    if not isinstance(document.data, dict):
        raise RecipeError(f"{source}: must be a mapping with the keys name, model, stages and more")
    data, applied, problems = apply_overrides(document.data, _parse_all(overrides), Recipe)
    places = {dotted: f"line {line}" for dotted, line in document.lines.items()}
    places |= {".".join(o.path): "override" for o in applied}
    data, filled = expand_compat(data)
    places |= {".".join(path): "compat" for path in filled}
    problems += _left_open(data)
    recipe: Recipe | None = None
    try:
        recipe = _adapter().validate_python(data, extra="forbid")
    except ValidationError as error:
        problems += _without_repeats(validation_problems(error, data, Recipe), problems)
    if recipe is not None:
        recipe, found = with_steps(recipe)
        problems += found
    if recipe is None or problems:
        raise_problems(source, problems, places)
    origins = leaf_origins(recipe, data, [o.path for o in applied], filled)
    return LoadedRecipe(recipe=recipe, source=source, origins=origins, places=places)


def resolved_yaml(loaded: LoadedRecipe) -> str:
    """The complete recipe with each value's origin as a comment; loads again to the same recipe."""
    return format_resolved(loaded.recipe, loaded.origins)


def compat_line(loaded: LoadedRecipe) -> str | None:
    """One line about what `compat` set; None where it is not asked for."""
    compat = loaded.recipe.compat
    if compat == "none":
        return None
    count = sum(origin == "compat" for origin in loaded.origins.values())
    return f"compat {compat}: set {count} keys that the recipe leaves out; recipe.resolved.yaml marks them"


@lru_cache
def _adapter() -> TypeAdapter[Recipe]:
    return TypeAdapter(Recipe)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None


def _parse_all(overrides: Sequence[str]) -> list[Override]:
    parsed, errors = [], []
    for text in overrides:
        try:
            parsed.append(parse_override(text))
        except RecipeError as error:
            errors.append(str(error))
    if errors:
        raise RecipeError("\n".join(errors))
    return parsed


def _left_open(data: Any, path: tuple[str, ...] = ()) -> list[Problem]:
    """A problem for each value that the recipe leaves to its user by writing `???`."""
    if isinstance(data, dict | list):
        entries = data.items() if isinstance(data, dict) else enumerate(data)
        return [problem for key, value in entries for problem in _left_open(value, (*path, str(key)))]
    dotted = ".".join(path)
    if data != LEFT_OPEN:
        return []
    return [
        Problem(
            dotted, f"is left open ({LEFT_OPEN}) for you to choose: add {dotted}=VALUE, or write it there"
        )
    ]


def _without_repeats(found: list[Problem], known: list[Problem]) -> list[Problem]:
    paths = {p.path for p in known}
    return [p for p in found if p.path not in paths]
