"""The repository as a newcomer finds it: no private paths, small strict scripts, a true README tree."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.source import ROOT

TEXT = {".py", ".md", ".yaml", ".toml", ".txt", ".sh", ".sbatch", ".cu", ".cpp", ".h", ".json", ""}
SKIPPED = {".git", ".venv", "runs", "models", "data", "build", "dist", ".hypothesis"}
MAX_SCRIPT_LINES, MAX_RECIPE_LINES = 80, 80

# a path of somebody's machine, put together so that this file does not hold one
PRIVATE = re.compile("|".join(["/" + "work/", "/" + "home/", "/" + "root/", "/" + "Users/", "/" + "mnt/"]))


def repository_files() -> list[Path]:
    """Text files outside ignored directories and caches."""
    files = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        is_cache = any(part.endswith(("_cache", "__pycache__", ".egg-info")) for part in parts)
        if path.is_file() and not is_cache and parts[0] not in SKIPPED and path.suffix in TEXT:
            files.append(path)
    return files


FILES = repository_files()
SCRIPTS = [p for p in FILES if p.suffix in {".sh", ".sbatch"} or p == ROOT / ".ci/run"]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_file_names_a_path_of_one_machine():
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if PRIVATE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_every_script_is_strict_short_and_valid(script):
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert len(lines) <= MAX_SCRIPT_LINES
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_no_script_ends_processes_by_name_or_holds_hyper_parameters(script):
    text = script.read_text()
    assert not re.search(r"\b(pkill|killall|fuser)\b", text)
    assert not re.search(r"\b(lr|batch_size|temperature|steps|iterations)=", text)


def test_the_documented_scripts_are_there_and_start_as_programs():
    names = {p.name for p in SCRIPTS}
    assert {"setup.sh", "quickstart.sh", "test.sh", "torchrun.sh", "slurm.sbatch", "slurm_multinode.sh", "run"} <= names
    assert [relative(p) for p in SCRIPTS if p.suffix != ".sbatch" and not p.stat().st_mode & 0o100] == []


@pytest.mark.parametrize("recipe", RECIPES, ids=relative)
def test_every_recipe_is_short(recipe):
    assert len(recipe.read_text().splitlines()) <= MAX_RECIPE_LINES


def test_every_path_of_the_tree_in_the_readme_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
    tree = next(block for block in blocks if all(name in block for name in ("recipes/", "launch/", "tests/")))
    # the first words of lines that are not indented; `#` begins the explanation
    named = [word for line in tree.splitlines() if line[:1].strip() for word in top_level_paths(line)]
    assert {"megatron_rl/", "kernels/", "launch/", "recipes/", "tools/", "tests/"} <= set(named)
    assert [name for name in named if not (ROOT / name).exists()] == []


def top_level_paths(line: str) -> list[str]:
    """Leading words of a tree line that are paths: `setup.py LICENSE`, or `tests/` of `tests/  unit`."""
    words: list[str] = []
    for word in line.replace("├── ", "").replace("└── ", "").split():
        if (words and words[-1].endswith("/")) or not re.fullmatch(r"[\w.\-]+(/[\w.\-]*)*", word):
            break
        words.append(word)
    return words


def test_leading_paths_of_a_tree_line_are_found():
    assert top_level_paths("setup.py pyproject.toml  LICENSE") == ["setup.py", "pyproject.toml", "LICENSE"]
    assert top_level_paths("tests/     unit/ property/") == ["tests/"]
    assert top_level_paths("├── kernels/   # fused kernels") == ["kernels/"]
