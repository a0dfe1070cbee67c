"""Inside the sandbox: loads the candidate and answers requests about it, one JSON line each.

Arguments: descriptor of requests, descriptor of replies, path of the program. Nothing here is secret and no
expected value ever comes here: whatever the candidate does to this process, it can only change its own answers.
A function that returns a value and one that forges its record are the same to whoever compares.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types

# not imported at run time: every test would wait for it
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# beside this file inside; the path is left as it was, for the candidate
sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from box_values import Objects  # noqa: E402

sys.path.pop()

# what contest sites put in scope before a solution
_PRELUDE = {
    "typing": "Any Callable Deque DefaultDict Dict FrozenSet Generator Iterable Iterator List Optional Sequence Set "
    "Tuple Union",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "functools": "cache cmp_to_key lru_cache reduce",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle groupby permutations product "
    "zip_longest",
    "math": "ceil comb floor gcd inf sqrt",
}
_MODULES = [
    "bisect",
    "collections",
    "functools",
    "heapq",
    "itertools",
    "math",
    "random",
    "re",
    "string",
    "sys",
]
_MAX_ITEMS = 1_000_000


def load(path: str) -> types.ModuleType:
    """The candidate as a module that is not `__main__`, with the names in scope that its text mentions."""
    with open(path, encoding="utf-8", errors="replace") as stream:
        source = stream.read()
    module = types.ModuleType("solution")
    module.__file__ = path
    sys.modules["solution"] = module
    for name in _MODULES:
        if name + "." in source:
            module.__dict__[name] = __import__(name)
    for origin, names in _PRELUDE.items():
        wanted = [name for name in names.split() if name in source]
        if wanted:
            found = __import__(origin)
            for name in wanted:
                # a module of the same name stays reachable: bisect.bisect
                module.__dict__.setdefault(name, getattr(found, name))
    exec(compile(source, path, "exec"), module.__dict__)
    return module


class Called:
    """A result, and the arguments as the call left them."""

    def __init__(self, result: Any, arguments: list[Any]) -> None:
        self.result, self.arguments = result, arguments


def find(module: types.ModuleType, name: str) -> Any:
    """A function by name: a method of `Solution` first, as contest sites have it, else of the module."""
    solution = module.__dict__.get("Solution")
    name = name.removeprefix("Solution.")
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    target: Any = module
    for part in name.split("."):
        target = getattr(target, part)
    return target


def answer(request: dict[str, Any], module: types.ModuleType, objects: Objects) -> Any:
    """What one request asks for."""
    if "fn" in request:
        return find(module, request["fn"])(*request["args"])
    if "names" in request:
        return [name for name in list(module.__dict__) if not name.startswith("__")]
    if "get" in request:
        return getattr(module, request["get"])
    target = objects.held[request["o"]]
    operation = request["do"]
    arguments = objects.decode(request.get("args", []))
    if operation == "call":
        found = target(*arguments, **objects.decode(request.get("kwargs", {"d": []})))
        # what the call changed in place is part of its result
        return Called(found, arguments)
    if operation == "next":
        return next(target)
    if operation == "attribute":
        return getattr(target, arguments[0])
    if operation == "assign":
        return setattr(target, arguments[0], arguments[1])
    if operation == "item":
        return target[arguments[0]]
    if operation == "length":
        return len(target)
    if operation == "text":
        return str(target)
    if operation == "contains":
        return arguments[0] in target
    if operation == "items":
        items = []
        for item in target:
            items.append(item)
            if len(items) > _MAX_ITEMS:
                raise OverflowError("too many items")
        return items
    raise LookupError(operation)


def main() -> None:
    requests = os.fdopen(int(sys.argv[1]), "rb", buffering=0)
    replies, program = int(sys.argv[2]), sys.argv[3]
    sys.argv = [program]
    # saved before the candidate can put its own in their place
    write, dumps, loads, repeat, failed = os.write, json.dumps, json.loads, builtins.range, BaseException
    objects = Objects()
    module, fault = None, None
    try:
        module = load(program)
    except failed as error:
        fault = error
    for line in requests:
        try:
            if fault is not None:
                raise fault
            found = answer(loads(line), module, objects)  # type: ignore[arg-type]
            reply = {}
            if type(found) is Called:
                reply["a"] = objects.encode(found.arguments)
                found = found.result
            reply["v"] = objects.encode(found)
            text = dumps(reply, allow_nan=False)
        except failed as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            text = dumps({"e": names, "m": str(error)[:500]})
        data = text.encode("ascii") + b"\n"
        for start in repeat(0, len(data), 65536):
            chunk = data[start : start + 65536]
            while chunk:
                chunk = chunk[write(replies, chunk) :]


if __name__ == "__main__":
    main()
