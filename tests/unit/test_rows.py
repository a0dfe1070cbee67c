"""Files of rows are told apart by content, and every broken row is found."""

from __future__ import annotations

import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet

from megatron_rl.data import rows
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
    file.write_bytes(b'{"a": 1}\n\n{"a": 1\r\n[1]\n{"a": "\xff"}\n{"a": 2}\n')
    with pytest.raises(DataError) as caught:
        read_rows(file)
    text = str(caught.value)
    assert "3 of 5 rows are broken" in text
    assert f"{file}:3: broken JSON at column 8: " in text
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


def test_a_parquet_file_cut_short_is_an_error_with_its_name(tmp_path):
    file = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"a": i} for i in range(1000)]), file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"x\.parquet: not a readable parquet file"):
        read_rows(file)


def test_a_line_longer_than_any_row_is_an_error_with_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1 << 20)
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": "' + b"x" * (1 << 21) + b'"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:2: the line is longer than 1 MiB"):
        read_rows(file)


def test_a_compressed_file_is_named_as_one(tmp_path):
    file = tmp_path / "x.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"a": 1}\n'))
    with pytest.raises(DataError, match=r"is compressed \(gzip\); unpack it first"):
        read_rows(file)


@pytest.mark.parametrize("form", ["lines", "array", "parquet"])
def test_rows_are_counted_as_they_are_read(tmp_path, form):
    file, many = tmp_path / "x", [{"a": i} for i in range(7)]
    if form == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(many), file)
    else:
        file.write_text(json.dumps(many) if form == "array" else "\r\n\n".join(map(json.dumps, many)) + "\n")
    assert rows.count_rows(file) == len(read_rows(file)) == 7


def test_lines_are_read_one_by_one(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n{broken\n')
    stream = rows.iter_rows(file)
    assert [next(stream), next(stream)] == [{"a": 1}, {"a": 2}]
    with pytest.raises(DataError, match=":3: broken JSON"):
        next(stream)


def test_a_directory_stands_for_its_data_files_in_the_order_of_their_names(tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist([{"a": 1}, {"a": 2}]), tmp_path / "b-00000.parquet")
    (tmp_path / "c.json").write_text('[{"a": 3}]')
    (tmp_path / "a.jsonl").write_text('{"a": 0}\n')
    (tmp_path / "README.md").write_text("not data")
    assert read_rows(tmp_path) == [{"a": i} for i in range(4)]
    assert rows.count_rows(tmp_path) == 4


def test_a_directory_without_data_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"the directory holds no \.parquet, \.jsonl, \.json file"):
        read_rows(tmp_path)
