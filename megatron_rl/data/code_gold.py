"""Golds of programming problems as data sets hold them: which they are, and the compressed ones unpacked.

What the tests say is read by `rewards.code_gold`; nothing here runs a program.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.errors import DataError

_MAX_BYTES = 1 << 28  # of the decompressed tests of one problem
_TEST_KEYS = ("inputs", "outputs", "functional", "pytest", "inputs_file", "outputs_file")
_ONE_TEST = {"input", "output"}  # of an object in a list of tests


def is_code_gold(gold: Any) -> bool:
    """Whether a gold, raw as the row holds it, lists tests of programs."""
    if isinstance(gold, str):
        if gold.lstrip()[:1] == "[":
            return all(f'"{key}"' in gold for key in _ONE_TEST)
        return gold.lstrip()[:1] == "{" and any(f'"{key}"' in gold for key in _TEST_KEYS)
    if _is_list(gold):
        return bool(gold) and all(isinstance(test, Mapping) and test.keys() >= _ONE_TEST for test in gold)
    return isinstance(gold, Mapping) and any(key in gold for key in _TEST_KEYS)


def livecodebench_gold(row: Mapping[str, Any]) -> dict[str, Any]:
    """Public and private tests of a LiveCodeBench row, in this order. Raises DataError where they cannot be read."""
    tests = [*_listed(row, "public_test_cases"), *_listed(row, "private_test_cases")]
    metadata = row.get("metadata") or {}
    metadata = _json(metadata, "metadata") if isinstance(metadata, str) else metadata
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    kinds = {test.get("testtype", "stdin") for test in tests}
    if (
        not tests
        or len(kinds) != 1
        or kinds - {"stdin", "functional"}
        or (kinds == {"functional"} and not name)
    ):
        raise DataError(
            f"code gold: got {len(tests)} tests of kinds {sorted(map(str, kinds))}, function {name!r}"
        )
    try:
        inputs, outputs = [test["input"] for test in tests], [test["output"] for test in tests]
    except KeyError as error:
        raise DataError(f"code gold: a test has no {error}") from error
    if kinds == {"stdin"}:
        return {"inputs": inputs, "outputs": outputs}
    # one JSON value a line for each argument
    arguments = [[_json(line, "test") for line in text.split("\n") if line.strip()] for text in inputs]
    return {"inputs": arguments, "outputs": [_json(text, "test") for text in outputs], "fn_name": name}


def _listed(row: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = row.get(key)
    if value is None or value == "":
        return []
    if isinstance(value, str):
        value = _json(value, key) if value.lstrip()[:1] == "[" else _json(_decompressed(value, key), key)
    if not _is_list(value) or not all(isinstance(test, Mapping) for test in value):
        raise DataError(f"code gold: {key} is not a list of tests")
    return list(value)


class _TextOnly(pickle.Unpickler):
    """Reads a pickled text and nothing else: a class or function named in the pickle is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _decompressed(text: str, key: str) -> str:
    """The public files hold base64 of zlib of a pickle of JSON text."""
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_BYTES)
        if unpacker.unconsumed_tail:
            raise DataError(f"code gold: {key} holds more than {_MAX_BYTES >> 20} MiB")
        value = _TextOnly(io.BytesIO(content)).load()
    # a broken pickle raises whatever its opcodes run into
    except (binascii.Error, zlib.error, pickle.UnpicklingError, ValueError, EOFError, IndexError, KeyError,
            AttributeError, TypeError, MemoryError) as error:  # fmt: skip
        raise DataError(f"code gold: {key} cannot be decompressed: {error}") from error
    if not isinstance(value, str | bytes):
        raise DataError(f"code gold: {key} holds a {type(value).__name__}, need text")
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"code gold: {what} is not JSON: {error}") from error


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
