"""Executing a plan: one buffer per message, sealed with its version and a digest.

A buffer is the message's intervals in its order, already in the engine's dtype, then `SEAL_BYTES` of seal. The
digest is keyed with the plan, so two sides that planned differently never mistake each other's bytes. Nothing
here touches a model.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.plan import Message, ReshardPlan, Transfer
from megatron_rl.reshard.transports import Pending, Transport

_DIGEST_BYTES = 16
SEAL_BYTES = 8 + _DIGEST_BYTES  # int64 weight version, then blake2b of version and payload

Params = Sequence[Mapping[str, Tensor]]  # per model chunk: parameter name -> tensor


def send_weights(
    plan: ReshardPlan, rank: int, params: Params, group: Transport, *, dtype: torch.dtype, version: int
) -> int:
    """Send everything the plan asks of this trainer rank; returns bytes sent (seals included).

    Returns when every buffer left, so the caller may change `params` at once. Raises ReshardError naming the
    parameter that is missing or mis-shaped, or the peer that did not take its buffer in time.
    """
    pending: list[tuple[Pending, Tensor]] = []
    for message in plan.messages_from(rank):
        buffer = pack(plan, message.transfers, params, dtype=dtype, version=version)
        pending.append((group.send(buffer, message.receiver), buffer))
    for work, _ in pending:
        work.wait()
    return sum(buffer.numel() for _, buffer in pending)


Payloads = dict[tuple[int, int], Tensor]  # (bucket, trainer rank) -> uint8 payload


def receive_weights(plan: ReshardPlan, worker: int, group: Transport, *, version: int) -> Payloads:
    """Receive and verify every buffer of this worker.

    Raises ReshardError naming the rank on a time-out, a foreign version or a wrong digest.
    """
    pending: list[tuple[Message, Pending, Tensor]] = []
    for message in plan.messages_to(plan.num_trainers + worker):
        buffer = torch.empty(message.bytes + SEAL_BYTES, dtype=torch.uint8)
        pending.append((message, group.recv(buffer, message.sender), buffer))
    payloads = {}
    for message, work, buffer in pending:
        work.wait()
        payload = check_seal(plan, buffer, version=version, source=message.sender)
        payloads[message.bucket, message.sender] = payload
    return payloads


def pack(
    plan: ReshardPlan, transfers: Sequence[Transfer], params: Params, *, dtype: torch.dtype, version: int
) -> Tensor:
    """One sealed uint8 buffer holding the intervals of `transfers` in order, cast to `dtype`."""
    if dtype.itemsize != plan.element_bytes:
        raise ReshardError(
            f"weight transfer: {dtype} has {dtype.itemsize} bytes, the plan {plan.element_bytes}"
        )
    size = sum(t.bytes for t in transfers)
    # a tensor of the wire dtype views the front; the seal need not be aligned to it
    payload = torch.empty(size // dtype.itemsize, dtype=dtype)
    offset = 0
    for transfer in transfers:
        count = transfer.bytes // dtype.itemsize
        shape = plan.piece_shape(transfer)
        payload[offset : offset + count].view(shape).copy_(_local_piece(transfer, shape, params))
        offset += count
    raw = payload.view(torch.uint8)
    seal = struct.pack("<q", version) + _digest(plan, raw, version)
    return torch.cat([raw, torch.frombuffer(bytearray(seal), dtype=torch.uint8)])


def check_seal(plan: ReshardPlan, buffer: Tensor, *, version: int, source: int) -> Tensor:
    """The payload of a sealed buffer. Raises ReshardError naming the trainer rank it came from."""
    payload, seal = buffer[:-SEAL_BYTES], bytes(buffer[-SEAL_BYTES:].tolist())
    (sent_version,) = struct.unpack("<q", seal[:8])
    if _digest(plan, payload, sent_version) != seal[8:]:
        raise ReshardError(
            f"weight transfer: the {payload.numel()} bytes from trainer rank {source} do not match their "
            f"digest; "
            f"nothing was loaded, send all weights again"
        )
    if sent_version != version:
        raise ReshardError(
            f"weight transfer: trainer rank {source} sent version {sent_version}, expected {version}"
        )
    return payload


def unpack(
    plan: ReshardPlan, worker: int, payloads: Mapping[tuple[int, int], Tensor], *, dtype: torch.dtype
) -> dict[str, list[tuple[Transfer, Tensor]]]:
    """HF name -> received intervals as views of `payloads`, for every tensor this worker received a part of.

    Raises ReshardError naming the trainer rank whose payload is missing or of the wrong size.
    """
    parts: dict[str, list[tuple[Transfer, Tensor]]] = {}
    for message in plan.messages_to(plan.num_trainers + worker):
        key = message.bucket, message.sender
        got = payloads[key].numel() if key in payloads else 0
        if got != message.bytes:
            raise ReshardError(
                f"weight transfer: {got} of {message.bytes} bytes arrived from trainer rank {message.sender}"
            )
        flat, offset = payloads[key].view(dtype), 0
        for transfer in message.transfers:
            count = transfer.bytes // dtype.itemsize
            view = flat[offset : offset + count].view(plan.piece_shape(transfer))
            parts.setdefault(transfer.hf_name, []).append((transfer, view))
            offset += count
    return parts


def full_tensors(
    plan: ReshardPlan,
    parts: Mapping[str, Sequence[tuple[Transfer, Tensor]]],
    *,
    dtype: torch.dtype,
    canary: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor in checkpoint order, full shape, with only the received intervals filled.

    With `canary` the rest is NaN, so a reader that leaves its interval is seen at once; else it is undefined.
    """
    for name, shape in plan.shapes.items():
        full = torch.full(shape, float("nan"), dtype=dtype) if canary else torch.empty(shape, dtype=dtype)
        for transfer, view in parts.get(name, ()):
            place = full
            if transfer.hf_dim is not None:
                place = full.narrow(transfer.hf_dim, transfer.hf_start, transfer.length)
            place.copy_(view)
        yield name, full


def _local_piece(transfer: Transfer, shape: tuple[int, ...], params: Params) -> Tensor:
    chunk = params[transfer.chunk] if transfer.chunk < len(params) else {}
    param = chunk.get(transfer.param)
    if param is None:
        raise ReshardError(
            f"weight transfer: {transfer.hf_name} is planned from parameter {transfer.param} of model chunk "
            f"{transfer.chunk}, which does not exist on this rank"
        )
    piece = param.detach()
    if transfer.param_dim is not None:
        dim, start = transfer.param_dim, transfer.param_start
        if piece.dim() > dim and start + transfer.length <= piece.shape[dim]:
            piece = piece.narrow(dim, start, transfer.length)
    if tuple(piece.shape) != shape:
        raise ReshardError(
            f"weight transfer: {transfer.hf_name} needs shape {list(shape)} of {transfer.param} (chunk "
            f"{transfer.chunk}), whose shape {list(param.shape)} does not hold it"
        )
    return piece


def _digest(plan: ReshardPlan, payload: Tensor, version: int) -> bytes:
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=bytes.fromhex(plan.digest()))
    state.update(struct.pack("<q", version))
    state.update(payload.numpy().data)
    return state.digest()
