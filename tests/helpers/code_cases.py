# ruff: noqa: E501
"""Programs with the score they deserve: ordinary ones, and ones that try to get what they do not deserve.

Where a program prints `open`, it did what no sandbox lets it do. Only for runs inside one: some end every process
that they may signal. `CANARY_FILE`, `CANARY_DIR` and `PORT` are put in by whoever grades.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SHORT = {"wall_s": 0.8, "cpu_s": 1, "mem_mb": 256}


@dataclass(frozen=True)
class CodeCase:
    name: str
    program: str
    tests: dict[str, Any]
    score: float
    limits: dict[str, float] = field(default_factory=lambda: {"wall_s": 10, "cpu_s": 8})


def prints(
    name: str, program: str, output: str, *, stdin: str = "", score: float = 1.0, **more: Any
) -> CodeCase:
    return CodeCase(name, program, {"inputs": [stdin], "outputs": [output]}, score, **more)


def returns(
    name: str, program: str, argument: Any, result: Any, *, score: float = 1.0, **more: Any
) -> CodeCase:
    tests = {"inputs": [[argument]], "outputs": [result], "fn_name": "f"}
    return CodeCase(name, program, tests, score, **more)


def asserts(name: str, program: str, tests: Any, *, score: float = 1.0, **more: Any) -> CodeCase:
    return CodeCase(name, program, {"functional": tests}, score, **more)


def blocked(name: str, attempt: str) -> CodeCase:
    """`attempt` sets `got` to something true if it succeeds, or raises."""
    body = "\n".join("    " + line for line in attempt.splitlines())
    program = f"got = None\ntry:\n{body}\nexcept (OSError, MemoryError, ValueError):\n    pass\n"
    return prints(name, program + "print('open' if got else 'blocked')", "blocked\n")


def libc(call: str) -> str:
    return f"import ctypes\ngot = ctypes.CDLL(None, use_errno=True).{call} >= 0"


STDIN = [
    prints("builtin exit", "print(int(input()) + 1)\nexit()", "5\n", stdin="4\n"),
    prints("sys.exit", "import sys\nprint(1)\nsys.exit()", "1\n"),
    prints("exit code 3", "print(1)\nraise SystemExit(3)", "1\n", score=0),
    prints("exit with text", "print(1)\nquit('bye')", "1\n", score=0),
    prints("until the end of input", "n = 0\ntry:\n    while True:\n        n += int(input())\nexcept EOFError:\n    print(n)", "6\n", stdin="1\n2\n3"),
    prints("standard input by name", "print(sum(map(int, open('/dev/stdin'))))", "3\n", stdin="1\n2\n"),
    prints("standard input by descriptor", "import os\nprint(os.read(0, 99).decode().upper())", "AB\n", stdin="ab"),
    prints("deep recursion", "import sys\nsys.setrecursionlimit(10**6)\nf = lambda n: n and 1 + f(n - 1)\nprint(f(50000))", "50000\n"),
    prints("endless recursion", "def f():\n    f()\nf()", "1\n", score=0),
    prints("a number of 6000 digits", "print(len(str(10**6000)))", "6001\n"),
    prints("text beyond ASCII", "print(input()[::-1])", "éñ☃\n", stdin="☃ñé\n"),
    prints("the library", "import heapq, bisect, decimal, fractions, itertools, re, string, statistics, datetime, json, random, copy, operator, functools, array, calendar, hashlib, typing, enum, dataclasses\nprint(heapq.nsmallest(1, [3, 1])[0])", "1\n"),
    prints("threads", "import threading\nt = [threading.Thread(target=print, args=(7,)) for _ in range(4)]\n[x.start() for x in t]\n[x.join() for x in t]", "7\n7\n7\n7\n"),
    prints("an event loop", "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    print(2)\nasyncio.run(f())", "2\n"),
    prints("a scratch file", "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n    f.write('x' * 9)\n    f.seek(0)\n    print(len(f.read()))", "9\n"),
    prints("the same hash in every run", "print(hash('a') == hash('a'), {'x', 'y', 'z', 'w'} == {'w', 'z', 'y', 'x'})", "True True\n"),
    prints("a child that outlives its parent", "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nprint(3)", "3\n"),
    prints("a daemon of its own session", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork():\n        os._exit(0)\n    time.sleep(60)\nos.wait()\nprint(3)", "3\n"),
    prints("much on standard error", "import sys\nsys.stderr.write('x' * 300000)\nprint(3)", "3\n"),
    prints("error after the right output", "print(3, flush=True)\n1 / 0", "3\n", score=0),
    prints("no program text", "", "\n"),
    prints("syntax error", "print(3", "3\n", score=0),
    prints("a lone surrogate", "print(3) # \ud800", "3\n", score=0),
    CodeCase("two of three", "print(int(input()) ** 2)", {"inputs": ["1", "2", "3"], "outputs": ["1", "4", "8"]}, 2 / 3),
    CodeCase(
        "a state file does not survive", "open('s', 'a').write('x')\nprint(open('s').read())",
        {"inputs": ["", "", ""], "outputs": ["x\n"] * 3}, 1.0,
    ),
    CodeCase("no tests", "print(1)", {"inputs": [], "outputs": []}, 0.0),
]  # fmt: skip

CALLS = [
    returns("annotations without imports", "class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n        return max(x)", [1, 5], 5),
    returns("names of contest sites", "def f(x):\n    return [gcd(12, x), Counter('aab')['a'], heapq.nlargest(1, [1, 2])[0], inf > 1]", 8, [4, 2, 2, True]),
    returns("a main guard", "def f(x):\n    return x\nif __name__ == '__main__':\n    print(f(int(input())))", 3, 3),
    returns("a data class", "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x):\n    return P(x).x", 3, 3),
    returns("a cached function", "@lru_cache(None)\ndef f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)", 80, 23416728348467685),
    returns("printing beside the result", "def f(x):\n    print('x' * 100000)\n    return x", 1, 1),
    returns("a named tuple", "from collections import namedtuple\nP = namedtuple('P', 'a b')\ndef f(x):\n    return P(x, [P(1, 2)])", 0, [0, [[1, 2]]]),
    returns("keys that are numbers", "def f(x):\n    return {x: 1}", 7, {"7": 1}),
    returns("a long result", "def f(n):\n    return list(range(n))", 100000, list(range(100000))),
    returns("2.0 for 2", "def f(x):\n    return x / 2", 4, 2),
    returns("true for 1", "def f(x):\n    return True", 0, 1, score=0),
    returns("1 for true", "def f(x):\n    return 1", 0, True, score=0),
    returns("text for a number", "def f(x):\n    return '5'", 0, 5, score=0),
    returns("a set", "def f(x):\n    return {1}", 0, [1], score=0),
    returns("a generator", "def f(x):\n    yield 1", 0, [1], score=0),
    returns("not a number", "def f(x):\n    return float('nan')", 0, None, score=0),
    returns("nothing where nothing is right", "def f(x):\n    pass", 0, None),
    returns("an exception where nothing is right", "def f(x):\n    raise KeyError(x)", 0, None, score=0),
    returns("another name", "def g(x):\n    return x", 0, 0, score=0),
    returns("exit in the function", "def f(x):\n    import sys\n    sys.exit(0)", 0, None, score=0),
    returns("exit without a record", "import os\ndef f(x):\n    os._exit(0)", 0, None, score=0),
    returns("exit on load", "import os\nos._exit(0)", 0, None, score=0),
    returns("a cycle", "def f(x):\n    a = []\n    a.append(a)\n    return a", 0, [], score=0),
    returns("an int equal to all", "class A(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n    __repr__ = lambda s: '5'\ndef f(x):\n    return A(0)", 0, 5, score=0),
    returns("a text equal to all", "class A(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n    __str__ = lambda s: 'yes'\ndef f(x):\n    return A('no')", 0, "yes", score=0),
    returns("a list of another length", "class A(list):\n    __iter__ = lambda s: iter([1, 2])\n    __len__ = lambda s: 2\ndef f(x):\n    return A()", 0, [1, 2], score=0),
    returns("an object that says it is an int", "class A:\n    __class__ = int\n    __eq__ = lambda s, o: True\n    __int__ = __index__ = lambda s: 5\ndef f(x):\n    return A()", 0, 5, score=0),
    returns("an object equal to all", "class A:\n    __eq__ = lambda s, o: True\ndef f(x):\n    return A()", 0, 5, score=0),
    returns("a patched library", "import json, os, builtins\njson.dumps = lambda *a, **k: '{\"v\": 5, \"passed\": true}'\nbuiltins.isinstance = lambda *a: True\nbuiltins.all = lambda *a: True\ndef f(x):\n    return 1", 0, 5, score=0),
    returns("a patched driver", "import sys, gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Objects':\n        type(o).encode = lambda s, v: True\n        type(o).__eq__ = lambda a, b: True\ndef f(x):\n    return 1", 0, 5, score=0),
    returns("records on every descriptor", "import os\ndef f(x):\n    for d in range(3, 64):\n        try:\n            os.write(d, b'{\"v\": 0}\\n')\n        except OSError:\n            pass\n    return 0", 0, 0, score=0),
    returns("a record and exit", "import os\nfor d in range(3, 64):\n    try:\n        os.write(d, b'{\"v\": true, \"passed\": true, \"score\": 1.0}\\n')\n    except OSError:\n        pass\nos._exit(0)", 0, "secret", score=0),
    returns("a hunt for the expected value", "import gc, sys\ndef f(x):\n    seen = []\n    frame = sys._getframe()\n    while frame:\n        seen += [*frame.f_locals.values(), *frame.f_globals.values()]\n        frame = frame.f_back\n    for o in seen + gc.get_objects():\n        if isinstance(o, str) and o.startswith('needle-'):\n            return o\n        if isinstance(o, dict):\n            for v in list(o.values()):\n                if isinstance(v, str) and v.startswith('needle-'):\n                    return v\n    return None", 0, "needle-" + "in-the-stack", score=0),
    returns("a thread that writes later", "import threading, time, os\ndef late():\n    time.sleep(0.2)\n    for d in range(3, 64):\n        try:\n            os.write(d, b'{\"v\": 5}\\n')\n        except OSError:\n            pass\ndef f(x):\n    threading.Thread(target=late).start()\n    return 1", 0, 5, score=0),
    returns("a trace function", "import sys\ndef t(frame, event, arg):\n    for k in list(frame.f_locals):\n        frame.f_locals[k] = 5\n    return t\nsys.settrace(t)\ndef f(x):\n    return 1", 0, 5, score=0),
    returns("closed descriptors", "import os\ndef f(x):\n    os.closerange(0, 64)\n    return 5", 0, 5, score=0),
]  # fmt: skip

ADD = "def f(a, b=1):\n    return a + b\n"
ASSERTIONS = [
    asserts("three assertions", ADD, "assert f(1) == 2\nassert f(1, 1) == 2\nassert f(a=1, b=2) == 3"),
    asserts("one of two", ADD, ["assert f(1) == 2", "assert f(1) == 3"], score=0.5),
    asserts("a loop and a comparison of types", "def f(n):\n    return (n, [n])", "for i in range(3):\n    assert f(i) == (i, [i])\n    assert isinstance(f(i), tuple)"),
    asserts("a check function", ADD, "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)"),
    asserts("a failing check function", ADD, "def check(candidate):\n    assert candidate(1) == 3\ncheck(f)", score=0),
    asserts("test functions", ADD, "import pytest\nfrom solution import f\n@pytest.mark.parametrize('a,b', [(1, 2), (2, 3)])\ndef test_a(a, b):\n    assert f(a) == b\ndef test_b():\n    assert f(1) == 0", score=0.5),
    asserts("expected exceptions", "class Odd(ValueError):\n    pass\ndef f(x):\n    raise Odd('no')", "import pytest\nfrom solution import Odd\ndef test_a():\n    with pytest.raises(ValueError, match='no'):\n        f(1)\ndef test_b():\n    with pytest.raises(Odd):\n        f(1)\ndef test_c():\n    with pytest.raises(KeyError):\n        f(1)", score=2 / 3),
    asserts("nearly equal", "def f(x):\n    return [x / 3]", "import pytest\ndef test_a():\n    assert f(1) == pytest.approx([0.3333333333])"),
    asserts("a unit test case", ADD, "import unittest\nclass TestF(unittest.TestCase):\n    def setUp(self):\n        self.x = 1\n    def test_a(self):\n        self.assertEqual(f(self.x), 2)\n    def test_b(self):\n        self.assertEqual(f(self.x), 3)", score=0.5),
    asserts("an object with state", "class S:\n    def __init__(self):\n        self.x = []\n    def push(self, v):\n        self.x.append(v)\n    def pop(self):\n        return self.x.pop()\n    def __len__(self):\n        return len(self.x)", "s = S()\ns.push(3)\ns.push(4)\nassert s.pop() == 4\nassert len(s) == 1"),
    asserts("an argument changed in place", "def f(x):\n    x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]"),
    asserts("a generator", "def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
    asserts("an object equal to all", "class A:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\ndef f(x):\n    return A()", "assert f(1) == 5", score=0),
    asserts("an int equal to all", "class A(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef f(x):\n    return A(1)", "assert f(1) == 5", score=0),
    asserts("exit before the assertions", "import os\nos._exit(0)", "assert True\nassert f(1) == 5", score=0),
    asserts("exit within", "def f(x):\n    raise SystemExit(0)", "assert f(1) == 5", score=0),
    asserts("patched assertion and equality", "import builtins, unittest, sys\nbuiltins.AssertionError = type('E', (Exception,), {'__init__': lambda s, *a: sys.exit(0)})\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(x):\n    return 1", "assert f(1) == 5", score=0),
    asserts("claims on every descriptor", "import os\nfor d in range(1, 64):\n    try:\n        os.write(d, b'{\"passed\": true}\\n')\n    except OSError:\n        pass\ndef f(x):\n    return 1", "assert f(1) == 5", score=0),
    asserts("no such function", "def g(x):\n    return 5", "assert f(1) == 5", score=0),
    asserts("an endless call", "def f(x):\n    while True:\n        pass", "assert f(1) == 5", score=0, limits=SHORT),
    asserts("the end of all it can signal", "import os\nos.kill(-1, 9)\ndef f(x):\n    return 5", "assert f(1) == 6", score=0),
]  # fmt: skip

ENDS = [
    prints("nothing but exit", "import os\nos._exit(0)", "1\n", score=0),
    prints("the right output and exit", "import os\nprint(1, flush=True)\nos._exit(0)", "1\n"),
    prints("killed by itself", "import os\nprint(1, flush=True)\nos.kill(os.getpid(), 9)", "1\n", score=0),
    prints("stopped", "import os, signal\nprint(1, flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)", "1\n", score=0, limits=SHORT),
    prints("kill(-1)", "import os\nprint(1, flush=True)\nos.kill(-1, 9)", "1\n", score=0),
    prints("its group killed", "import os\nprint(1, flush=True)\nos.killpg(0, 9)", "1\n", score=0),
    prints("its parent killed", "import os\nos.kill(os.getppid(), 9)\nprint(1)", "1\n"),
    prints("an endless loop", "while True:\n    pass", "1\n", score=0, limits=SHORT),
    prints("a loop deaf to signals", "import signal\nfor n in range(1, 32):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n    except OSError:\n        pass\nwhile True:\n    pass", "1\n", score=0, limits=SHORT),
    prints("sleep", "import time\ntime.sleep(99)", "1\n", score=0, limits=SHORT),
    prints("a segmentation fault", "import ctypes\nctypes.string_at(0)", "1\n", score=0),
    prints("descriptors closed, and on", "import os, time\nprint(1, flush=True)\nos.closerange(0, 99)\ntime.sleep(99)", "1\n", score=0, limits=SHORT),
    prints("a fork bomb", "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", "1\n", score=0, limits=SHORT),
    prints("daemons that multiply", "import os, time\nfor _ in range(200):\n    try:\n        if os.fork() == 0:\n            os.setsid()\n    except OSError:\n        time.sleep(0.01)\nprint(1)", "2\n", score=0, limits=SHORT),
]  # fmt: skip

LIMITS = [
    prints("memory in pieces", "x = []\nwhile True:\n    x.append(bytearray(10**7))", "1\n", score=0, limits={**SHORT, "wall_s": 5}),
    prints("memory at once", "try:\n    bytearray(4 * 10**9)\nexcept MemoryError:\n    print('limited')", "limited\n"),
    prints("memory of many processes", "import os, time\nfor _ in range(12):\n    if os.fork() == 0:\n        x = bytearray(10**8)\n        time.sleep(9)\n        os._exit(0)\ntime.sleep(3)\nprint(1)", "1\n", score=0, limits={"wall_s": 5, "cpu_s": 5, "mem_mb": 200}),
    prints("a file in /tmp", "try:\n    with open('/tmp/x', 'wb') as f:\n        for _ in range(300):\n            f.write(bytes(10**6))\n    print('free')\nexcept OSError:\n    print('limited')", "limited\n"),
    prints("many files in /tmp", "try:\n    for i in range(20):\n        with open(f'/tmp/{i}', 'wb') as f:\n            f.write(bytes(10**7))\n    print('free')\nexcept OSError:\n    print('limited')", "limited\n"),
    prints("a hole of 10 GB", "try:\n    open('/tmp/x', 'wb').truncate(10**10)\n    print('free')\nexcept OSError:\n    print('limited')", "limited\n"),
    prints("shared memory", "try:\n    with open('/dev/shm/x', 'wb') as f:\n        f.write(bytes(10**8))\n    print('free')\nexcept OSError:\n    print('limited')", "limited\n"),
    prints("processes", "import os, time\nn = 0\ntry:\n    while n < 200:\n        if os.fork() == 0:\n            time.sleep(9)\n            os._exit(0)\n        n += 1\nexcept OSError:\n    pass\nprint('limited' if n < 40 else n)", "limited\n"),
    prints("threads without end", "import threading, time\nn = 0\ntry:\n    while n < 200:\n        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n        n += 1\nexcept RuntimeError:\n    pass\nprint('limited' if n < 40 else n)", "limited\n"),
    prints("open files", "n = []\ntry:\n    while len(n) < 1000:\n        n.append(open('/dev/null'))\nexcept OSError:\n    pass\nprint('limited' if len(n) < 100 else 'free')", "limited\n"),
    prints("output without end", "while True:\n    print('x' * 1000)", "x\n", score=0, limits={"wall_s": 9, "cpu_s": 9}),
    prints("errors without end", "import sys\nwhile True:\n    sys.stderr.write('x' * 1000)", "x\n", score=0, limits={"wall_s": 9, "cpu_s": 9}),
    prints("its limits raised", "import resource as r\ntry:\n    r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY,) * 2)\n    print('open')\nexcept (ValueError, OSError):\n    print('blocked')", "blocked\n"),
]  # fmt: skip

ACCESS = [
    blocked("the password file", "got = open('/etc/passwd').read()"),
    blocked("a file of the host", "got = open('CANARY_FILE').read()"),
    blocked("a file of the host by way of a link", "import os\nos.symlink('CANARY_FILE', '/tmp/l')\ngot = open('/tmp/l').read()"),
    blocked("a folder of the host", "got = open('CANARY_DIR/made', 'w')"),
    blocked("a folder of the host by way of a link", "import os\nos.symlink('CANARY_DIR', '/tmp/d')\ngot = open('/tmp/d/made', 'w')"),
    blocked("what lies above the root", "import os\ngot = [n for n in os.listdir('/../..') if n not in ('box', 'dev', 'lib', 'lib64', 'tmp', 'usr')]"),
    blocked("the processes of the host", "import os\ngot = os.listdir('/proc')"),
    blocked("a new file in the root", "got = open('/x', 'w')"),
    blocked("a new file in the library", "import os\ngot = open(os.path.dirname(os.__file__) + '/x.py', 'w')"),
    blocked("its own program", "got = open('/box/program.py', 'w')"),
    blocked("a new file among the devices", "got = open('/dev/x', 'w')"),
    blocked("devices beyond the harmless ones", "import os\ngot = set(os.listdir('/dev')) - {'null', 'zero', 'random', 'urandom', 'shm', 'stdin'}"),
    blocked("a device node", "import os\ngot = os.mknod('/tmp/n', 0o60666, os.makedev(7, 0)) or True"),
    blocked("a TCP connection", "import socket\ngot = socket.create_connection(('127.0.0.1', PORT), 1)"),
    blocked("a TCP connection without the library", libc("socket(2, 1, 0)")),
    blocked("a datagram", "import socket\ngot = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"),
    blocked("a local socket", "import socket\ngot = socket.socket(socket.AF_UNIX)"),
    blocked("a netlink socket", libc("socket(16, 3, 0)")),
    blocked("a name on the network", "import socket\ngot = socket.getaddrinfo('example.com', 80)"),
    blocked("the environment of the grader", "import os\ngot = [k for k in os.environ if k not in 'PATH HOME LANG PWD PYTHONUTF8 PYTHONHASHSEED PYTHONINTMAXSTRDIGITS MALLOC_ARENA_MAX LC_CTYPE'.split()]"),
    blocked("root", "import os\ngot = os.getuid() == 0 or os.setuid(0) or True"),
    blocked("another group", "import os\ngot = os.getgid() == 0 or os.setgroups([0]) or True"),
    blocked("namespaces of its own", libc("unshare(0x10000000)")),
    blocked("namespaces by clone", libc("syscall(56, 0x10000011, 0, 0, 0, 0)")),
    blocked("a mount", libc("mount(b'none', b'/tmp', b'tmpfs', 0, 0)")),
    blocked("an unmount", libc("umount2(b'/tmp', 2)")),
    blocked("another root", libc("chroot(b'/tmp')")),
    blocked("tracing", libc("ptrace(16, 1, 0, 0)")),
    blocked("memory of another process", libc("process_vm_readv(1, 0, 0, 0, 0, 0)")),
    blocked("a file in memory alone", libc("memfd_create(b'x', 0)")),
    blocked("memory between processes", libc("shmget(0, 1000000, 0o1600)")),
    blocked("keys of the kernel", libc("syscall(250, 0, -3, 1)")),
    blocked("rings", libc("syscall(425, 4, 0)")),
    blocked("programs for the kernel", libc("syscall(321, 0, 0, 0)")),
    blocked("a signal to a process of the host", "import os\nfor pid in range(3, 3000):\n    try:\n        os.kill(pid, 0)\n        got = got or pid != os.getpid()\n    except OSError:\n        pass"),
    blocked("a shell", "import subprocess\ngot = subprocess.run(['/bin/sh', '-c', 'echo x'], capture_output=True).stdout"),
    blocked("a higher priority", "import os\ngot = os.nice(-5) or True"),
]  # fmt: skip

CASES = [*STDIN, *CALLS, *ASSERTIONS, *ENDS, *LIMITS, *ACCESS]
