"""Directories of a test that another user has to reach: pytest makes them for their owner alone."""

from __future__ import annotations

import tempfile
from pathlib import Path


def make_reachable(directory: Path) -> None:
    """Let everybody enter `directory` and those of pytest around it; the system's own temporary one stays as it is."""
    around = Path(tempfile.gettempdir())
    for path in (directory, *directory.parents):
        if path == around or not path.is_relative_to(around):
            return
        path.chmod(0o755)
