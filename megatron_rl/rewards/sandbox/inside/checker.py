"""Inside a sandbox of its own: runs test code, to which the candidate is a stranger behind a pipe.

Arguments: descriptor of the record, of requests to the candidate, of its replies, path of the tests. The names that
tests use and do not define are asked for; what comes back is data, rebuilt here as plain Python values, or a
proxy for what is no data. So nothing the candidate overrides takes part in a comparison.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import sys
import types

# not imported at run time: every test would wait for it
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from box_values import Objects  # noqa: E402


class Unsupported(Exception):
    """Test code that asks for more than this checker knows: the tests' fault, not the candidate's."""


class Remote(Objects):
    """The candidate: one request line, one reply line."""

    def __init__(self, requests: int, replies: int) -> None:
        super().__init__()
        self._requests = os.fdopen(requests, "wb", buffering=0)
        self._replies = os.fdopen(replies, "rb")

    def encode(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            return {"o": object.__getattribute__(value, "number")}
        if callable(value) or isinstance(value, types.GeneratorType):
            raise Unsupported(f"an argument of type {type(value).__name__}")
        return super().encode(value)

    def decode(self, value: Any) -> Any:
        if isinstance(value, dict) and "o" in value:
            return Proxy(self, value["o"], value.get("n", ""))
        return super().decode(value)

    def ask(self, request: dict[str, Any], arguments: tuple[Any, ...] = ()) -> Any:
        """The value that comes back; raises what the candidate raised, under the same name."""
        self._requests.write(json.dumps(request).encode("ascii") + b"\n")
        line = self._replies.readline()
        if not line:
            raise RuntimeError("the candidate is gone")
        reply = json.loads(line)
        if "e" in reply:
            raise rebuild_error(reply["e"], reply["m"])
        for before, after in zip(arguments, reply.get("a", ())):  # noqa: B905  # also for Python 3.9
            refill(before, self.decode(after))
        return self.decode(reply["v"])

    def do(self, number: int, operation: str, *arguments: Any, **keywords: Any) -> Any:
        request = {"o": number, "do": operation, "args": self.encode(list(arguments))}
        if keywords:
            request["kwargs"] = self.encode(keywords)
        return self.ask(request, arguments)


class Proxy:
    """Something of the candidate's that is no data. Equal to itself alone: its own `==` is not asked."""

    def __init__(self, remote: Remote, number: int, name: str) -> None:
        object.__setattr__(self, "do", lambda *a, **k: remote.do(number, *a, **k))
        object.__setattr__(self, "number", number)
        object.__setattr__(self, "type_name", name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.do("call", *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return self.do("attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.do("assign", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.do("item", key)

    def __len__(self) -> int:
        length = self.do("length")
        if type(length) is not int:
            raise TypeError("a length that is no number")
        return length

    def __bool__(self) -> bool:
        return True

    def __contains__(self, item: Any) -> bool:
        return self.do("contains", item) is True

    def __iter__(self) -> Any:
        items = self.do("items")
        return iter(items if isinstance(items, list) else [])

    def __next__(self) -> Any:
        return self.do("next")

    def __str__(self) -> str:
        text = self.do("text")
        return text if isinstance(text, str) else ""


def rebuild_error(names: list[str], message: str) -> Exception:
    """An exception of the same name, under the nearest built-in one that tests may expect."""
    for name in names:
        known = getattr(builtins, str(name), None)
        if isinstance(known, type) and issubclass(known, Exception):
            error: Exception = known() if known is not UnicodeDecodeError else RuntimeError()
            if name != names[0]:
                try:
                    error = type(str(names[0]), (known,), {})()
                except TypeError:
                    error = RuntimeError()
            error.args = (str(message),)
            error.names = [str(one) for one in names]  # type: ignore[attr-defined]
            return error
    return RuntimeError(f"{names[:1]}: {message}")


def refill(before: Any, after: Any) -> None:
    """Make an argument what the call made of the candidate's copy of it."""
    if type(before) is list and type(after) is list:
        before[:] = after
    elif type(before) in (dict, set) and type(after) is type(before):
        before.clear()
        before.update(after)


class Raises:
    """`pytest.raises` and the little of it that tests of functions use."""

    def __init__(self, expected: Any, *call: Any, match: str | None = None) -> None:
        self._expected, self._match = expected if isinstance(expected, tuple) else (expected,), match
        self.value: Any = None
        self.type: Any = None
        if call:
            with self:
                call[0](*call[1:])

    def __enter__(self) -> Raises:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if error is None:
            raise AssertionError("did not raise")
        names = getattr(error, "names", [])
        is_expected = any(
            one.__name__ in names if isinstance(one, Proxy) else isinstance(error, one)
            for one in self._expected
        )
        if is_expected and (self._match is None or re.search(self._match, str(error))):
            self.value, self.type = error, kind
            return True
        return False


class Approx:
    """`pytest.approx` for numbers and for lists, tuples and dicts of them."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self._expected, self._rel = expected, 1e-6 if rel is None and abs is None else rel or 0.0
        self._abs = 1e-12 if abs is None else abs

    def __eq__(self, other: Any) -> bool:
        return self._near(other, self._expected)

    def _near(self, got: Any, want: Any) -> bool:
        if isinstance(want, list | tuple):
            return isinstance(got, list | tuple) and len(got) == len(want) and all(map(self._near, got, want))
        if isinstance(want, dict):
            return (
                isinstance(got, dict)
                and got.keys() == want.keys()
                and all(self._near(got[k], want[k]) for k in want)
            )
        if isinstance(got, bool | int | float | complex) and isinstance(want, bool | int | float | complex):
            return got == want or builtins.abs(got - want) <= max(self._abs, self._rel * builtins.abs(want))
        return bool(type(got) is type(want) and got == want)


class Mark:
    """`pytest.mark`: parametrize counts, other marks change nothing."""

    def __getattr__(self, name: str) -> Any:
        if name == "parametrize":
            return self._parametrize
        return lambda *given, **_: (
            given[0] if len(given) == 1 and isinstance(given[0], types.FunctionType) else lambda found: found
        )

    @staticmethod
    def _parametrize(names: Any, values: Any, **_: Any) -> Any:
        keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(keys, row if len(keys) > 1 else (row,))) for row in values]  # noqa: B905

        def decorate(function: Any) -> Any:
            function.rows = [{**old, **row} for old in getattr(function, "rows", [{}]) for row in rows]
            return function

        return decorate


def pytest_module() -> types.ModuleType:
    module = types.ModuleType("pytest")
    module.__dict__.update(raises=Raises, approx=Approx, mark=Mark(), param=lambda *values, **_: values)
    return module


class CandidateModules:
    """Imports that find nothing else find the candidate: `from solution import f`, whatever it is called."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self) if "." not in name else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        module = types.ModuleType(spec.name)
        module.__dict__["__all__"] = [str(name) for name in self._remote.ask({"names": 1}) if name[:1] != "_"]
        module.__dict__["__getattr__"] = self._get
        return module

    def exec_module(self, module: Any) -> None:
        """It is complete."""

    def _get(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._remote.ask({"get": name})
        except Exception as error:
            raise AttributeError(str(error)) from None


def names_wanted(tree: ast.Module) -> set[str]:
    """Names that the tests read and that Python does not have."""
    read = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return {name for name in read if not hasattr(builtins, name)}


def parameters(function: Any) -> list[str]:
    """Names that a test function takes and has no default for, without `self`."""
    code, bound = function.__code__, isinstance(function, types.MethodType)
    names = list(code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())])
    return names[bound:] + [one for one in code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]]


def run_entry(scope: dict[str, Any], entry: str) -> None:
    """One test function, or one method of a test class, with all its parameter sets."""
    owner, _, name = entry.rpartition(".")
    if not owner:
        function = scope[name]
    else:
        kind = scope[owner]
        if hasattr(kind, "debug"):
            kind(name).debug()
            return
        case = kind()
        if hasattr(case, "setup_method"):
            case.setup_method()
        function = getattr(case, name)
    for row in getattr(function, "rows", [{}]):
        missing = [one for one in parameters(function) if one not in row]
        if missing:
            raise Unsupported(f"fixture {missing[0]}")
        function(**row)


def check(remote: Remote, code: str, entry: str | None) -> None:
    """Raises whatever says that the candidate did not pass, Unsupported where the tests cannot be run."""
    tree = ast.parse(code)
    sys.modules["pytest"] = pytest_module()
    sys.meta_path.append(CandidateModules(remote))
    scope: dict[str, Any] = {"__name__": "tests"}
    names = set(remote.ask({"names": 1}))
    for name in sorted(names_wanted(tree) & names):
        scope[name] = remote.ask({"get": name})
    exec(compile(tree, "tests", "exec"), scope)
    if entry is not None:
        run_entry(scope, entry)


def main() -> None:
    record, requests, replies, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    with open(path, encoding="utf-8") as stream:
        tests = json.load(stream)
    try:
        check(Remote(requests, replies), tests["code"], tests["entry"])
        said: dict[str, Any] = {"passed": True}
    except Unsupported as fault:
        said = {"broken": str(fault)}
    except BaseException as error:
        said = {"failed": f"{type(error).__name__}: {error}"[:200]}
    os.write(record, json.dumps(said).encode("ascii"))


if __name__ == "__main__":
    main()
