"""One checking process: length-prefixed JSON requests on stdin, answers on stdout; ends when stdin ends.

Started as a program of its own, imports no torch, limits its own memory and CPU time. The parent
(`rewards.pool`) keeps the clock and kills it on overrun.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from typing import IO

from megatron_rl.platform.parent import wake_with_parent

MAX_FRAME_BYTES = 1 << 20
_LOG_FILE_BYTES = 1 << 20
_HEADER = struct.Struct(">I")


def write_frame(stream: IO[bytes], message: dict[str, object]) -> None:
    """One message as 4 bytes of length (big-endian) and that many bytes of ASCII JSON."""
    body = json.dumps(message).encode("ascii")
    stream.write(_HEADER.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> dict[str, object] | None:
    """The next message, or None at the end of the stream."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"worker: frame of {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def frame_length(header: bytes) -> int:
    """Length of the body that follows the 4 header bytes."""
    return int(_HEADER.unpack(header)[0])


def main() -> None:
    """Serve requests `{gold, answer, cpu_s}` with `{verdict, reason}` until stdin ends. Argument: bytes of memory."""
    requests, replies = sys.stdin.buffer, _private_stdout()
    # then it reads the end of its requests
    wake_with_parent()
    _limit(resource.RLIMIT_AS, int(sys.argv[1]))
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, _LOG_FILE_BYTES)
    # imported under the limits; the parent waits for the ready message, not for a fixed time
    from megatron_rl.rewards.symbolic import compare

    write_frame(replies, {"ready": os.getpid()})
    while (request := read_frame(requests)) is not None:
        # a worker whose parent died in the middle of one long C call is ended by the kernel
        _allow_cpu(float(str(request["cpu_s"])))
        try:
            verdict, reason = compare(str(request["gold"]), str(request["answer"]))
        except MemoryError:
            verdict, reason = "error", "out of memory"
        except Exception as error:  # the library under us raises whatever it likes on hostile input
            verdict, reason = "error", f"{type(error).__name__}: {str(error)[:200]}"
        write_frame(replies, {"verdict": verdict, "reason": reason})


def _private_stdout() -> IO[bytes]:
    """The reply pipe under a new descriptor; 1 becomes stderr, so a stray print cannot forge a reply."""
    private = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(private, "wb")


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    ceiling = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (ceiling, hard))


def _allow_cpu(seconds: float) -> None:
    """Let the kernel end this process after so much more CPU time (the default action of SIGXCPU)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + seconds) + 1)


if __name__ == "__main__":
    main()
