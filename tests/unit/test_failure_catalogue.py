"""The failure catalogues of bridge and training name tests that exist, one row per known failure."""

import ast
import re
from pathlib import Path

import pytest

from megatron_rl.reshard.diagnosis import Fault
from tests.helpers.source import ROOT

BRIDGE = ROOT / "megatron_rl" / "reshard" / "README.md"
TRAINING = ROOT / "megatron_rl" / "train" / "README.md"
# README: the numbers of its rows
CATALOGUES = {BRIDGE: range(1, 34), TRAINING: range(23, 43)}
each_catalogue = pytest.mark.parametrize("readme", CATALOGUES, ids=lambda path: path.parent.name)


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def rows(readme: Path) -> dict[int, str]:
    """Number -> last cell of its row."""
    found = re.findall(r"^\| (\d+) \|(.*)\|$", readme.read_text(), flags=re.MULTILINE)
    return {int(number): cells.rsplit("|", 1)[-1] for number, cells in found}


@each_catalogue
def test_every_known_failure_has_a_row_with_a_test(readme):
    assert list(rows(readme)) == list(CATALOGUES[readme])
    assert [number for number, last in rows(readme).items() if "::test_" not in last] == []


@each_catalogue
def test_every_test_that_the_readme_names_exists(readme):
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", readme.read_text())
    assert len(named) > len(CATALOGUES[readme])
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or name not in functions(ROOT / file)
    ]
    assert missing == []


def test_the_readme_explains_every_diagnosis():
    text = BRIDGE.read_text()
    assert [fault.value for fault in Fault if f"| `{fault.value}` |" not in text] == []
