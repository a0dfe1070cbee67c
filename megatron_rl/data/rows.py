"""Rows of a data file as dictionaries: JSONL, one JSON array, or parquet, told apart by content, not by name.

Knows file formats only; what a row means is up to `data.schemas` and `data.sft_data`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import DataError

Row = Mapping[str, Any]

TURNS = "turns"  # the column that a row gets which is itself an array of objects
MAX_LINE_BYTES = 1 << 28  # a code problem with all its tests takes tens of MiB

_MAX_LISTED = 10
_SUFFIXES = (".parquet", ".jsonl", ".json")
_HEAD_BYTES = 1 << 16
_PARQUET_ROWS = 1024  # at a time
_BOM = b"\xef\xbb\xbf"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2"}


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a file, in its order. Blank lines and a byte order mark are ignored.

    Raises DataError for a missing or empty file, and for broken rows: up to ten at once, each as `file:line`.
    """
    return list(iter_rows(path))


def iter_rows(path: str | Path) -> Iterator[Row]:
    """The same rows one by one: JSONL and parquet are never in memory as a whole, a JSON array is.

    A directory stands for its data files, in the order of their names. Broken rows are raised behind the last good one
    of their file, so that all are told at once.
    """
    for file in data_files(path):
        yield from _file_rows(file)


def data_files(path: str | Path) -> list[Path]:
    """The file itself, or those of a directory that end as data files do. Raises DataError where there is none."""
    file = Path(path)
    if file.is_dir():
        found = sorted(part for part in file.iterdir() if part.suffix in _SUFFIXES and part.is_file())
        if found:
            return found
        raise DataError(f"{file}: the directory holds no {', '.join(_SUFFIXES)} file")
    if not file.is_file():
        raise DataError(f"{file}: no such data file; give the path of a .jsonl, .json or .parquet file")
    return [file]


def _file_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith(b"PAR1"):
        yield from _parquet_rows(file)
        return
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise DataError(f"{file}: is compressed ({name}); unpack it first")
    first = _first_character(file)
    if not first:
        raise DataError(f"{file}: the file is empty; need one JSON object per line, or one JSON array")
    yield from _array_rows(file) if first == b"[" else _lines_rows(file)


def count_rows(path: str | Path) -> int:
    """Rows of a file or directory, without reading what a line or a parquet row holds."""
    return sum(map(_count, data_files(path)))


def _count(file: Path) -> int:
    with file.open("rb") as stream:
        is_parquet = stream.read(4) == b"PAR1"
    if is_parquet:
        return int(_open_parquet(file).metadata.num_rows)
    if _first_character(file) in (b"[", b""):
        return len(read_rows(file))
    with file.open("rb") as stream:
        return sum(bool(line.strip()) for line in stream)


def _first_character(file: Path) -> bytes:
    with file.open("rb") as stream:
        while chunk := stream.read(_HEAD_BYTES):
            text = chunk.removeprefix(_BOM).lstrip()
            if text:
                return text[:1]
    return b""


def _open_parquet(file: Path) -> Any:
    try:
        from pyarrow import parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise DataError(
            f"{file}: parquet needs pyarrow; `pip install pyarrow`, or convert to JSONL"
        ) from error
    try:
        return parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not a readable parquet file: {error}") from error


def _parquet_rows(file: Path) -> Iterator[Row]:
    opened = _open_parquet(file)
    try:
        for batch in opened.iter_batches(batch_size=_PARQUET_ROWS):
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not a readable parquet file: {error}") from error
    finally:
        opened.close()


def _array_rows(file: Path) -> Iterator[Row]:
    content = file.read_bytes().removeprefix(_BOM)
    try:
        rows = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            # one array a line
            yield from _lines_rows(file)
            return
        raise DataError(f"{file}:{error.lineno}: broken JSON array: {error.msg}") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}:{line}: not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: JSON that cannot be read: {error}") from error
    broken: list[str] = []
    for number, row in enumerate(rows):
        if (found := _as_row(row)) is not None:
            yield found
        else:
            broken.append(f"row {number}: got {_kind(row)}, need an object")
    _raise_broken(file, broken, len(rows))


def _as_row(value: Any) -> Row | None:
    """An object, or an array of objects, which are the turns of a row without other columns."""
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        return {TURNS: value}
    return value if isinstance(value, dict) else None


def _lines_rows(file: Path) -> Iterator[Row]:
    broken: list[str] = []
    total = 0
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        total += 1
        try:
            # without its end, behind which an error of a row cut short would stand
            row = json.loads(line.rstrip(b"\r\n"))
        except json.JSONDecodeError as error:
            broken.append(f"{file}:{number}: broken JSON at column {error.colno}: {error.msg}")
        except UnicodeDecodeError as error:
            broken.append(f"{file}:{number}: not UTF-8: {error.reason}")
        except (ValueError, RecursionError) as error:
            # valid JSON beyond what Python reads: integers of thousands of digits, nesting without end
            broken.append(f"{file}:{number}: JSON that cannot be read: {error}")
        else:
            if (found := _as_row(row)) is not None:
                yield found
            else:
                broken.append(f"{file}:{number}: got {_kind(row)}, need a JSON object")
    _raise_broken(file, broken, total)


def _lines(file: Path) -> Iterator[bytes]:
    """Lines as bytes. Only \\n ends one: str.splitlines would also cut at U+2028, which JSON strings may hold."""
    with file.open("rb") as stream:
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{file}:{number}: the line is longer than {MAX_LINE_BYTES >> 20} MiB; is this a data file with "
                    "one JSON object per line"
                )
            yield line.removeprefix(_BOM) if number == 1 else line


def _raise_broken(file: Path, broken: Sequence[str], total: int) -> None:
    if not broken:
        return
    shown = "\n".join(f"  {line}" for line in broken[:_MAX_LISTED])
    more = f"\n  and {len(broken) - _MAX_LISTED} more" if len(broken) > _MAX_LISTED else ""
    raise DataError(f"{file}: {len(broken)} of {total} rows are broken; fix or delete them\n{shown}{more}")


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
