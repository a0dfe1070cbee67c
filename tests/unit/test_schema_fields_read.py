"""Every field of a recipe changes something: some code outside the schema reads it from that very config.

`.tp` of a LayoutConfig does not count for `.tp` of an EngineConfig: what stands left of the dot is followed
by annotations (arguments, fields, returns), assignments, loops, and the names of schema fields.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import get_args

from megatron_rl.recipe import schema, stages
from tests.helpers.source import ROOT, Module, project_modules

CONFIGS = {
    cls.__name__: cls
    for source in (schema, stages)
    for cls in vars(source).values()
    if dataclasses.is_dataclass(cls) and isinstance(cls, type)
}
# names that stand for configs in annotations
ALIASES = {name: {name} for name in CONFIGS} | {"Stage": {"SftStage", "RlStage"}}

# checking a value is no use of it
NOT_READERS = [
    "megatron_rl.recipe.schema", "megatron_rl.recipe.stages", "megatron_rl.recipe.checks",
    "megatron_rl.recipe.origins", "megatron_rl.recipe.summary", "megatron_rl.recipe.batch",
    "megatron_rl.recipe.batch_checks", "megatron_rl.recipe.algorithm_checks", "megatron_rl.recipe.overlap_checks",
]  # fmt: skip


def configs_named(annotation: ast.AST | None) -> set[str]:
    """Configs that an annotation mentions, quoted or not: `RlStage | None`, `tuple[Stage, ...]`."""
    found: set[str] = set()
    for node in ast.walk(annotation) if annotation is not None else ():
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= configs_named(ast.parse(node.value, mode="eval").body)
        found |= ALIASES.get(name, set())
    return found


def schema_attributes() -> dict[str, set[str]]:
    """Field name to the configs that it may hold: `.optimizer` is an OptimizerConfig."""
    held: dict[str, set[str]] = defaultdict(set)
    for name, cls in CONFIGS.items():
        for f in dataclasses.fields(cls):
            held[f.name] |= configs_named(ast.parse(str(f.type), mode="eval").body) - {name}
    return held


class Reader(ast.NodeVisitor):
    """Collects (config, field) pairs that one module reads."""

    def __init__(self, attributes: dict[str, set[str]], returns: dict[str, set[str]]) -> None:
        self.attributes, self.returns = attributes, returns
        self.names: dict[str, set[str]] = defaultdict(set)
        self.read: set[tuple[str, str]] = set()

    def configs(self, node: ast.AST) -> set[str]:
        """What an expression may be."""
        if isinstance(node, ast.Name):
            return self.names[node.id]
        if isinstance(node, ast.Attribute):
            return self.attributes.get(node.attr, set())
        if isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            wrapped = (
                {c for a in node.args for c in self.configs(a)}
                if name in ("enumerate", "zip", "replace")
                else set()
            )
            return self.returns.get(name, set()) | ALIASES.get(name, set()) | wrapped
        if isinstance(node, ast.Subscript | ast.Starred | ast.Await):
            return self.configs(node.value)
        if isinstance(node, ast.IfExp):
            return self.configs(node.body) | self.configs(node.orelse)
        if isinstance(node, ast.BoolOp):
            return {c for value in node.values for c in self.configs(value)}
        return set()

    def bind(self, target: ast.AST, configs: set[str]) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.names[node.id] |= configs

    def visit_arg(self, node: ast.arg) -> None:
        self.names[node.arg] |= configs_named(node.annotation)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.bind(node.target, configs_named(node.annotation))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self.bind(target, self.configs(node.value))
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.bind(node.target, self.configs(node.value))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, self.configs(node.iter))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.bind(node.target, self.configs(node.iter))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read |= {(config, node.attr) for config in self.configs(node.value)}
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        for config in configs_named(node.cls):
            self.read |= {(config, attribute) for attribute in node.kwd_attrs}
        self.generic_visit(node)


def declared_attributes(modules: Iterable[Module]) -> Iterator[tuple[str, set[str]]]:
    """Attributes whose type is written down anywhere: dataclass fields, properties, `self.x = argument`."""
    for module in modules:
        for cls in (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(cls):
                if isinstance(node, ast.AnnAssign):
                    name = (
                        node.target.id
                        if isinstance(node.target, ast.Name)
                        else getattr(node.target, "attr", "")
                    )
                    yield name, configs_named(node.annotation)
                elif isinstance(node, ast.FunctionDef):
                    if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
                        yield node.name, configs_named(node.returns)
                    yield from _set_from_arguments(node)


def _set_from_arguments(function: ast.FunctionDef) -> Iterator[tuple[str, set[str]]]:
    arguments = {a.arg: configs_named(a.annotation) for a in function.args.args + function.args.kwonlyargs}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in arguments:
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    yield target.attr, arguments[node.value.id]


def fields_read(modules: list[Module]) -> set[tuple[str, str]]:
    """(config class, field) pairs that the modules read."""
    attributes = schema_attributes()
    for name, configs in declared_attributes(modules):
        attributes[name] |= configs
    returns: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                returns[node.name] |= configs_named(node.returns)
    read: set[tuple[str, str]] = set()
    for module in modules:
        if module.name not in NOT_READERS:
            reader = Reader(attributes, returns)
            # twice: a name may be used above the line that says what it is
            reader.visit(module.tree)
            reader.visit(module.tree)
            read |= reader.read
    return read


def test_every_field_of_the_schema_is_read():
    read = fields_read(project_modules())
    # the tag of a stage is read by the union that it decides
    tags = {(cls.__name__, "kind") for cls in get_args(stages.Stage)}
    fields = {(name, f.name) for name, cls in CONFIGS.items() for f in dataclasses.fields(cls)}
    assert sorted(f"{name}.{field}" for name, field in fields - read - tags) == []


def toy(source: str) -> set[tuple[str, str]]:
    return fields_read([Module("megatron_rl.toy", ROOT / "toy.py", ast.parse(source))])


def test_a_field_counts_for_its_own_config_only():
    read = toy("def f(layout: LayoutConfig, stage):\n    return layout.tp + stage.engine.replicas")
    assert read == {("LayoutConfig", "tp"), ("EngineConfig", "replicas")}


def test_reading_is_followed_through_names_loops_and_attributes():
    read = toy(
        "def f(stage: RlStage):\n"
        "    sampling = stage.sampling\n"
        "    for window in stage.curriculum:\n"
        "        print(sampling.top_p, window.difficulty)\n"
        "class Engine:\n"
        "    def __init__(self, config: EngineConfig):\n"
        "        self._config = config\n"
        "    def start(self):\n"
        "        return self._config.start_timeout_s\n"
    )
    assert ("SamplingConfig", "top_p") in read
    assert ("CurriculumWindow", "difficulty") in read
    assert ("EngineConfig", "start_timeout_s") in read
    assert ("EvalConfig", "top_p") not in read


def test_writing_or_naming_a_field_is_not_reading_it():
    assert toy("def f(o: OptimizerConfig):\n    lr = 3\n    return dict(eps=1)\n") == set()
