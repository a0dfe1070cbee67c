"""Log-prob of a target token and entropy of the distribution, straight from hidden states and the head.

The fusion keeps memory flat: logits of [N, V] never exist. `reference` defines the op; `portable` runs it on any
device, `triton` on CUDA devices. README.md has the derivation and the limits.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_kernels.dispatch import Impl, choose_impl
from megatron_rl_kernels.head_checks import check_main_grad_memory, real_rows
from megatron_rl_kernels.linear_logprob.autograd import Engine, Head, LinearLogprobFunction, stats_dtype
from megatron_rl_kernels.linear_logprob.portable import PortableEngine
from megatron_rl_kernels.linear_logprob.reference import LinearLogprob, linear_logprob_reference

__all__ = ["LinearLogprob", "linear_logprob", "linear_logprob_reference"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OFFERED: tuple[Impl, ...] = ("reference", "portable", "triton")


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    valid_vocab: int | None = None,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    with_entropy: bool = True,
    main_grad: Tensor | None = None,
    impl: Impl | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> LinearLogprob:
    """log softmax(hidden @ weight.T / temperature)[target] and entropy, differentiable in hidden and weight.

    hidden [N, H]; weight [V_local, H] of the same dtype: rows vocab_start .. vocab_start + V_local of the
    head; target [N] int64 global token ids. `valid_vocab` is the global number of real rows: rows at or
    beyond it are padding, take no part and get zero gradient; None: all rows are real. `temperature` is one
    number or [N] float32, without gradient. A target outside the real rows gives a log-prob of NaN, which gets
    no gradient; a token with zero upstream gradient may hold anything in backward. Results are float32 (float64
    for float64 inputs); products and sums are float32 for bfloat16 and float16 too.

    `group` is the tensor-parallel group (None: `weight` is the whole head). Forward all-reduces [N] statistics,
    MAX once and SUM once, and all ranks get the same bits. Every rank passes the same target, temperature and, in
    backward, upstream gradients. Without `sequence_parallel` every rank passes the same hidden; with it, hidden
    is this rank's part [N / tp, H] in rank order, and the op gathers it. Either way the gradient of hidden is
    summed over the group here, exactly once and before it is rounded: the caller reduces nothing.

    The gradient of weight is rounded once to its dtype. With `main_grad` [V_local, H] float32, backward adds it
    to `main_grad` instead, at every backward, and autograd gets none.

    At most two blocks of chunk_tokens x chunk_vocab logits exist at once (None: what suits the implementation);
    backward recomputes them. Raises TypeError or ValueError for arguments that do not fit each other.
    """
    _check_tensors(hidden, weight, target)
    _check_tokens(hidden, target, temperature, group if sequence_parallel else None)
    _check_main_grad(main_grad, weight)
    num_rows = real_rows("linear_logprob", weight, vocab_start, valid_vocab, group)
    chosen = choose_impl("linear_logprob", impl, device=hidden.device, offered=_OFFERED)
    if chosen == "reference":
        return linear_logprob_reference(
            hidden,
            weight,
            target,
            temperature=temperature,
            vocab_start=vocab_start,
            valid_vocab=valid_vocab,
            group=group,
            sequence_parallel=sequence_parallel,
            with_entropy=with_entropy,
            main_grad=main_grad,
        )
    tokens, columns = _chunks(chosen, hidden, target.shape[0], chunk_tokens, chunk_vocab)
    head = Head(
        inv_temperature=_inverse(temperature, stats_dtype(hidden)),
        vocab_start=vocab_start,
        num_rows=num_rows,
        group=group,
        sequence_parallel=sequence_parallel,
        with_entropy=with_entropy,
        main_grad=main_grad,
        chunk_tokens=tokens,
        chunk_vocab=columns,
    )
    engine = _engine(chosen, hidden, weight)
    return LinearLogprob(*LinearLogprobFunction.apply(hidden, weight, target, head, engine))


def _engine(impl: Impl, hidden: Tensor, weight: Tensor) -> Engine:
    if impl == "triton":
        # importing triton is heavy, and not every machine has it
        from megatron_rl_kernels.linear_logprob.triton_op import TritonEngine, check_layout

        check_layout(hidden=hidden, weight=weight)
        return TritonEngine()
    return PortableEngine()


def _chunks(
    impl: Impl, hidden: Tensor, num_tokens: int, chunk_tokens: int | None, chunk_vocab: int | None
) -> tuple[int, int]:
    """Tokens and columns of a block: the caller's, else 2048 x 4096 in torch and 256 MiB of columns in Triton."""
    if impl == "triton":
        tokens = chunk_tokens or max(1, min(num_tokens, 32768))
        fitting = 2**28 // (tokens * hidden.element_size()) // 256 * 256
        columns = chunk_vocab or max(fitting, 4096)
    else:
        tokens, columns = chunk_tokens or 2048, chunk_vocab or 4096
    for name, value, given in (
        ("chunk_tokens", tokens, chunk_tokens),
        ("chunk_vocab", columns, chunk_vocab),
    ):
        if not isinstance(value, int):
            raise TypeError(f"linear_logprob: {name} = {given!r}, must be an int, or None for the default")
        if value < 1 or given == 0:
            raise ValueError(f"linear_logprob: {name} = {given}, must be at least 1")
    return tokens, columns


