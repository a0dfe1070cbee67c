"""The tests of a programming problem, read from what data sets hold, each ready to run.

Forms: `inputs` + `outputs` (standard input and output, or with `fn_name` argument lists and results), the same in
files (`inputs_file`, `outputs_file`), a list of objects with `input` and `output`, and assertions (`functional`,
`pytest` or `asserts`: a text or a list of texts).
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.data.seeds import derive_seed
from megatron_rl.rewards.sandbox.jobs import JobKind, Limits

_MIB_OF = {"memory_mib": "mem_mb"}
_STDIN_KINDS, _CALL_KINDS = ("stdin", "stdin_stdout"), ("functional",)  # of the tests in a list


class BadGold(Exception):
    """Tests that cannot be run or prove nothing; the message says what is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeTest:
    """`payload` goes into the sandbox, `expected` (bytes, a JSON value, or nothing for assertions) never does."""

    kind: JobKind
    payload: bytes
    expected: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeGold:
    """`limits`: what the problem itself asks for by name; `max_wall_s` and `max_tests` only lower ours."""

    tests: Sequence[CodeTest]
    limits: Mapping[str, float] = field(default_factory=dict)
    max_wall_s: float | None = None
    max_tests: int | None = None

    def limits_over(self, limits: Limits) -> Limits:
        """`limits` with the problem's own in their place."""
        if self.max_wall_s is not None:
            limits = replace(
                limits,
                wall_s=min(limits.wall_s, self.max_wall_s),
                cpu_s=min(limits.cpu_s, self.max_wall_s),
            )
        own = {
            name: type(getattr(limits, name))(self.limits[key])
            for name, key in {"wall_s": "wall_s", "cpu_s": "cpu_s", **_MIB_OF}.items()
            if key in self.limits
        }
        return replace(limits, **own)


def read_gold(answer: Any) -> CodeGold:
    """A mapping or a list of tests, or one as JSON text.

    Raises BadGold, also for no tests at all, which prove nothing.
    """
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise BadGold(f"tests are not JSON: {str(error)[:100]}") from None
    if isinstance(answer, list | tuple) and answer:
        answer = _from_list(answer)
    if not isinstance(answer, Mapping):
        raise BadGold(f"tests are {type(answer).__name__}, need an object with `inputs` and `outputs`")
    tests = _read_tests(answer)
    if not tests:
        raise BadGold("no tests")
    return CodeGold(
        tests=tests,
        limits=_read_limits(answer.get("limits")),
        max_wall_s=_positive(answer, "timeout"),
        max_tests=int(_positive(answer, "max_test_cases") or 0) or None,
    )


def choose_tests(gold: CodeGold, *, prompt_id: str, max_tests: int) -> list[CodeTest]:
    """At most so many, in their order, drawn by the prompt id alone: the same for every response of a group."""
    limit = min(max_tests, gold.max_tests or max_tests)
    if len(gold.tests) <= limit:
        return list(gold.tests)
    # not `hash`: it differs between processes
    draw = random.Random(derive_seed(0, "code_tests", prompt_id))
    return [gold.tests[index] for index in sorted(draw.sample(range(len(gold.tests)), limit))]


def _read_tests(gold: Mapping[str, Any]) -> list[CodeTest]:
    if "inputs" in gold or "outputs" in gold:
        return _pairs(gold.get("inputs"), gold.get("outputs"), gold.get("fn_name"))
    if "inputs_file" in gold:
        return _pairs(
            _read_list(gold["inputs_file"]), _read_list(gold.get("outputs_file")), gold.get("fn_name")
        )
    for key in ("functional", "pytest", "asserts"):
        if gold.get(key):
            texts = [gold[key]] if isinstance(gold[key], str) else gold[key]
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
                raise BadGold(f"`{key}` is no text and no list of texts")
            return [test for text in texts if text.strip() for test in _assertions(text)]
    raise BadGold(
        f"no tests among the keys {', '.join(sorted(map(str, gold)))[:200] or '(none)'}; known are inputs and "
        f"outputs, inputs_file and outputs_file, functional, pytest, asserts"
    )


def _from_list(tests: Sequence[Any]) -> dict[str, Any]:
    """`inputs` and `outputs` out of objects that each hold one of both."""
    for number, test in enumerate(tests):
        if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
            raise BadGold(f"test {number} of a list is no object with `input` and `output`")
    kinds = {test.get("testtype", test.get("type", "stdin")) for test in tests}
    names = {_name_of(test) for test in tests}
    is_call = kinds <= {*_CALL_KINDS}
    if not (is_call or kinds <= {*_STDIN_KINDS}) or len(names) > 1 or is_call is (names == {None}):
        raise BadGold(
            f"a list of tests of kinds {sorted(map(str, kinds))} for the functions {sorted(map(str, names))}; need "
            f"{' or '.join(_STDIN_KINDS)} and no function, or {' or '.join(_CALL_KINDS)} and the name of one"
        )
    gold = {key + "s": [test[key] for test in tests] for key in ("input", "output")}
    return {**gold, "fn_name": names.pop() if is_call else None}


