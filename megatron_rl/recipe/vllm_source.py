"""What the source of the installed vLLM says of its arguments: types, choices, bounds. Parsed, never imported, which
would take a minute; what only running it can tell is left open."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

SCALARS = {"bool": bool, "int": int, "float": float, "str": str}
_CONTAINERS = {"list", "dict", "set", "tuple"}
# of pydantic's Field, as a reader says them
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
# `vllm.LLM` takes a number for it
_OPEN = {"compilation_config"}
_MOST_SHOWN = 24
_MOST_HOPS = 8  # of names that stand for names


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """What a scalar value of one argument may be. Nothing at all: only vLLM itself can tell."""

    types: frozenset[type] = frozenset()
    choices: tuple[object, ...] = ()  # beside `types`
    names: frozenset[str] = frozenset()  # of an enumeration, in either case; beside `types`
    only_containers: bool = False  # no scalar will do
    bounds: tuple[tuple[str, float], ...] = ()  # ("at least", 1)

    def takes(self, value: object) -> bool:
        if self.only_containers:
            return False
        if self == Argument():
            return True
        # true is an int to Python, not to a reader; a whole number is a float to both
        is_type = type(value) in self.types or (type(value) is int and float in self.types)
        is_choice = any(type(value) is type(choice) and value == choice for choice in self.choices)
        is_name = isinstance(value, str) and value.upper() in self.names
        return (is_type and self._is_inside(value)) or is_choice or is_name

    def _is_inside(self, value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True
        inside = {
            "at least": lambda limit: value >= limit,
            "above": lambda limit: value > limit,
            "at most": lambda limit: value <= limit,
            "below": lambda limit: value < limit,
        }
        return math.isfinite(value) and all(inside[word](limit) for word, limit in self.bounds)

    def spellings(self) -> list[str]:
        """Of choices and names."""
        return [*map(str, self.choices), *sorted(self.names)]

    def __str__(self) -> str:
        """Behind `vLLM takes`."""
        if self.only_containers:
            return "lists or mappings alone, which cannot be given here; remove it"
        words = sorted(name for name, kind in SCALARS.items() if kind in self.types)
        limits = " and ".join(f"{word} {limit:g}" for word, limit in self.bounds)
        types = " or ".join(words) + (f" {limits}" if limits else "")
        every = self.spellings()
        more = f" and {len(every) - _MOST_SHOWN} more" if len(every) > _MOST_SHOWN else ""
        named = ", ".join(every[:_MOST_SHOWN]) + more
        if not every:
            return types
        return f"{types}, or one of {named}" if types else f"one of {named}"


def read_arguments(package: Path) -> Mapping[str, Argument] | None:
    """Of each field of EngineArgs. None where the source keeps them elsewhere."""
    return _read(package)


@lru_cache
def _read(package: Path) -> Mapping[str, Argument] | None:
    source = _Source(package)
    module, node = source.find(source.module("vllm.engine.arg_utils"), "EngineArgs") or (None, None)
    if module is None or not isinstance(node, ast.ClassDef):
        return None
    return {
        name: Argument() if name in _OPEN else source.argument(module, field) for name, field in _fields(node)
    }


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, each


class _Source:
    """Modules of a package, parsed when they are asked for."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> ast.Module | None:
        first, *rest = name.split(".")
        if first != "vllm":
            return None
        path = self._package.joinpath(*rest)
        try:
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            return ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            return None

    def find(
        self, module: ast.Module | None, name: str, hops: int = _MOST_HOPS
    ) -> tuple[ast.Module, ast.AST] | None:
        """The class of this name, or the value that it is assigned, wherever the module has it from."""
        if module is None or hops == 0:
            return None
        for node in module.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                value = getattr(node, "value", None)
                return None if value is None else (module, value)
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self.find(self.module(node.module), alias.name, hops - 1)
        return None

    def argument(self, module: ast.Module, field: ast.AnnAssign) -> Argument:
        """Of a field of EngineArgs: by its annotation, and by that of the configuration it has its default from."""
        own = self._of_annotation(module, field.annotation)
        there = self._default_of(module, field.value) or self._namesake(module, field)
        if there is None:
            return own
        config_module, config_field = there
        other = self._of_annotation(config_module, config_field.annotation)
        if own.types == {str} and not own.choices and other.choices and not other.types:
            own = other
        if own.types & {int, float}:
            own = replace(own, bounds=_bounds(config_field.value))
        return own

    def _default_of(
        self, module: ast.Module, value: ast.expr | None
    ) -> tuple[ast.Module, ast.AnnAssign] | None:
        """The field behind `CacheConfig.block_size` or `get_field(CacheConfig, "block_size")`."""
        match value:
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                pass
            case ast.Call(
                func=ast.Name(id="get_field"), args=[ast.Name(id=owner), ast.Constant(value=str(name))]
            ):
                pass
            case _:
                return None
        found = self.find(module, owner)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        field = dict(_fields(found[1])).get(name)
        return None if field is None else (found[0], field)

    def _namesake(self, module: ast.Module, field: ast.AnnAssign) -> tuple[ast.Module, ast.AnnAssign] | None:
        """Where the default is None, decided later: the field of the same name, if one configuration alone has it."""
        if not isinstance(field.target, ast.Name) or field.value is None or not _is_none(field.value):
            return None
        found = []
        for node in module.body:
            if isinstance(node, ast.ImportFrom) and node.module == "vllm.config":
                for alias in node.names:
                    owner = self.find(module, alias.name)
                    if owner is not None and isinstance(owner[1], ast.ClassDef):
                        same = dict(_fields(owner[1])).get(field.target.id)
                        found += [(owner[0], same)] if same is not None else []
        return found[0] if len(found) == 1 else None

    def _of_annotation(self, module: ast.Module, node: ast.AST, hops: int = _MOST_HOPS) -> Argument:
        """Nothing known where one of its parts is not."""
        parts = [self._of_part(module, part, hops) for part in _parts(node) if not _is_none(part)]
        if not parts or any(part == Argument() for part in parts):
            return Argument()
        scalars = [part for part in parts if not part.only_containers]
        return Argument(
            types=frozenset().union(*(part.types for part in scalars)),
            choices=tuple(choice for part in scalars for choice in part.choices),
            names=frozenset().union(*(part.names for part in scalars)),
            only_containers=not scalars,
        )

    def _of_part(self, module: ast.Module, node: ast.AST, hops: int) -> Argument:
        match node:
            case ast.Name(id=name) if name in SCALARS:
                return Argument(types=frozenset({SCALARS[name]}))
            case ast.Name(id=name) if name in _CONTAINERS:
                return Argument(only_containers=True)
            case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=elements)):
                return _literal(elements)
            case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Constant() as one):
                return _literal([one])
            case ast.Subscript(value=ast.Name(id=name)) if name in _CONTAINERS:
                return Argument(only_containers=True)
            case ast.Name(id=name) if hops and (found := self.find(module, name)) is not None:
                where, meant = found
                return (
                    _class(meant)
                    if isinstance(meant, ast.ClassDef)
                    else self._of_annotation(where, meant, hops - 1)
                )
        return Argument()


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Of `A | B | None`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _parts(node.left)
        yield from _parts(node.right)
    else:
        yield node


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _class(node: ast.ClassDef) -> Argument:
    """An enumeration takes its members, and `auto` for vLLM's own choice; a configuration takes a mapping."""
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    members = {
        each.targets[0].id: each.value
        for each in node.body
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
    }
    if "IntEnum" in bases:
        return _literal(list(members.values()))
    if "Enum" in bases:
        return Argument(names=frozenset(name for name in [*members, "AUTO"] if name.isupper()))
    decorators = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return Argument(
        only_containers=any(isinstance(each, ast.Name) and each.id == "config" for each in decorators)
    )


def _literal(elements: list[ast.expr]) -> Argument:
    values = [each.value for each in elements if isinstance(each, ast.Constant)]
    return Argument(choices=tuple(values)) if len(values) == len(elements) else Argument()


def _bounds(value: ast.expr | None) -> tuple[tuple[str, float], ...]:
    """Those of `Field(default=0, ge=0, lt=1)`."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Field"):
        return ()
    return tuple(
        (_BOUNDS[keyword.arg], keyword.value.value)
        for keyword in value.keywords
        if keyword.arg in _BOUNDS
        and isinstance(keyword.value, ast.Constant)
        and isinstance(keyword.value.value, int | float)
    )
