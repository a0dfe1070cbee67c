"""Recipe text to plain values and back, by YAML 1.2 core rules: `1e-6` is a float, `yes` text, `010` ten.

Stricter than YAML where a recipe would get ambiguous: no duplicate keys, no anchors, no tags, text keys only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import Resolver
from yaml.scanner import Scanner

from megatron_rl.errors import RecipeError

_TAG = "tag:yaml.org,2002:"
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")


@dataclass(frozen=True, slots=True)
class Document:
    """Parsed text: plain dicts, lists and scalars, and the line (from 1) of every dotted path."""

    data: Any
    lines: dict[str, int]


class _Loader(Reader, Scanner, Parser, Composer, Resolver):
    """PyYAML up to its node tree, with the scalar rules of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        Resolver.__init__(self)

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases are not supported, write the value out",
                problem_mark=event.start_mark,
            )
        return super().compose_node(parent, index)


for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), _first)


def parse_document(text: str, *, source: str) -> Document:
    """Raises RecipeError naming `source:line` for text that is not YAML, and all duplicate keys at once."""
    try:
        node = _Loader(text).get_single_node()
    except RecursionError:
        raise RecipeError(f"{source}: nested too deeply to be read; close what is opened") from None
    except yaml.MarkedYAMLError as error:
        raise RecipeError(_syntax_error(error, source)) from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: not readable as YAML: {' '.join(str(error).split())}") from None
    reader = _Reader(source)
    data = reader.convert(node, ()) if node is not None else None
    if reader.problems:
        raise RecipeError("\n".join(reader.problems))
    return Document(data, reader.lines)


def parse_value(text: str) -> Any:
    """One value as YAML; raises RecipeError for text that is not YAML."""
    return parse_document(text, source="value").data


def format_value(value: Any) -> str:
    """A scalar, or a list or mapping of scalars on one line, such that `parse_value` gives it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        mantissa, exponent, power = repr(value).partition("e")
        # YAML 1.1 readers take 1e-06 for text
        return mantissa + (".0" if exponent and "." not in mantissa else "") + exponent + power
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and parse_value(value) == value:
            return value
        quoted: str = yaml.safe_dump(value, default_style='"', width=2**31)
        return quoted.strip()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{format_value(k)}: {format_value(v)}" for k, v in value.items()) + "}"
    return str(value)


def _syntax_error(error: yaml.MarkedYAMLError, source: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = f":{mark.line + 1}" if mark else ""
    context = f" ({error.context})" if error.context else ""
    return f"{source}{line}: not readable as YAML: {error.problem}{context}"


@dataclass(slots=True)
class _Reader:
    """Turns nodes into plain values; remembers lines and what is not allowed."""

    source: str
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def convert(self, node: Node, path: tuple[str, ...]) -> Any:
        self.lines.setdefault(".".join(path), node.start_mark.line + 1)
        if isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            return [self.convert(child, (*path, str(i))) for i, child in enumerate(node.value)]
        if isinstance(node, ScalarNode) and node.tag.startswith(_TAG):
            return self._scalar(node)
        self._complain(node, f"tag {node.tag} is not allowed")
        return None

    def _mapping(self, node: MappingNode, path: tuple[str, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, ScalarNode) or key_node.tag != _TAG + "str":
                self._complain(key_node, "a key must be text; put it in quotes")
                continue
            line = key_node.start_mark.line + 1
            if key in first_line:
                where = ".".join((*path, key))
                self._complain(key_node, f"{where} is set twice, first on line {first_line[key]}; delete one")
                continue
            first_line[key] = self.lines[".".join((*path, key))] = line
            result[key] = self.convert(value_node, (*path, key))
        return result

    def _scalar(self, node: ScalarNode) -> Any:
        text, tag = node.value, node.tag.removeprefix(_TAG)
        try:
            match tag:
                case "null":
                    return None
                case "bool":
                    return text.lower() == "true"
                case "int":
                    bases = {"0o": 8, "0x": 16}
                    return int(text, bases[text[:2]]) if text[:2] in bases else int(text)
                case "float":
                    return float(text.replace(".inf", "inf").replace(".nan", "nan"))
                case "str":
                    return text
        except ValueError:
            pass
        self._complain(node, f"{text[:200]!r} with tag !!{tag} is not allowed")
        return None

    def _complain(self, node: Node, text: str) -> None:
        self.problems.append(f"{self.source}:{node.start_mark.line + 1}: {text}")
