"""What end-to-end tests start from; made once for all processes of a session, since each takes tens of seconds."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.quickstart import ROOT, prepare, train

NUM_SMALL_ROWS = 500
BEGINNER = ROOT / "tests" / "golden" / "beginner.yaml"


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the quickstart's model and data, and the first rows of each in `small`."""
    return made_once(tmp_path_factory, "quickstart", make_place)


@pytest.fixture(scope="session")
def beginner(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows the form of an answer and is seldom right, so that its rewards differ."""

    def make(root: Path) -> None:
        done = train(place, root / "run", recipe=BEGINNER)
        assert done.returncode == 0, done.stderr[-3000:]

    return made_once(tmp_path_factory, "beginner", make) / "run" / "model"


def make_place(root: Path) -> None:
    prepare(root)
    (root / "small").mkdir()
    for name in ("sft", "train"):
        rows = (root / "data" / "quickstart" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (root / "small" / f"{name}.jsonl").write_text("".join(rows[:NUM_SMALL_ROWS]))


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """This process's own copy of what `make` writes into a directory; the first process that asks makes it."""
    own = factory.mktemp(name)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        make(own)
        return own
    # the directories of all processes of a session stand side by side
    shared = factory.getbasetemp().parent / f"shared_{name}"
    with open(f"{shared}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            draft = shared.with_name(f"{shared.name}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            make(draft)
            draft.rename(shared)
    return Path(shutil.copytree(shared, own, dirs_exist_ok=True))
