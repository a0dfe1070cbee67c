"""Outputs and results against what was expected, on plain data outside of the sandbox."""

import json

import pytest

from megatron_rl.rewards.code_compare import read_record, same_json, same_output


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (b"3\n", b"3"),
        (b"3 \r\n\n\n", b"3\n"),
        (b"", b"\n"),
        (b"1.50 2\n", b"1.5 2.0\n"),
        (b"1e3\n", b"1000\n"),
        (b"-0\n", b"0\n"),
        (b".5 +7\n", b"0.5 7\n"),
        (b"a\tb\n", b"a b\n"),
        (b"nan\n", b"nan\n"),
        (b"1e99999\n", b"10e99998\n"),
    ],
)
def test_the_same_output_spelled_otherwise_is_accepted(got, expected):
    assert same_output(got, expected)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (b"", b"0\n"),
        (b"1\n\n2\n", b"1\n2\n"),
        (b"\n1\n", b"1\n"),
        (b"1 2\n", b"12\n"),
        (b"1\n2\n", b"1 2\n"),
        (b"1 2 3\n", b"1 2\n"),
        (b"yes\n", b"YES\n"),
        (b"90000000000000001\n", b"90000000000000000\n"),
        (b"0.30000000000000004\n", b"0.3\n"),
        (b"nan\n", b"5\n"),
        (b"inf\n", b"1e99999\n"),
        (b"1_0\n", b"10\n"),
        (b"0x10\n", b"16\n"),
        ("\u0663\n".encode(), b"3\n"),
        (b"1\xff\n", b"1\n"),
        (b"1\x0b\n2", b"1\n3"),
    ],
)
def test_another_output_is_refused(got, expected):
    assert not same_output(got, expected)


def test_huge_numbers_are_compared_without_being_computed():
    assert not same_output(b"1e999999999999\n", b"5\n")
    assert same_output(b"9" * 300_000, b"9" * 300_000 + b"\n")
    assert not same_output(b"9" * 300_000, b"9" * 299_999 + b"8")


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (True, 1),
        (1, True),
        (0, False),
        (None, False),
        (None, 0),
        ("1", 1),
        ([1], [1, 2]),
        ([2, 1], [1, 2]),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1, "b": None}),
        ([], {}),
        ("", None),
        ([[]], [[], []]),
    ],
)
def test_results_of_another_type_or_value_are_refused(got, expected):
    assert not same_json(got, expected)


def test_json_has_one_kind_of_number():
    assert same_json([1, 2.0, {"a": [None, True]}], [1.0, 2, {"a": [None, True]}])
    assert same_json([1, 2], (1, 2))


def test_nesting_beyond_python_is_refused_and_not_raised():
    deep: list = []
    other: list = []
    for _ in range(100_000):
        deep, other = [deep], [other]
    assert not same_json(deep, other)


def record(value) -> bytes:
    return json.dumps({"v": value}).encode() + b"\n"


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (record([1, {"t": [2]}]), ("value", [1, [2]])),
        (
            record({"d": [[1, "a"], [True, 2], [None, 3], ["k", 4]]}),
            ("value", {"1": "a", "true": 2, "null": 3, "k": 4}),
        ),
        (b'{"e": ["KeyError", "object"], "m": "3"}\n', ("raised", "KeyError: 3")),
    ],
)
def test_a_record_gives_the_value_as_json_would_have_it(output, found):
    assert read_record(output) == found


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"\n",
        b"5\n",
        b"[]\n",
        b"{}\n",
        b'{"v": 1}',
        record(1) * 2,
        record(1) + b"x",
        record({"s": [1]}),
        record({"f": "nan"}),
        record({"o": 0, "n": "X"}),
        record({"d": [[{"t": [1]}, 2]]}),
        record({}),
        b'{"v": NaN}\n',
        b'{"v": ' + b"[" * 200_000 + b"\n",
        b'{"e": [], "m": 1}\n',
        b"\xff\xfe\n",
    ],
)
def test_what_is_no_single_whole_record_is_none(output):
    assert read_record(output)[0] == "none"
