"""Files of rows are told apart by content, and every broken row is found."""

from __future__ import annotations

import json

import pyarrow
import pytest
from pyarrow import parquet

from megatron_rl.data.rows import read_rows
from megatron_rl.errors import DataError

ROWS = [{"a": 1}, {"a": "zwei\u2028drei"}]


@pytest.mark.parametrize(
    "content",
    [
        "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
        "\n \n" + "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n",
        json.dumps(ROWS, indent=2, ensure_ascii=False),
        "\n  " + json.dumps(ROWS),
    ],
    ids=["lines", "blank_lines", "indented_array", "array"],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x"])
def test_rows_do_not_depend_on_the_file_format(tmp_path, content, mark, name):
    (tmp_path / name).write_bytes(mark + content.encode())
    assert read_rows(tmp_path / name) == ROWS


def test_broken_lines_are_listed_together_with_file_and_line(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"a": 1}\n\n{"a": \n[1]\n{"a": "\xff"}\n{"a": 2}\n')
    with pytest.raises(DataError) as caught:
        read_rows(file)
    text = str(caught.value)
    assert "3 of 5 rows are broken" in text
    assert f"{file}:3: broken JSON at column" in text
    assert f"{file}:4: got an array, need a JSON object" in text
    assert f"{file}:5: not UTF-8" in text


def test_no_more_than_ten_broken_lines_are_listed(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n' + "{\n" * 14)
    with pytest.raises(DataError) as caught:
        read_rows(file)
    assert str(caught.value).count("broken JSON") == 10
    assert "and 4 more" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"[{},\n{]", ":2: broken JSON array"),
        (b"[{}, 3]", "row 1: got a number, need an object"),
        (b'[\n"\xff"]', ":2: not UTF-8"),
        (b" \n", "the file is empty"),
        (b"PAR1 and then nothing", "parquet"),
    ],
    ids=["syntax", "not_an_object", "encoding", "empty", "parquet"],
)
def test_broken_file_is_an_error_with_its_place(tmp_path, content, match):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(DataError, match=match):
        read_rows(tmp_path / "x.json")


def test_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl: no such data file"):
        read_rows(tmp_path / "gone.jsonl")


def test_parquet_gives_its_rows(tmp_path):
    file = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"a": [{"b": 1}]}]), file)
    assert read_rows(file) == [{"a": [{"b": 1}]}]


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000 + "]" * 100_000], ids=["digits", "nesting"])
def test_json_beyond_what_python_reads_is_an_error_with_its_line(tmp_path, value):
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n{"a": ' + value + "}\n")
    with pytest.raises(DataError, match=r"x\.jsonl:2: JSON that cannot be read"):
        read_rows(file)
