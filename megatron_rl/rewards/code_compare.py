"""Whether what a program put out is what was expected; runs outside of the sandbox, on plain data."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

_DECIMAL = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,5})?")
_MAX_DECIMAL_CHARS = 10_000  # longer numbers are compared as they are written


class NotJson(Exception):
    """A result that is no JSON value."""


def same_output(got: bytes, expected: bytes) -> bool:
    """Line by line, without trailing blank lines; of a line its words, of which decimals compare by value."""
    if got == expected:
        return True
    got_lines, expected_lines = _lines(got), _lines(expected)
    return len(got_lines) == len(expected_lines) and all(map(_same_line, got_lines, expected_lines))


def read_record(output: bytes) -> tuple[str, Any]:
    """("value", JSON value), ("raised", name of the exception) or ("none", why) out of the reply of one call.

    Exactly one line that is a reply: whatever more somebody wrote makes all of it worthless.
    """
    try:
        reply = json.loads(output, parse_int=_parse_int, parse_constant=_refuse)
        if output.count(b"\n") != 1 or not isinstance(reply, dict):
            return "none", "not exactly one record"
        if "e" in reply:
            return "raised", f"{reply['e'][0]}: {reply['m']}"[:200]
        return "value", _json_value(reply["v"])
    except NotJson as fault:
        return "none", str(fault)
    except (ValueError, TypeError, LookupError, RecursionError):
        return "none", "no result" if not output else "the record is no record"


def same_json(got: Any, expected: Any) -> bool:
    """Equal as JSON values: true is not 1, but 1 is 1.0, since JSON has one kind of number."""
    try:
        return _same(got, expected)
    except RecursionError:
        return False


def _same(got: Any, expected: Any) -> bool:
    if isinstance(expected, bool) or isinstance(got, bool) or expected is None or got is None:
        return got is expected
    if isinstance(expected, int | float):
        return isinstance(got, int | float) and got == expected
    if isinstance(expected, str):
        return isinstance(got, str) and got == expected
    if isinstance(expected, list | tuple):
        return isinstance(got, list) and len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(_same(got[key], expected[key]) for key in expected)
        )
    return False


def _lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip() for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(got: bytes, expected: bytes) -> bool:
    if got == expected:
        return True
    got_words, expected_words = got.split(), expected.split()
    return len(got_words) == len(expected_words) and all(map(_same_word, got_words, expected_words))


def _same_word(got: bytes, expected: bytes) -> bool:
    if got == expected:
        return True
    if max(len(got), len(expected)) > _MAX_DECIMAL_CHARS:
        return False
    if not _DECIMAL.fullmatch(got) or not _DECIMAL.fullmatch(expected):
        return False
    return Decimal(got.decode()) == Decimal(expected.decode())


def _json_value(value: Any) -> Any:
    """The JSON value of a tagged one, as `json.dumps` would have made it. Raises NotJson."""
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content), *more) = value.items()
    if tag == "t" and not more:
        return [_json_value(item) for item in content]
    if tag == "d" and not more:
        return {_key(key): _json_value(item) for key, item in content}
    kind = {"s": "a set", "z": "a frozenset", "b": "bytes", "c": "a complex number", "f": "no finite number"}
    raise NotJson(f"the result is or holds {kind.get(tag, 'an object')}, which JSON has not")


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    raise NotJson("a key of the result is no text and no number")


def _parse_int(digits: str) -> Any:
    # what Python would refuse to read, equal to nothing
    return int(digits) if len(digits) <= 4300 else float("nan")


def _refuse(name: str) -> Any:
    raise ValueError(name)
