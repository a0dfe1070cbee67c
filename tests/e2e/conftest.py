"""What end-to-end tests start from; made once, since each takes tens of seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.quickstart import ROOT, prepare, train

NUM_SMALL_ROWS = 500
BEGINNER = ROOT / "tests" / "golden" / "beginner.yaml"


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the quickstart's model and data, and the first rows of each in `small`."""
    root = tmp_path_factory.mktemp("quickstart")
    prepare(root)
    (root / "small").mkdir()
    for name in ("sft", "train"):
        rows = (root / "data" / "quickstart" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (root / "small" / f"{name}.jsonl").write_text("".join(rows[:NUM_SMALL_ROWS]))
    return root


@pytest.fixture(scope="session")
def beginner(place: Path) -> Path:
    """A model that knows the form of an answer and is seldom right, so that its rewards differ."""
    done = train(place, place / "runs" / "beginner", recipe=BEGINNER)
    assert done.returncode == 0, done.stderr[-3000:]
    return place / "runs" / "beginner" / "model"
