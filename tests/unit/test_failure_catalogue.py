"""The failure catalogue of the bridge names tests that exist, one row per known failure."""

import ast
import re

from megatron_rl.reshard.diagnosis import Fault
from tests.helpers.source import ROOT, project_modules

README = ROOT / "megatron_rl" / "reshard" / "README.md"
NUM_FAILURES = 33


def functions(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def rows():
    """Number -> last cell of its row."""
    found = re.findall(r"^\| (\d+) \|(.*)\|$", README.read_text(), flags=re.MULTILINE)
    return {int(number): cells.rsplit("|", 1)[-1] for number, cells in found}


def test_every_known_failure_has_a_row_with_a_test():
    assert list(rows()) == list(range(1, NUM_FAILURES + 1))
    assert [number for number, last in rows().items() if "::test_" not in last] == []


def test_every_test_that_the_readme_names_exists():
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", README.read_text())
    assert len(named) > NUM_FAILURES
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or name not in functions(ROOT / file)
    ]
    assert missing == []


def test_the_readme_explains_every_diagnosis():
    text = README.read_text()
    assert [fault.value for fault in Fault if f"| `{fault.value}` |" not in text] == []


def test_engines_are_never_put_to_sleep():
    """Sleeping discards weights and buffers; nothing of ours asks vLLM for it."""
    asked = [
        module.where(node)
        for module in project_modules()
        if module.name.startswith("megatron_rl.rollout")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("sleep", "wake_up")
        and not (isinstance(node.value, ast.Name) and node.value.id == "time")
    ]
    assert asked == []
