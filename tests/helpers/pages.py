"""The pages of the documentation as fenced blocks, and a place in which their commands run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.quickstart import ROOT, prepare, run_environment

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# the same recipe, in less time: every command of the pages meets its keys, paths and stages
_SHORTER = {
    "steps: 450": "steps: 2",
    "warmup_steps: 20": "warmup_steps: 0",
    "warmup_steps: 10": "warmup_steps: 0",
    "iterations: 80": "iterations: 2",
    "prompts_per_iteration: 64": "prompts_per_iteration: 4",
    "group_size: 8": "group_size: 4",
    "max_response_tokens: 128": "max_response_tokens: 32",
    "- {iterations: 20, difficulty: [2, 4]}": "- {iterations: 2, difficulty: [2, 4]}",
    "      - {iterations: 30, difficulty: [3, 5]}\n": "",
    "      - {iterations: 30, difficulty: [4, 7]}\n": "",
    "every: 20 ": "max_prompts: 4\n      every: 20 ",
    "every_steps: 50": "every_steps: 2",
}
_COPIED = ("recipes", "runs", "models", "data")
CASES_FILE = "math_cases.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block; `marker` is the HTML comment in the line before it, `line` counts from 1."""

    page: Path
    line: int
    language: str
    text: str
    marker: str
    following: str  # the text of the block after it, where that stands directly below it without a language

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[str]:
        """Its lines as they are typed; comments and continued lines are joined to them by the shell's own rules."""
        joined = self.text.replace("\\\n", " ")
        return [line for line in joined.splitlines() if shlex.split(line, comments=True)]


def blocks(page: Path) -> list[Block]:
    """Every fenced block of the page in its order."""
    text = page.read_text(encoding="utf-8")
    found = list(re.finditer(r"^```([a-z]*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE))
    result = []
    for i, match in enumerate(found):
        before = text[: match.start()].rstrip("\n").rsplit("\n", 1)[-1]
        comment = re.fullmatch(r"<!-- (.*) -->", before)
        after = found[i + 1] if i + 1 < len(found) else None
        is_output = after and not after[1] and not text[match.end() : after.start()].strip()
        result.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start()) + 1,
                language=match[1],
                text=match[2],
                marker=comment[1] if comment else "",
                following=after[2] if after and is_output else "",
            )
        )
    return result


def code_spans(page: Path) -> list[str]:
    """What stands between backticks in the page's running text, in its order."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def make_place(place: Path) -> None:
    """What a reader has who cloned the repository and ran set-up, with a shorter quickstart recipe."""
    for entry in ROOT.iterdir():
        if entry.name not in (*_COPIED, "tests", ".git"):
            (place / entry.name).symlink_to(entry)
    _link_tests(place / "tests")
    shutil.copytree(ROOT / "recipes", place / "recipes")
    recipe = place / "recipes" / "quickstart.yaml"
    text = recipe.read_text()
    for long, short in _SHORTER.items():
        assert text.count(long) == 1, f"recipes/quickstart.yaml has {long!r} {text.count(long)} times"
        text = text.replace(long, short)
    recipe.write_text(text)
    prepare(place, sizes=("--train", "3000", "--sft", "1000", "--heldout", "25"))


def _link_tests(there: Path) -> None:
    """The tests, with one in 30 of the cases that `score` grades in the pages: each goes through the real judge."""
    data = ROOT / "tests" / "data"
    (there / "data").mkdir(parents=True)
    for entry in [*(ROOT / "tests").iterdir(), *data.iterdir()]:
        if entry not in (data, data / CASES_FILE):
            (there / entry.relative_to(ROOT / "tests")).symlink_to(entry)
    cases = (data / CASES_FILE).read_text(encoding="utf-8").splitlines(keepends=True)
    (there / "data" / CASES_FILE).write_text("".join(cases[::30]), encoding="utf-8")


def run_command(command: str, place: Path, *, timeout_s: float = 240.0) -> str:
    """What the command printed. Raises AssertionError with all of it where its exit code is not 0."""
    environment = run_environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, (
        f"{command}\nexit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done.stdout
