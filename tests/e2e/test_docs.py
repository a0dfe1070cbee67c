"""Every command and every example of the documentation runs, or names the test that runs it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megatron_rl.rewards import REWARDS
from tests.helpers.pages import PAGES, Block, blocks, make_place, run_command
from tests.helpers.quickstart import ROOT

BLOCKS = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.language == "bash" and not block.marker]
MARKED = [block for block in BLOCKS if block.marker]
PYTHON = [block for block in BLOCKS if block.language == "python" and not block.marker]
# README trains into one of these, and reads from the one that launch/quickstart.sh would have written
TRAINED, FIRST = "runs/mine", "runs/first"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The repository as a reader has it, where the README's own training commands have been run."""
    directory: Path = tmp_path_factory.mktemp("reader")
    make_place(directory)
    training = next(
        block for block in SHELL if f"--run-dir {TRAINED}" in block.text and "train" in block.text
    )
    for command in training.commands():
        run_command(command, directory)
    (directory / FIRST).symlink_to(directory / TRAINED)
    return directory


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_run_as_they_are_printed(block: Block, place: Path):
    for command in block.commands():
        if f"--run-dir {TRAINED}" in command:
            assert (place / TRAINED / "metrics.jsonl").exists()  # run by the fixture
            continue
        said = run_command(command, place)
    if block.following:
        missing = [line for line in block.following.splitlines() if line.strip() and line not in said]
        assert missing == [], f"{block}: the page shows lines that the last command does not print"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_examples_run_as_they_are_printed(block: Block, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ["brevity"]:
        monkeypatch.delitem(REWARDS, name, raising=False)
    before = dict(REWARDS)
    try:
        exec(compile(block.text, str(block), "exec"), {"__name__": "example"})
    finally:
        REWARDS.clear()
        REWARDS.update(before)


def test_what_is_not_run_here_names_the_tests_that_do():
    for block in MARKED:
        named = re.findall(r"tests/[\w/]+\.py", block.marker)
        assert block.marker.startswith("tested: ") and named, f"{block}: {block.marker}"
        assert [name for name in named if not (ROOT / name).is_file()] == [], block


def test_every_block_is_run_or_shown():
    """A block in a language that nothing runs would be a promise that nobody keeps."""
    assert [str(block) for block in BLOCKS if block.language not in ("bash", "python", "")] == []
    # output, a directory, a listing: nothing that is typed
    typed = re.compile(r"^(\.venv/|bash |sbatch |megatron-rl )", re.MULTILINE)
    assert [str(block) for block in BLOCKS if not block.language and typed.search(block.text)] == []
    assert len(SHELL) >= 12 and len(PYTHON) >= 4


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("[!.]*/**/*.md")), ids=str)
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = Path(os.path.normpath(page.parent / path)) if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert broken == []


def test_the_readme_lists_every_page():
    listed = re.findall(r"\]\((docs/\w+\.md)\) \|", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == [f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))]
