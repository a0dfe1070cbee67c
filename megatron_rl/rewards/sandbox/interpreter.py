"""The Python that runs candidates: the system's own, with the files it needs and no others."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import RewardError

USUAL_PLACES = ("/usr/bin/python3", "/usr/local/bin/python3")

_ASK = "import json, sys, sysconfig; print(json.dumps([sys.executable, sysconfig.get_path('stdlib'), sys.version]))"
_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """`binds`: (path here, path inside) of its binary, standard library and shared libraries, all read-only."""

    program: str
    version: str
    binds: tuple[tuple[str, str], ...]


def find_interpreter(wanted: str | None) -> Interpreter:
    """The one asked for, else the first in its usual places. Raises RewardError without one."""
    for path in (wanted,) if wanted else USUAL_PLACES:
        if os.access(path, os.X_OK):
            return _inspect(path)
    tried = wanted or " and ".join(USUAL_PLACES)
    raise RewardError(
        f"sandbox.python: no interpreter at {tried}; candidates run under one that any user may read: install the "
        f"distribution's python3, or set sandbox.python to another outside of private home folders"
    )


def _inspect(path: str) -> Interpreter:
    try:
        # its own answer, without what the environment or a site package would add
        done = subprocess.run(
            [path, "-I", "-S", "-c", _ASK], capture_output=True, timeout=_TIMEOUT_S, check=True, env={}
        )
        executable, library, version = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise RewardError(f"sandbox.python: {path} does not run as a Python interpreter: {error}") from None
    real = os.path.realpath(executable)
    binds = {real: real, os.path.realpath(library): library}
    binds.update({os.path.realpath(found): found for found in _shared_libraries(real, Path(library))})
    return Interpreter(program=real, version=version.split()[0], binds=tuple(sorted(binds.items())))


def _shared_libraries(binary: str, library: Path) -> Iterator[str]:
    """Absolute paths of what the loader maps for the interpreter and its extension modules."""
    modules = sorted(str(path) for path in (library / "lib-dynload").glob("*.so"))
    # it also says "not a dynamic executable" for a static interpreter, which needs none
    try:
        done = subprocess.run(
            ["ldd", binary, *modules], capture_output=True, text=True, timeout=_TIMEOUT_S, env={}, check=False
        )
    except OSError as error:
        raise RewardError(
            f"sandbox: ldd, which says what libraries Python needs, does not run: {error}"
        ) from None
    for line in done.stdout.splitlines():
        for word in line.split():
            # lines that end in a colon name what was asked about
            if word.startswith("/") and not word.endswith(":"):
                yield word
