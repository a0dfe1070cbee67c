"""Every command and every example of the documentation runs, or names the test that runs it."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import typing
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from megatron_rl.cli import main
from megatron_rl.recipe import schema, stages
from megatron_rl.recipe.vllm_options import vllm_options
from megatron_rl.recipe.yaml_text import parse_value
from megatron_rl.rewards import REWARDS
from tests.helpers.code_cases import CASES
from tests.helpers.pages import CASES_FILE, PAGES, Block, blocks, code_spans, make_place, run_command
from tests.helpers.quickstart import ROOT

BLOCKS = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.language == "bash" and not block.marker]
MARKED = [block for block in BLOCKS if block.marker]
PYTHON = [block for block in BLOCKS if block.language == "python" and not block.marker]
# what a page shows as a file, for the commands below it, by the name that the marker gives
RECIPES = {block.marker.split()[-1]: block.text for block in BLOCKS if block.language == "yaml"}
# README trains into one of these, and reads from the one that launch/quickstart.sh would have written
TRAINED, FIRST = "runs/mine", "runs/first"
NAMED = [*PAGES, ROOT / "CHANGELOG.md"]  # pages whose flags and keys are looked up
# where a path of keys in a page starts: at the recipe, in a stage or in a part of one
STARTS = {
    "model": schema.ModelConfig,
    "layout": schema.LayoutConfig,
    "run": schema.RunConfig,
    "checkpoint": schema.CheckpointConfig,
    "engine": stages.EngineConfig,
    "algorithm": stages.AlgorithmConfig,
    "grader": stages.GraderConfig,
}
IN_A_STAGE = {"overlap", "stragglers"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The repository as a reader has it, where the README's own training commands have been run."""
    directory: Path = tmp_path_factory.mktemp("reader")
    make_place(directory)
    for name, text in RECIPES.items():
        (directory / name).write_text(text, encoding="utf-8")
    training = next(
        block for block in SHELL if f"--run-dir {TRAINED}" in block.text and "train" in block.text
    )
    for command in training.commands():
        run_command(command, directory)
    (directory / FIRST).symlink_to(directory / TRAINED)
    return directory


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """What each command of the pages has printed: two pages may name the same."""
    return {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_run_as_they_are_printed(block: Block, place: Path, outputs: dict[str, str]):
    said = ""
    for command in block.commands():
        if f"--run-dir {TRAINED}" in command:
            assert (place / TRAINED / "metrics.jsonl").exists()  # run by the fixture
            continue
        key = " ".join(shlex.split(command, comments=True))
        if key not in outputs:
            outputs[key] = run_command(command, place)
        said = outputs[key]
    if block.following:
        missing = [line for line in block.following.splitlines() if line.strip() and line not in said]
        assert missing == [], f"{block}: the page shows lines that the last command does not print"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_examples_run_as_they_are_printed(block: Block, monkeypatch):
    monkeypatch.chdir(ROOT)
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
    assert [str(block) for block in BLOCKS if block.language not in ("bash", "python", "yaml", "")] == []
    # a recipe that is shown is checked
    commands = {command for block in SHELL for command in block.commands()}
    assert [name for name in RECIPES if not any(f"megatron-rl check {name}" in one for one in commands)] == []
    # output, a directory, a listing: nothing that is typed
    typed = re.compile(r"^(\.venv/|bash |sbatch |megatron-rl )", re.MULTILINE)
    assert [str(block) for block in BLOCKS if not block.language and typed.search(block.text)] == []
    assert len(SHELL) >= 12 and len(PYTHON) >= 4


def test_estimates_in_the_readme_stand_below_the_command_that_prints_them():
    """Output is compared with the block right above it, so lines of `check` have to follow `check` alone."""
    shown = [block for block in SHELL if "memory of a rank" in block.following]
    assert [str(block.page.name) for block in shown] == ["README.md"]
    assert len(shown[0].commands()) == 1 and "--model-config qwen3-8b" in shown[0].text


def test_the_numbers_of_cases_that_a_page_names_are_those_of_the_tests():
    text = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")
    (answers,), (programs,) = (
        re.findall(r"each of some ([\d,]+) cases", text),
        re.findall(r"programs: (\d+) ", text),
    )
    cases = len((ROOT / "tests/data" / CASES_FILE).read_text(encoding="utf-8").splitlines())
    assert int(answers.replace(",", "")) == pytest.approx(cases, rel=0.05)
    assert int(programs) == len(CASES)


def test_what_the_readme_asks_a_server_is_a_question_as_the_model_has_learned_them(place: Path):
    """Another form, such as one that ends in =?, gets a wrong answer."""
    form = re.compile(r"\d([+-]\d){1,6}")
    rows = (place / "data/quickstart/train.jsonl").read_text(encoding="utf-8").splitlines()
    learned = [json.loads(row)["prompt"][0]["content"] for row in rows]
    assert [text for text in learned if not form.fullmatch(text)] == []
    asked = re.findall(r'"content": "([^"]*)"', (ROOT / "README.md").read_text(encoding="utf-8"))
    assert asked and [text for text in asked if not form.fullmatch(text)] == []


def _help(*command: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0, command
    return said.getvalue()


@functools.cache
def _known_flags(program: str, command: str) -> frozenset[str]:
    """Flags of `megatron-rl COMMAND` by its --help, of vLLM, tools and scripts by the text of their files."""
    if program == "megatron-rl":
        return frozenset(re.findall(r"--[a-z][a-z0-9-]*", _help(*command.split())))
    if program == "vllm":
        options = vllm_options()
        assert options is not None
        return frozenset({"--port", *(f"--{name.replace('_', '-')}" for name in options)})
    files = [*(ROOT / "launch").iterdir()] if program == "launch" else [*(ROOT / "tools").glob("*.py")]
    return frozenset(
        flag for file in files for flag in re.findall(r"--[a-z][a-z0-9-]*", file.read_text(encoding="utf-8"))
    )


COMMANDS = ["train", "check", "data", "engine", "report", "score", "eval"]
COMMANDS += [f"verify {proof}" for proof in ("layout", "resume", "parity")]


def _program(text: str) -> list[tuple[str, str]]:
    """Which programs a command or an inline flag may be about."""
    ours = re.search(r"megatron-rl (verify \w+|[a-z]+)", text)
    if ours:
        return [("megatron-rl", ours[1])]
    if "-m vllm." in text:
        return [("vllm", "")]
    if "tools/" in text:
        return [("tools", "")]
    if "launch/" in text:
        return [("launch", "")]
    return [("megatron-rl", name) for name in COMMANDS] + [("tools", ""), ("launch", "")]


@pytest.mark.parametrize("page", NAMED, ids=lambda page: page.name)
def test_every_flag_of_a_page_exists(page: Path):
    typed = [c for block in blocks(page) if block.language == "bash" for c in block.commands()]
    unknown = []
    for text in typed + code_spans(page):
        command = " ".join(shlex.split(text, comments=True)) if text in typed else text
        known = frozenset().union(*(_known_flags(*program) for program in _program(command)))
        flags = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", command)
        unknown += [f"{flag} in: {command}" for flag in flags if flag not in known]
    assert unknown == []


def _field(path: list[str]) -> object:
    """The annotation of the field that a path of keys names. Raises KeyError where there is none."""
    if path[0] == "stages" and len(path) > 2:
        path = path[2:]
    if path[0] in STARTS:
        holders, rest = [STARTS[path[0]]], path[1:]
    else:
        holders, rest = [stages.RlStage, stages.SftStage], path
    annotation: object = holders[0]
    for key in rest:
        hints = [typing.get_type_hints(holder, include_extras=True) for holder in holders]
        annotation = next(hint[key] for hint in [*hints, {key: KeyError}] if key in hint)
        if annotation is KeyError:
            raise KeyError(key)
        parts = [annotation, *typing.get_args(annotation)]
        holders = [part for part in parts if hasattr(part, "__dataclass_fields__")]
    return annotation


def _key_problem(span: str) -> str | None:
    named = re.match(r"([a-z_]+(?:\.[a-z_0-9*]+)*)(?:(?:: |=)(.*))?$", span)
    if not named or span.endswith((".py", ".json", ".md")):
        return None
    path, value = named[1].split("."), named[2]
    if value is None and (ROOT / "megatron_rl" / Path(*path).with_suffix(".py")).is_file():
        return None  # a module, such as model.spec
    if path[0] not in {*STARTS, *IN_A_STAGE, "stages"} or (len(path) == 1 and value is None):
        return None
    try:
        annotation = _field(path)
        # `...` stands for what the page leaves out, `a | b` for a choice
        for choice in [] if value is None or "..." in value else value.split(" | "):
            loaded = parse_value(choice)
            if loaded is not None:
                TypeAdapter(annotation).validate_python(tuple(loaded) if isinstance(loaded, list) else loaded)
    except (KeyError, ValueError) as error:
        return f"`{span}`: {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("page", NAMED, ids=lambda page: page.name)
def test_every_key_of_a_page_is_in_the_schema_with_a_value_that_fits(page: Path):
    overrides = [
        word
        for block in blocks(page)
        if block.language == "bash"
        for command in block.commands()
        for word in shlex.split(command, comments=True)
        if re.match(r"[a-z]+\.[a-z0-9_.*]+=", word)
    ]
    assert [problem for span in code_spans(page) + overrides if (problem := _key_problem(span))] == []


@pytest.mark.parametrize(
    "span",
    [
        "engine.route",
        "run.wandb.team",
        "overlap: two_step",
        "stages.1.sampling.temp=1",
        "engine.sleep: often",
    ],
)
def test_a_key_or_value_that_does_not_exist_is_seen(span: str):
    assert _key_problem(span)


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
