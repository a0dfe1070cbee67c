"""Rows of a data file as dictionaries: JSONL, one JSON array, or parquet, told apart by content, not by name.

Knows file formats only; what a row means is up to `data.prompts` and `data.sft_data`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import DataError

Row = Mapping[str, Any]

_MAX_LISTED = 10


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a file, in its order. Blank lines and a byte order mark are ignored.

    Raises DataError for a missing or empty file, and for broken rows: up to ten at once, each as `file:line`.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{file}: no such data file; give the path of a .jsonl, .json or .parquet file")
    content = file.read_bytes()
    if content.startswith(b"PAR1"):
        return _read_parquet(file)
    content = content.removeprefix(b"\xef\xbb\xbf")
    first = content.lstrip()[:1]
    if not first:
        raise DataError(f"{file}: the file is empty; need one JSON object per line, or one JSON array")
    if first == b"[":
        return _read_array(file, content)
    return _read_lines(file, content)


def _read_parquet(file: Path) -> list[Row]:
    try:
        from pyarrow import parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise DataError(
            f"{file}: parquet needs pyarrow; `pip install pyarrow`, or convert to JSONL"
        ) from error
    try:
        return list(parquet.read_table(file).to_pylist())
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not a readable parquet file: {error}") from error


def _read_array(file: Path, content: bytes) -> list[Row]:
    try:
        rows = json.loads(content)
    except json.JSONDecodeError as error:
        raise DataError(f"{file}:{error.lineno}: broken JSON array: {error.msg}") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}:{line}: not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: JSON that cannot be read: {error}") from error
    broken = [
        f"row {number}: got {_kind(row)}, need an object"
        for number, row in enumerate(rows)
        if not isinstance(row, dict)
    ]
    _raise_broken(file, broken, len(rows))
    return list(rows)


def _read_lines(file: Path, content: bytes) -> list[Row]:
    rows: list[Row] = []
    broken: list[str] = []
    # Only \n ends a line: str.splitlines would also cut at U+2028, which JSON strings may hold.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            broken.append(f"{file}:{number}: broken JSON at column {error.colno}: {error.msg}")
        except UnicodeDecodeError as error:
            broken.append(f"{file}:{number}: not UTF-8: {error.reason}")
        except (ValueError, RecursionError) as error:
            # valid JSON beyond what Python reads: integers of thousands of digits, nesting without end
            broken.append(f"{file}:{number}: JSON that cannot be read: {error}")
        else:
            if isinstance(row, dict):
                rows.append(row)
            else:
                broken.append(f"{file}:{number}: got {_kind(row)}, need a JSON object")
    _raise_broken(file, broken, len(rows) + len(broken))
    return rows


def _raise_broken(file: Path, broken: Sequence[str], total: int) -> None:
    if not broken:
        return
    shown = "\n".join(f"  {line}" for line in broken[:_MAX_LISTED])
    more = f"\n  and {len(broken) - _MAX_LISTED} more" if len(broken) > _MAX_LISTED else ""
    raise DataError(f"{file}: {len(broken)} of {total} rows are broken; fix or delete them\n{shown}{more}")


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
