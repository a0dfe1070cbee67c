"""Who may import whom: look down only, third-party packages behind fences, small files and functions."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers.source import ROOT, Module, imports, longest_prefix, project_modules

# the most special entry counts; a module imports its own floor or a lower one
FLOORS = {
    "megatron_rl": 0,
    "megatron_rl.arguments": 0,
    "megatron_rl.errors": 0,
    "megatron_rl.recipe": 0,
    "megatron_rl.data.rows": 0,
    "megatron_rl.data.types": 0,
    "megatron_rl.parallel.degrees": 0,
    "megatron_rl.parallel.layout": 0,
    "megatron_rl.model.spec": 0,
    "megatron_rl.model.splits": 0,
    "megatron_rl_kernels": 0,
    "megatron_rl.recipe.resolve": 1,
    "megatron_rl.recipe.reward_checks": 1,
    "megatron_rl.recipe.summary": 1,
    "megatron_rl.recipe.transfer": 1,
    "megatron_rl.estimate": 1,
    "megatron_rl.estimate.command": 5,
    "megatron_rl.platform": 1,
    "megatron_rl.algo": 1,
    "megatron_rl.data": 1,
    "megatron_rl.rewards": 1,
    "megatron_rl.parallel": 1,
    "megatron_rl.model.hf_experts": 1,
    "megatron_rl.model.hf_tables": 1,
    "megatron_rl.model.pieces": 1,
    "megatron_rl.reshard": 1,
    "megatron_rl.model": 2,
    "megatron_rl.rollout": 2,
    "megatron_rl.reshard.execute": 2,
    "megatron_rl.reshard.parcels": 2,
    "megatron_rl.reshard.receive": 2,
    "megatron_rl.reshard.transports": 2,
    "megatron_rl.train.head": 3,
    "megatron_rl.train.optimizer": 3,
    "megatron_rl.train.policy": 3,
    "megatron_rl.train.replicas": 3,
    "megatron_rl.train.schedule_spans": 3,
    "megatron_rl.train.metrics": 3,
    "megatron_rl.evaluation": 3,
    "megatron_rl.evaluation.arguments": 5,
    "megatron_rl.evaluation.command": 5,
    "megatron_rl.evaluation.samples_file": 4,
    "megatron_rl.train": 4,
    "megatron_rl.report": 4,
    "megatron_rl.score": 5,
    "megatron_rl.verify": 5,
    "megatron_rl.cli": 5,
    "megatron_rl.__main__": 5,
    "tools": 5,
}

# third-party package: the modules that may import it
FENCES = {
    "vllm": ["megatron_rl.rollout"],
    "triton": ["megatron_rl_kernels"],
    "megatron": [
        "megatron_rl.platform",
        "megatron_rl.model",
        "megatron_rl.parallel.groups",
        "megatron_rl.train.optimizer",
        "megatron_rl.train.policy",
    ],
    "transformer_engine": ["megatron_rl.model"],
    "flash_attn": ["megatron_rl.model"],
    "apex": [],
    "transformers": ["megatron_rl.data.tokenizer", "megatron_rl.verify", "tools"],
    "plotly": ["megatron_rl.report"],
    "wandb": ["megatron_rl.train.tracker"],
    "pydantic": ["megatron_rl.recipe", "megatron_rl.estimate.hardware"],
    "yaml": ["megatron_rl.recipe"],
    "latex2sympy2_extended": ["megatron_rl.rewards"],
    "math_verify": [],
}

# a recipe is checked, and ranks are started, without torch
WITHOUT_TORCH = [
    "megatron_rl.errors",
    "megatron_rl.estimate",
    "megatron_rl.evaluation.arguments",
    "megatron_rl.evaluation.options",
    "megatron_rl.recipe",
    "megatron_rl.data.command",
    "megatron_rl.data.rows",
    "megatron_rl.parallel.degrees",
    "megatron_rl.parallel.layout",
    "megatron_rl.model.spec",
    "megatron_rl.model.splits",
    "megatron_rl.model.pieces",
    "megatron_rl.model.hf_experts",
    "megatron_rl.model.hf_tables",
    "megatron_rl.reshard.buckets",
    "megatron_rl.reshard.placement",
    "megatron_rl.reshard.plan",
    "megatron_rl.reshard.plan_summary",
    "megatron_rl.reshard.plan_text",
    "megatron_rl.reshard.proof",
    "megatron_rl.reshard.routes",
    "megatron_rl.reshard.segments",
    "megatron_rl.reshard.tables",
    "megatron_rl.rewards.sandbox",
    "megatron_rl.train.launcher",
    "megatron_rl.train.phases",
    "megatron_rl.train.rank_process",
    "megatron_rl.train.run_dir",
    "megatron_rl.train.stopping",
    "megatron_rl.score.arguments",
    "megatron_rl.score.names",
    "megatron_rl.verify.arguments",
    "megatron_rl.verify.layouts",
    "megatron_rl.verify.place",
    "megatron_rl.verify.prepare",
    "megatron_rl.verify.rank",
    "megatron_rl.verify.resume",
    "megatron_rl.verify.shorten",
    "megatron_rl.verify.table",
    "megatron_rl.cli",
    "megatron_rl.__main__",
]

# an engine's own process sets what vLLM reads before it is imported
ENVIRONMENT = [
    "megatron_rl.train.run",
    "megatron_rl.train.launcher",
    "megatron_rl.train.rank_process",
    "megatron_rl.rollout.vllm_worker",
]

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 90

MODULES = project_modules()


def is_inside(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def floor_violations(modules: Iterable[Module], floors: dict[str, int]) -> Iterator[str]:
    for module in modules:
        own = longest_prefix(module.name, floors)
        if own is None:
            yield f"{module.where(module.tree)}: {module.name} has no floor"
            continue
        for node, name in imports(module.tree):
            other = longest_prefix(name, floors)
            if other is not None and other > own:
                yield f"{module.where(node)}: floor {own} imports {name} of floor {other}"


def fence_violations(modules: Iterable[Module], fences: dict[str, list[str]]) -> Iterator[str]:
    for module in modules:
        for node, name in imports(module.tree):
            package = name.split(".")[0]
            if package in fences and not is_inside(module.name, fences[package]):
                yield f"{module.where(node)}: {module.name} imports {name}"


def environment_uses(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    words = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for module in modules:
        for node in ast.walk(module.tree):
            is_use = isinstance(node, ast.Attribute) and node.attr in words
            is_use |= (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(a.name in words for a in node.names)
            )
            if is_use:
                yield module.name, module.where(node)


def long_functions(modules: Iterable[Module], limit: int) -> Iterator[str]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > limit:
                    yield f"{module.where(node)}: {node.name} has {lines} lines"


def test_modules_import_their_own_floor_or_a_lower_one():
    assert list(floor_violations(MODULES, FLOORS)) == []


def test_third_party_packages_stay_behind_their_fences():
    assert list(fence_violations(MODULES, FENCES)) == []


def test_recipes_are_checked_without_torch():
    modules = [module for module in MODULES if is_inside(module.name, WITHOUT_TORCH)]
    assert list(fence_violations(modules, {"torch": []})) == []


def test_kernels_know_nothing_of_the_library():
    modules = [module for module in MODULES if is_inside(module.name, ["megatron_rl_kernels"])]
    assert list(fence_violations(modules, {"megatron_rl": []})) == []


def test_the_environment_is_read_at_the_borders_only():
    assert [where for name, where in environment_uses(MODULES) if not is_inside(name, ENVIRONMENT)] == []


def test_files_are_small():
    sizes = {module.where(module.tree): len(module.path.read_text().splitlines()) for module in MODULES}
    assert {where: lines for where, lines in sizes.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_small():
    assert list(long_functions(MODULES, MAX_FUNCTION_LINES)) == []


def test_every_module_says_what_it_owns():
    silent = [m.where(m.tree) for m in MODULES if m.tree.body and ast.get_docstring(m.tree) is None]
    assert silent == []


def test_every_floor_and_fence_names_something_that_exists():
    names = {module.name for module in MODULES} | {"tools"}
    listed = [
        *FLOORS,
        *ENVIRONMENT,
        *WITHOUT_TORCH,
        *(name for allowed in FENCES.values() for name in allowed),
    ]
    assert [name for name in listed if name not in names] == []


def module(name: str, source: str) -> Module:
    return Module(name, ROOT / Path("toy.py"), ast.parse(source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("megatron_rl.algo.x", "from megatron_rl.train import policy"),
        ("megatron_rl.recipe.load", "def f():\n    import megatron_rl.algo.losses"),
        ("megatron_rl.train.policy", "from megatron_rl.train.rl import run_rl"),
    ],
)
def test_an_import_from_above_is_noticed(name, source):
    assert len(set(floor_violations([module(name, source)], FLOORS))) >= 1


@pytest.mark.parametrize(
    "source", ["import vllm", "from vllm.config import X", "def f():\n    import triton.language"]
)
def test_a_breached_fence_is_noticed(source):
    assert list(fence_violations([module("megatron_rl.train.rl", source)], FENCES))


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "from os import getenv", "import os\nos.getenv('A')"]
)
def test_a_use_of_the_environment_is_noticed(source):
    assert list(environment_uses([module("megatron_rl.algo.x", source)]))


def test_the_page_on_architecture_shows_these_floors():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (.*) \|$", page.split("## Floors")[1], flags=re.MULTILINE)
    shown = {
        f"megatron_rl.{name}": int(floor) for floor, row in rows for name in re.findall(r"`([\w.]+)`", row)
    }
    assert {int(floor) for floor, _ in rows} == set(FLOORS.values())
    assert {name: FLOORS.get(name) for name in shown} == shown
