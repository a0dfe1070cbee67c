"""C++ and CUDA implementations: built on demand from kernels/csrc, kept in a cache, loaded through ctypes.

No torch headers are involved: an op passes addresses and the stream. A library is named by what it was made from
(sources, command, compiler, and for `host` the processor), so a change of any of them builds a new one.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SOURCES = Path(__file__).resolve().parents[1] / "csrc"
_TIMEOUT_S = 900

_HOST_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp-simd",
    # neither changes a result: no errno, no floating-point exceptions. With them selections become vector code.
    # Not -ffast-math: infinities, NaN and the order of sums mean what they say.
    "-fno-math-errno",
    "-fno-trapping-math",
    # one rounding more or less would depend on where in a loop a token stands
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
)
_CUDA_FLAGS = ("-std=c++17", "-O3", "-Xptxas", "-v", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static")


class BuildError(RuntimeError):
    """A library could not be built: no compiler, no sources, or the compiler's own words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """A built library, and what the compiler said about it (registers and spills, for CUDA)."""

    path: Path
    log: str


def default_cache() -> Path:
    """~/.cache/megatron_rl_kernels; only its owner should be able to write it, as code is loaded from there."""
    return Path.home() / ".cache" / "megatron_rl_kernels"


def build_host(*, cache: Path | None = None, compiler: str | None = None) -> Library:
    """The bodies for this machine's processor, with g++ or clang++. Raises BuildError."""
    found = _compiler(compiler, ("g++", "clang++"), "impl = 'host' needs a C++ compiler")
    return _build(SOURCES / "host.cpp", [found, *_HOST_FLAGS], salt=_processor(), cache=cache)


def build_cuda(arch: str, *, cache: Path | None = None, compiler: str | None = None) -> Library:
    """CUDA kernels for one architecture, such as `sm_90a`; needs nvcc, no device. Raises BuildError."""
    found = _compiler(
        compiler, ("nvcc", "/usr/local/cuda/bin/nvcc"), "impl = 'cuda' needs nvcc (CUDA toolkit)"
    )
    number = arch.removeprefix("sm_")
    code = f"-gencode=arch=compute_{number},code={arch}"
    return _build(SOURCES / "device.cu", [found, *_CUDA_FLAGS, code], salt="", cache=cache)


@functools.cache
def library_for(device: torch.device) -> ctypes.CDLL:
    """The library that runs on `device`, built at its first use. Raises BuildError."""
    if device.type == "cpu":
        return ctypes.CDLL(str(build_host().path))
    return ctypes.CDLL(str(build_cuda(_arch(*torch.cuda.get_device_capability(device))).path))


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where a tensor starts; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def call(library: ctypes.CDLL, name: str, device: torch.device, *arguments: object) -> None:
    """Run function `name` on the current stream of `device`. Raises RuntimeError with CUDA's words if it fails."""
    function = getattr(library, name)
    function.restype = ctypes.c_int
    if device.type == "cpu":
        code = function(*arguments, None)
    else:
        with torch.cuda.device(device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
            code = function(*arguments, stream)
    if code:
        library.mrl_error_text.restype = ctypes.c_char_p
        raise RuntimeError(f"{name}: CUDA error {code}: {library.mrl_error_text(code).decode()}")


def _arch(major: int, minor: int) -> str:
    # `a`: with the instructions that only this architecture has
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def _compiler(given: str | None, names: tuple[str, ...], needs: str) -> str:
    for name in (given,) if given else names:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(
        f"{needs}, and none of {', '.join((given,) if given else names)} was found; install one, or use "
        "impl = 'portable' or 'triton'"
    )


def _build(source: Path, command: list[str], *, salt: str, cache: Path | None) -> Library:
    cache = cache or default_cache()
    if not source.is_file():
        raise BuildError(
            f"{source} does not exist: C++ sources come with a checkout (pip install -e .), not with a wheel"
        )
    path = cache / f"{source.stem}-{_fingerprint(source, command, salt)}.so"
    log = path.with_suffix(".log")
    if not path.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (cache / f"{source.stem}.lock").open("w") as lock:
                # one process builds, the others find what it built
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _compile(source, command, path, log)
        except OSError as error:
            raise BuildError(f"cannot build {source.name} in {cache}: {error}") from error
    return Library(path=path, log=log.read_text() if log.exists() else "")


def _compile(source: Path, command: list[str], path: Path, log: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as room:
        out = Path(room) / path.name
        full = [*command, str(source), "-o", str(out)]
        try:
            done = subprocess.run(
                full,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{' '.join(full)} was not done after {_TIMEOUT_S} s") from error
        if done.returncode != 0 or not out.exists():
            raise BuildError(f"{' '.join(full)} failed with exit code {done.returncode}:\n{done.stdout}")
        log.write_text(done.stdout)
        # whole or not at all: another process may load it the moment it has its name
        os.replace(out, path)


def _fingerprint(source: Path, command: list[str], salt: str) -> str:
    digest = hashlib.sha256()
    for file in sorted([*SOURCES.glob("*.h"), source]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update("\0".join([*command, _version(command[0]), salt]).encode())
    return digest.hexdigest()[:24]


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=60, check=False
    ).stdout


@functools.cache
def _processor() -> str:
    """What -march=native looks at: a cache may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = {line for line in lines if line.startswith(("flags", "model name", "Features"))}
    return platform.machine() + "".join(sorted(kinds))
