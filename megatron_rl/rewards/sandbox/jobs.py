"""What goes to the supervisor and what comes back, and how both travel: one length, one JSON head, raw blobs."""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import asdict, dataclass, field
from typing import Any

_HEAD = struct.Struct(">II")  # bytes of the JSON head, bytes of all blobs
_MAX_BYTES = 1 << 30


class Status(enum.Enum):
    """How a run ended. The sandbox's own failure is none of the program's."""

    FINISHED = "finished"  # exit code 0
    RUNTIME_ERROR = "runtime_error"  # any other end of its own
    TIMEOUT = "timeout"  # wall or CPU time
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    SANDBOX_ERROR = "sandbox_error"


class JobKind(enum.Enum):
    STDIN = "stdin"  # payload: bytes on standard input; output: standard output
    CALL = "call"  # payload: one request line for `inside.driver`; output: its reply lines
    ASSERT = "assert"  # payload: test code for `inside.checker`, in a second sandbox; output: what the checker says


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one run. `memory_mib` is address space of each process; all together may hold twice as much."""

    wall_s: float = 4.0
    cpu_s: float = 4.0
    memory_mib: int = 1024
    output_mib: int = 16  # standard output and error together
    tmp_mib: int = 64  # the run's own /tmp
    processes: int = 32  # with threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One program on one test."""

    id: int
    kind: JobKind
    program: bytes
    payload: bytes
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`output` is at most `output_mib`; `detail` is for people and may quote the program's last words."""

    id: int
    status: Status
    output: bytes = b""
    detail: str = ""
    seconds: float = 0.0


def pack_job(job: Job) -> bytes:
    head = {"id": job.id, "kind": job.kind.value, "limits": asdict(job.limits), "program": len(job.program)}
    return pack(head, job.program + job.payload)


def unpack_job(head: dict[str, Any], blob: bytes) -> Job:
    split = head["program"]
    return Job(
        id=head["id"],
        kind=JobKind(head["kind"]),
        program=blob[:split],
        payload=blob[split:],
        limits=Limits(**head["limits"]),
    )


def pack_outcome(outcome: Outcome) -> bytes:
    head = {
        "id": outcome.id,
        "status": outcome.status.value,
        "detail": outcome.detail,
        "seconds": outcome.seconds,
    }
    return pack(head, outcome.output)


def unpack_outcome(head: dict[str, Any], blob: bytes) -> Outcome:
    return Outcome(
        id=head["id"],
        status=Status(head["status"]),
        output=blob,
        detail=head["detail"],
        seconds=head["seconds"],
    )


def pack(head: dict[str, Any], blob: bytes = b"") -> bytes:
    """One message."""
    text = json.dumps(head).encode("ascii")
    return _HEAD.pack(len(text), len(blob)) + text + blob


class Unpacker:
    """Messages out of a stream of bytes, in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Every message that is complete now. Raises ValueError for what is no message."""
        self._buffer += data
        found = []
        while len(self._buffer) >= _HEAD.size:
            head_size, blob_size = _HEAD.unpack_from(self._buffer)
            if head_size + blob_size > _MAX_BYTES:
                raise ValueError(
                    f"message of {head_size + blob_size} bytes, at most {_MAX_BYTES} are allowed"
                )
            end = _HEAD.size + head_size + blob_size
            if len(self._buffer) < end:
                break
            head = json.loads(self._buffer[_HEAD.size : _HEAD.size + head_size])
            found.append((head, bytes(self._buffer[_HEAD.size + head_size : end])))
            del self._buffer[:end]
        return found
