"""Files of a run directory: JSON that is always valid, and writes that happen as a whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron_rl.errors import DataError, TrainingError


def to_json(value: Any, *, indent: int | None = None) -> bytes:
    """Valid UTF-8 JSON for any text a model can write; lone surrogates stay as escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", errors="backslashreplace")


def write_atomically(path: Path, content: bytes) -> None:
    """The file is either as it was or complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def remove_partial(directory: Path) -> None:
    """Delete what `write_atomically` had not finished in `directory` when a process was killed."""
    for path in directory.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def append_whole(stream: IO[bytes], content: bytes) -> None:
    """Append to an unbuffered file: all of `content`, or nothing and an OSError."""
    end = stream.seek(0, os.SEEK_END)
    left = memoryview(content)
    try:
        while left:
            left = left[stream.write(left) :]
    except BaseException:
        stream.truncate(end)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say which file could not be written; Python's own error names none once a file is open."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{path}: cannot be written ({error.strerror or error}); make room or give access there, then go on "
            "with --resume"
        ) from error


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a file; a last line that was cut off is left out. A missing file has no lines.

    Raises DataError naming the first line that is no JSON object.
    """
    if not path.exists():
        return []
    raw = path.read_bytes().split(b"\n")
    # what follows the last line break was never finished
    return [_read_object(line, f"{path}:{number}") for number, line in enumerate(raw[:-1], 1) if line.strip()]


def _read_object(text: bytes, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DataError(f"{place}: cannot be read ({error}); remove the line") from None
    if not isinstance(found, dict):
        raise DataError(f"{place}: got {text[:40]!r}, must be a JSON object; remove the line")
    return found
