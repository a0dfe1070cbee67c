"""Files of a run directory: JSON that is always valid, and writes that happen as a whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeGuard

from megatron_rl.errors import DataError, TrainingError


def to_json(value: Any, *, indent: int | None = None) -> bytes:
    """Valid UTF-8 JSON for any text a model can write; lone surrogates stay as escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", errors="backslashreplace")


def write_atomically(path: Path, content: bytes) -> None:
    """The file is either as it was or complete; of a link, the file that it leads to.

    What is there and is no file, such as /dev/stdout or a pipe, is written to, never replaced.
    """
    mode = path.stat().st_mode if path.exists() else stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory, where a file is to be written", str(path))
    if not stat.S_ISREG(mode):
        path.write_bytes(content)
        return
    path = path.resolve()
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


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether it is a number that a float can hold: no NaN, no infinity, no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def parse_json(text: bytes) -> Any:
    """Raises ValueError for what is no JSON, or is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a file; a last line that was cut off is left out. A missing file has no lines.

    Raises DataError naming the first line that is no JSON object.
    """
    if not path.exists():
        return []
    return [_read_object(line, place) for place, line in _whole_lines(path, None)]


def read_some_jsonl(
    path: Path, *, max_bytes: int | None = None
) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """For those who only look: as `read_jsonl` with each line's place, and what is wrong with the lines left out.

    Of the first `max_bytes` where given. Raises OSError for a file that is there and cannot be opened.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    faults = []
    if path.exists():
        for place, line in _whole_lines(path, max_bytes):
            try:
                found.append((place, _read_object(line, place)))
            except DataError as error:
                faults.append(str(error))
    return found, faults


def _whole_lines(path: Path, max_bytes: int | None) -> Iterator[tuple[str, bytes]]:
    """Place and text of each line that is not blank."""
    with path.open("rb") as stream:
        raw = stream.read(max_bytes).split(b"\n")
    # what follows the last line break was cut or never finished
    return ((f"{path}:{number}", line) for number, line in enumerate(raw[:-1], 1) if line.strip())


def _read_object(text: bytes, place: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise DataError(f"{place}: cannot be read ({error}); remove the line") from None
    if not isinstance(found, dict):
        raise DataError(f"{place}: got {text[:40]!r}, must be a JSON object; remove the line")
    return found