def _check_tensors(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    where = "linear_logprob: got"
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}"
    if hidden.ndim != 2 or weight.ndim != 2 or target.ndim != 1:
        raise ValueError(f"{where} {shapes}; expected hidden [N, H], weight [V_local, H], target [N]")
    if hidden.shape[1] != weight.shape[1] or hidden.shape[1] == 0:
        raise ValueError(f"{where} {shapes}; H of hidden and weight must agree and be at least 1")
    if hidden.dtype not in _DTYPES or weight.dtype != hidden.dtype:
        raise TypeError(
            f"{where} hidden of {hidden.dtype} and weight of {weight.dtype}; both must be the same one of "
            + ", ".join(str(dtype) for dtype in _DTYPES)
        )
    if target.dtype != torch.int64:
        raise TypeError(f"{where} target of {target.dtype}, must be torch.int64")
    if not hidden.device == weight.device == target.device:
        raise ValueError(
            f"{where} hidden on {hidden.device}, weight on {weight.device}, target on {target.device}; "
            "put them on one device"
        )


def _check_tokens(
    hidden: Tensor, target: Tensor, temperature: float | Tensor, gathering: dist.ProcessGroup | None
) -> None:
    """`gathering` is the group over which hidden states are spread, if they are."""
    parts = 1 if gathering is None else gathering.size()
    num_tokens = hidden.shape[0] * parts
    if target.shape[0] != num_tokens:
        spread = f" on each of {parts} ranks" if parts > 1 else ""
        raise ValueError(
            f"linear_logprob: got hidden {tuple(hidden.shape)}{spread}, target {tuple(target.shape)}; "
            f"N of hidden and target must agree, target [{num_tokens}] would"
        )
    if not isinstance(temperature, Tensor):
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"linear_logprob: temperature = {temperature}, must be finite and above 0")
        return
    if temperature.shape != target.shape or temperature.device != target.device:
        raise ValueError(
            f"linear_logprob: temperature {tuple(temperature.shape)} on {temperature.device}, must be a number or "
            f"one per token: [{num_tokens}] on {target.device}"
        )
    if temperature.dtype != torch.float32 or temperature.requires_grad:
        raise TypeError(
            f"linear_logprob: temperature of {temperature.dtype}, requires_grad = {temperature.requires_grad}; "
            "must be torch.float32 without gradient"
        )


def _check_main_grad(main_grad: Tensor | None, weight: Tensor) -> None:
    if main_grad is None:
        return
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise ValueError(
            f"linear_logprob: main_grad {tuple(main_grad.shape)} on {main_grad.device}, must be like weight: "
            f"{tuple(weight.shape)} on {weight.device}"
        )
    if main_grad.dtype != torch.float32 or main_grad.requires_grad:
        raise TypeError(
            f"linear_logprob: main_grad of {main_grad.dtype}, requires_grad = {main_grad.requires_grad}; "
            "must be torch.float32 without gradient"
        )
    check_main_grad_memory("linear_logprob", main_grad, weight)


def _inverse(temperature: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    if not isinstance(temperature, Tensor):
        return 1.0 / temperature
    # reading the values would stop the device: NaN marks the tokens instead
    usable = torch.isfinite(temperature) & (temperature > 0)
    return torch.where(usable, temperature, float("nan")).to(dtype).reciprocal()
