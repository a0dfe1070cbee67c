"""What is wrong with a recipe, one line each: dotted path, what was got, what is allowed, what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import ValidationError

from megatron_rl.errors import RecipeError
from megatron_rl.recipe import shape

_SHOWN = 100  # characters of each end of a long value


@dataclass(frozen=True, slots=True)
class Problem:
    """`path` is dotted as in an override; empty for the recipe as a whole."""

    path: str
    text: str


def validation_problems(error: ValidationError, data: Any, schema: Any) -> list[Problem]:
    """Every problem that pydantic found in `data`, in the words of the schema."""
    problems = []
    for detail in error.errors(include_url=False, include_context=True):
        raw = detail["input"]
        # pydantic also calls a tuple too short when its entries are there but wrong
        if detail["type"] == "too_short" and len(raw) >= detail["ctx"]["min_length"]:
            continue
        path = _real_path(detail["loc"], data)
        text = _explain(detail["type"], path, raw, data, schema)
        problems.append(Problem(".".join(path[:-1] if path[-1:] == ("[key]",) else path), text))
    return problems


def raise_problems(source: str, problems: Sequence[Problem], places: Mapping[str, str]) -> NoReturn:
    """Raise one RecipeError that lists all problems. `places` says where a dotted path was written."""
    count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
    lines = [f"  {_with_place(p, places)}: {p.text}" for p in problems]
    raise RecipeError("\n".join([f"{source}: {count}", *lines]))


def did_you_mean(word: Any, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` or nothing."""
    close = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def show(value: Any) -> str:
    """A value as a user would recognise it."""
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return shortened(repr(value))


def shortened(text: str) -> str:
    """What is too long to be read, with its ends."""
    return (
        text
        if len(text) <= 2 * _SHOWN
        else f"{text[:_SHOWN]} ... {text[-_SHOWN:]} ({len(text):,} characters)"
    )


def unknown_key(key: str, config: type) -> str:
    """What to write instead: the same key one level down, a key here that looks like it, or all that are here."""
    known = shape.field_types(config)
    below = [f"{name}.{key}" for name, annotation in known.items() if key in shape.keys_of(annotation)]
    below += [f"{name}.*.{key}" for name, annotation in known.items() if key in shape.entry_keys(annotation)]
    if below:
        return f"unknown key; did you mean {' or '.join(map(repr, below))}?"
    return f"unknown key{did_you_mean(key, known) or '; known here: ' + ', '.join(known)}"


def _explain(kind: str, path: tuple[str, ...], raw: Any, data: Any, schema: Any) -> str:
    if kind == "unexpected_keyword_argument":
        parent = shape.narrow(shape.at(schema, data, path[:-1]), _value(data, path[:-1]))
        return unknown_key(path[-1], parent)
    annotation = shape.at(schema, data, path)
    if kind == "missing":
        return f"missing, must be {shape.allowed(annotation)}"
    if kind == "union_tag_not_found":
        return f"kind is missing, must be {shape.allowed(annotation)}"
    if kind == "union_tag_invalid":
        kinds = [k for member in get_args(get_args(annotation)[0]) for k in shape.stage_kinds(member)]
        got = raw.get("kind")
        return f"kind: got {show(got)}, must be one of {', '.join(kinds)}{did_you_mean(got, kinds)}"
    if path[-1:] == ("[key]",):
        return f"the name {raw!r} must be {shape.allowed(_key_type(path, data, schema))}"
    bare = shape.narrow(annotation, raw)
    choices = get_args(bare) if get_origin(bare) is Literal else ()
    return f"got {show(raw)}, must be {shape.allowed(annotation)}{did_you_mean(raw, map(str, choices))}"


def _key_type(path: tuple[str, ...], data: Any, schema: Any) -> Any:
    mapping = shape.narrow(shape.at(schema, data, path[:-2]), _value(data, path[:-2]))
    return get_args(mapping)[0]


def _real_path(location: tuple[int | str, ...], data: Any) -> tuple[str, ...]:
    """pydantic's location without the union tag that it puts behind a stage's position."""
    path: list[str] = []
    value = data
    for i, part in enumerate(location):
        follows_position = i > 0 and isinstance(location[i - 1], int)
        if follows_position and isinstance(value, dict) and value.get("kind") == part and part not in value:
            continue
        path.append(str(part))
        value = shape.below(value, str(part))
    return tuple(path)


def _value(data: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        data = shape.below(data, key)
    return data


def _with_place(problem: Problem, places: Mapping[str, str]) -> str:
    """Path with the place of the nearest key that was written: the problem itself or what encloses it."""
    parts = problem.path.split(".")
    for end in range(len(parts), 0, -1):
        place = places.get(".".join(parts[:end]))
        if place:
            return f"{problem.path} ({place})"
    return problem.path or "recipe"
