"""What may stand at a dotted path of a recipe, read from the schema's own type annotations."""

from __future__ import annotations

import dataclasses
import types
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@lru_cache
def field_types(config: type) -> dict[str, Any]:
    """Field name to annotation of a config dataclass, ranges included."""
    hints = get_type_hints(config, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(config)}


def narrow(schema: Any, value: Any) -> Any:
    """The bare type that `value` has to fit: no ranges, no null; None for a union that `kind` leaves open."""
    if get_origin(schema) is Annotated:
        return narrow(get_args(schema)[0], value)
    if get_origin(schema) in (Union, types.UnionType):
        members = [m for m in get_args(schema) if m is not types.NoneType]
        if len(members) == 1:
            return narrow(members[0], value)
        kind = value.get("kind") if isinstance(value, dict) else None
        return next((m for m in members if kind in stage_kinds(m)), None)
    return schema


def stage_kinds(member: Any) -> tuple[Any, ...]:
    """The values of `kind` that pick this member of a tagged union."""
    return get_args(field_types(member)["kind"])


def keys_of(schema: Any) -> frozenset[str]:
    """Keys that a mapping of this type may hold, of every `kind`; none for what is no mapping with fixed keys."""
    if get_origin(schema) is Annotated:
        return keys_of(get_args(schema)[0])
    if get_origin(schema) in (Union, types.UnionType):
        return frozenset().union(*map(keys_of, get_args(schema)))
    return frozenset(field_types(schema)) if dataclasses.is_dataclass(schema) else frozenset()  # type: ignore[arg-type]


def entry_keys(schema: Any) -> frozenset[str]:
    """`keys_of` the entries of a list; none for what is no list."""
    if get_origin(schema) is Annotated:
        return entry_keys(get_args(schema)[0])
    arguments = get_args(schema)
    return (
        keys_of(arguments[0]) if get_origin(schema) is tuple and arguments[1:] == (Ellipsis,) else frozenset()
    )


def child(schema: Any, key: str) -> Any:
    """Type below a narrowed type; None when nothing may stand there."""
    if dataclasses.is_dataclass(schema):
        return field_types(schema).get(key)  # type: ignore[arg-type]
    arguments = get_args(schema)
    if get_origin(schema) is dict:
        return arguments[1]
    if get_origin(schema) is tuple and key.isdigit():
        if arguments[1:] == (Ellipsis,):
            return arguments[0]
        return arguments[int(key)] if int(key) < len(arguments) else None
    return None


def at(schema: Any, value: Any, path: tuple[str, ...]) -> Any:
    """Annotation at `path` below `schema`, where `value` is the raw data of `schema`; None if unknown."""
    for key in path:
        schema = child(narrow(schema, value), key)
        if schema is None:
            return None
        value = below(value, key)
    return schema


def below(value: Any, key: str) -> Any:
    """Raw value under a key or a list position; None when absent."""
    if isinstance(value, dict):
        return value.get(key)
    if isinstance(value, list) and key.isdigit() and int(key) < len(value):
        return value[int(key)]
    return None


def allowed(schema: Any) -> str:
    """What a value of this type may be, in words that follow "must be"."""
    if get_origin(schema) is Annotated:
        base, *extras = get_args(schema)
        described = next((e.description for e in extras if getattr(e, "description", None)), None)
        return described or allowed(base)
    if get_origin(schema) in (Union, types.UnionType):
        members = get_args(schema)
        words = [allowed(m) for m in members if m is not types.NoneType]
        if len(words) > 1:
            kinds = [str(k) for m in members for k in stage_kinds(m)]
            return f"a mapping with kind: {' or '.join(kinds)}"
        return words[0] + " or null"
    if get_origin(schema) is Literal:
        choices = [str(c) for c in get_args(schema)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if get_origin(schema) is tuple:
        return _allowed_list(get_args(schema))
    if get_origin(schema) is dict:
        return f"a mapping of names to {allowed(get_args(schema)[1])}"
    if dataclasses.is_dataclass(schema):
        return "a mapping with the keys " + ", ".join(field_types(schema))  # type: ignore[arg-type]
    return getattr(schema, "__name__", str(schema))


def _allowed_list(arguments: tuple[Any, ...]) -> str:
    if arguments[1:] == (Ellipsis,):
        return f"a list, each entry {allowed(arguments[0])}"
    return "a list of " + str(len(arguments)) + ": " + ", ".join(allowed(a) for a in arguments)
