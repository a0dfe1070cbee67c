"""Members of one node in processes of their own: the receiver maps the sender's buffers.

On a CPU a buffer is an anonymous file in memory, whose descriptor travels over the line: no name in /dev/shm
that somebody would have to remove. On a GPU it is device memory, opened in the other process through CUDA
IPC. Lines are Unix sockets in the abstract namespace, which leave no file either.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from io import FileIO
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.transports.base import Membership, first_line
from megatron_rl.reshard.transports.handoff import HandoffTransport, Memory, Note

_MAX_NOTE_BYTES = 65536
_HELLO = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class SharedTransport(HandoffTransport):
    """Lines from this member to `receivers` and from `senders`; building it waits for each of them.

    `memory` is `FileMemory` or `CudaMemory`. Raises ReshardError naming the member that did not come.
    """

    def __init__(
        self, member: Membership, store: Store, *, receivers: Iterable[int], senders: Iterable[int],
        memory: Memory,
    ) -> None:  # fmt: skip
        store = PrefixStore("shared", store)
        receivers, senders = sorted(receivers), sorted(senders)
        listener = _listen(member, store) if senders else None
        to_peer = {peer: _connect(member, store, peer) for peer in receivers}
        from_peer = _accept(member, listener, senders) if listener else {}
        super().__init__("shared", memory=memory, to_peer=to_peer, from_peer=from_peer)


class FileMemory:
    """Host memory of this node."""

    gives_back = False

    def create(self, num_bytes: int) -> tuple[Tensor, FileIO]:
        file = FileIO(os.memfd_create("weights"), "r+")
        file.truncate(num_bytes)
        return _map(file), file

    def map(self, memory: FileIO) -> Tensor:
        with memory:
            return _map(memory)

    def settle(self) -> None:
        """Reads and writes of host memory are over when the call that does them returns."""


class CudaMemory:
    """Memory of the one device that both members run on. Each update allocates it anew."""

    gives_back = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def create(self, num_bytes: int) -> tuple[Tensor, list[Any]]:
        torch.cuda.ipc_collect()  # what receivers of earlier updates have let go of
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # what stands behind class, size, stride, offset, storage class, dtype and device: plain values
        _, arguments = reduce_tensor(buffer)
        return buffer, [num_bytes, *arguments[7:]]

    def map(self, memory: list[Any]) -> Tensor:
        num_bytes, *handles = memory
        buffer: Tensor = rebuild_cuda_tensor(
            torch.Tensor, (num_bytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8,
            self._device.index, *handles,
        )  # fmt: skip
        return buffer

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


def _map(file: FileIO) -> Tensor:
    return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


class _SocketLine:
    """Notes as JSON, one per packet; a descriptor rides along, bytes are written in hex."""

    def __init__(self, member: Membership, peer: int, sock: socket.socket) -> None:
        self.peer = member.name_of(peer)
        self._member, self._sock = member, sock
        sock.settimeout(member.timeout_s)

    def tell(self, note: Note) -> None:
        is_file = isinstance(note.memory, FileIO)
        memory = None if is_file else note.memory
        descriptors = [note.memory.fileno()] if is_file else []
        packet = json.dumps([note.word, note.numbers, memory], default=_encode).encode()
        try:
            socket.send_fds(self._sock, [packet], descriptors)
        except OSError as error:
            raise self._lost(first_line(error)) from error

    def hear(self) -> Note:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._sock, _MAX_NOTE_BYTES, 1)
        except TimeoutError as error:
            raise self._lost(f"silent for {self._member.timeout_s:g} s") from error
        except OSError as error:
            raise self._lost(first_line(error)) from error
        if not packet:
            raise self._lost("it ended or left")
        word, numbers, memory = json.loads(packet, object_hook=_decode)
        if descriptors:
            memory = FileIO(descriptors[0], "r+")
        return Note(word, tuple(numbers), memory)

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits here
        self._sock.close()

    def _lost(self, why: str) -> ReshardError:
        return ReshardError(f"weight transfer: {self._member.name} lost {self.peer}: {why}")


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    raise TypeError(f"{type(value).__name__} cannot travel over a line")


def _decode(value: dict[str, str]) -> bytes:
    return bytes.fromhex(value["hex"])


def _listen(member: Membership, store: Store) -> socket.socket:
    """A socket under a name that nobody can guess, told to the others through the store."""
    name = f"megatron_rl-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(member.world)
    store.set(str(member.rank), name)
    return listener


def _connect(member: Membership, store: Store, peer: int) -> _SocketLine:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        store.wait([str(peer)], timedelta(seconds=member.timeout_s))
        sock.settimeout(member.timeout_s)
        sock.connect(b"\0" + store.get(str(peer)))
        sock.sendall(_HELLO.pack(member.rank))
    except (OSError, RuntimeError) as error:
        sock.close()
        raise ReshardError(
            f"weight transfer: {member.name} could not reach {member.name_of(peer)} on this machine within "
            f"{member.timeout_s:g} s: {first_line(error)}"
        ) from error
    return _SocketLine(member, peer, sock)


def _accept(member: Membership, listener: socket.socket, senders: Sequence[int]) -> dict[int, _SocketLine]:
    lines: dict[int, _SocketLine] = {}
    deadline = time.monotonic() + member.timeout_s
    with listener:
        while missing := sorted(set(senders) - set(lines)):
            try:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                sock, _ = listener.accept()
                sock.settimeout(member.timeout_s)
                hello = sock.recv(_HELLO.size)
            except OSError as error:
                raise ReshardError(
                    f"weight transfer: {member.name_of(missing[0])} did not come to {member.name} on this machine "
                    f"within {member.timeout_s:g} s: {first_line(error)}"
                ) from error
            if _is_ours(sock) and len(hello) == _HELLO.size and (peer := _HELLO.unpack(hello)[0]) in missing:
                lines[peer] = _SocketLine(member, peer, sock)
            else:
                sock.close()
    return lines


def _is_ours(sock: socket.socket) -> bool:
    """Whether a process of the same user is at the other end: any process of the machine can connect."""
    with suppress(OSError):
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        return bool(user == os.getuid())
    return False
