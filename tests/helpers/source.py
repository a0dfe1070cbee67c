"""The project's own source as syntax trees, for tests about its structure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"megatron_rl": ROOT, "megatron_rl_kernels": ROOT / "kernels", "tools": ROOT}


@dataclass(frozen=True)
class Module:
    """One file; `name` is dotted, without a trailing `__init__`."""

    name: str
    path: Path
    tree: ast.Module

    def where(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def project_modules() -> list[Module]:
    """Every module of the library, the kernels and the tools."""
    modules = []
    for package, base in PACKAGES.items():
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return modules


def imports(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Each import with the dotted names it may bind: `from a import b` gives `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node, node.module
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"


def longest_prefix(name: str, table: dict[str, int]) -> int | None:
    """Value of the most special entry that is `name` or a package around it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in table:
            return table[".".join(parts[:end])]
    return None