def _name_of(test: Mapping[str, Any]) -> str | None:
    metadata = test.get("metadata")
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return str(name or test.get("fn_name") or "") or None


def _read_list(path: Any) -> Any:
    if not isinstance(path, str):
        raise BadGold("inputs_file and outputs_file must both be paths")
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadGold(f"{path}: cannot be read as a JSON list: {error}") from None


def _pairs(inputs: Any, outputs: Any, fn_name: Any) -> list[CodeTest]:
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        raise BadGold("`inputs` and `outputs` must both be lists")
    if len(inputs) != len(outputs):
        raise BadGold(f"{len(inputs)} inputs for {len(outputs)} outputs")
    if fn_name is not None and (not isinstance(fn_name, str) or not fn_name):
        raise BadGold(f"`fn_name` is {fn_name!r}, need the name of a function")
    pairs = zip(inputs, outputs, strict=True)
    if fn_name is None:
        return [CodeTest(kind=JobKind.STDIN, payload=_text(i), expected=_text(o)) for i, o in pairs]
    return [_call(fn_name, i, o) for i, o in pairs]


def _text(value: Any) -> bytes:
    """Standard input or output; a list of lines, as some rows have it, is those lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        raise BadGold(f"an input or output is {type(value).__name__}, need text")
    return value.encode("utf-8", "surrogatepass")


def _call(fn_name: str, arguments: Any, expected: Any) -> CodeTest:
    if isinstance(arguments, str):
        # one JSON value a line, the result as JSON too
        try:
            arguments = [json.loads(line) for line in arguments.split("\n") if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except (ValueError, RecursionError):
            raise BadGold("the input of a call is text, but not one JSON value a line") from None
    if not isinstance(arguments, list | tuple):
        raise BadGold(f"the input of a call is {type(arguments).__name__}, need a list of arguments")
    try:
        request = json.dumps({"fn": fn_name, "args": list(arguments)})
    except (TypeError, ValueError, RecursionError) as error:
        raise BadGold(f"the input of a call is no JSON: {error}") from None
    return CodeTest(kind=JobKind.CALL, payload=request.encode("ascii") + b"\n", expected=expected)


def _assertions(text: str) -> list[CodeTest]:
    """One test per test function or method, else one per assertion on the top level, else the text as a whole."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadGold(f"assertions are no Python: {error}") from None
    entries = [entry for node in tree.body for entry in _entries(node)]
    if entries:
        return [_assertion(text, entry) for entry in entries]
    alone = [node for node in tree.body if isinstance(node, ast.Assert)]
    if not alone:
        return [_assertion(text, None)]
    return [_assertion(ast.unparse(_up_to(tree, each)), None) for each in alone]


def _up_to(tree: ast.Module, last: ast.Assert) -> ast.Module:
    """Everything before an assertion, and it; earlier ones run for what they change, but cannot fail."""
    body: list[ast.stmt] = []
    for node in tree.body[: tree.body.index(last) + 1]:
        if isinstance(node, ast.Assert) and node is not last:
            handler = ast.ExceptHandler(type=ast.Name("Exception", ast.Load()), name=None, body=[ast.Pass()])
            node = ast.Try(body=[node], handlers=[handler], orelse=[], finalbody=[])
        body.append(node)
    return ast.fix_missing_locations(ast.Module(body=body, type_ignores=[]))


def _entries(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
        return [node.name]
    if isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or node.bases):
        return [f"{node.name}.{name}" for one in node.body for name in _entries(one) if "." not in name]
    return []


def _assertion(code: str, entry: str | None) -> CodeTest:
    payload = json.dumps({"code": code, "entry": entry}).encode("ascii")
    return CodeTest(kind=JobKind.ASSERT, payload=payload)


def _positive(gold: Mapping[str, Any], key: str) -> float | None:
    value = gold.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise BadGold(f"`{key}` is {value!r}, need a number above 0")
    return float(value)


def _read_limits(limits: Any) -> dict[str, float]:
    if limits is None:
        return {}
    if not isinstance(limits, Mapping):
        raise BadGold(f"`limits` is {type(limits).__name__}, need an object")
    known = {"wall_s", "cpu_s", *_MIB_OF.values()}
    if unknown := set(limits) - known:
        raise BadGold(f"`limits` has {min(map(str, unknown))!r}, known are {', '.join(sorted(known))}")
    return {key: value for key in limits if (value := _positive(limits, key)) is not None}
