"""Log-prob of a target token, entropy and normaliser of each row of logits that exist already.

Where logits need not exist, `linear_logprob` starts from hidden states and saves their memory. `reference` defines the
op; README.md has the derivation and the limits.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_kernels.dispatch import Impl, choose_impl
from megatron_rl_kernels.logprob_from_logits import portable
from megatron_rl_kernels.logprob_from_logits.autograd import LogprobFromLogits
from megatron_rl_kernels.logprob_from_logits.reference import LogitsLogprob, logprob_from_logits_reference
from megatron_rl_kernels.logprob_from_logits.shards import Backend, Shard, compute_dtype

__all__ = ["LogitsLogprob", "logprob_from_logits", "logprob_from_logits_", "logprob_from_logits_reference"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# columns are counted in int32 inside a kernel
_MAX_COLUMNS = 2**31 - 2**14


def logprob_from_logits(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    valid_vocab: int | None = None,
    with_entropy: bool = True,
    group: dist.ProcessGroup | None = None,
    impl: Impl | None = None,
) -> LogitsLogprob:
    """log softmax(logits / temperature)[target], entropy and lse of each row; the first two are differentiable.

    logits [N, V_local]: columns vocab_start .. vocab_start + V_local of the vocabulary, rows may be strided; target
    [N] int64 global token ids (one that no shard owns gives a log-prob of NaN, without gradient). `temperature` is a
    number, or [N] for one of each token, without gradient; a token whose own is not finite and above 0 gives NaN.
    `valid_vocab` is the global number of real tokens: columns at or beyond it are padding, whatever they hold, and
    get zero gradient; None: all are real. Results are float32 (float64 for float64 logits).

    `group` is the tensor-parallel group (None: logits have the whole vocabulary). Every rank passes the same target,
    temperature and upstream gradients, and gets the same bits; the gradient is that of its own columns.

    A logit of -inf is an impossible token. A row of them alone has log-prob and lse -inf, entropy 0, gradient 0. A
    row whose upstream gradients are 0 has gradient 0, whatever its logits are. Raises TypeError or ValueError for
    arguments that do not fit each other.
    """
    chosen = _choose("logprob_from_logits", logits, target, impl)
    shard = _checked_shard(
        "logprob_from_logits", logits, target, temperature, vocab_start, valid_vocab, with_entropy, group
    )
    if chosen == "reference":
        if group is not None:
            raise ValueError(
                "logprob_from_logits: impl = 'reference' takes whole rows: gather the logits, group = None"
            )
        return logprob_from_logits_reference(
            logits,
            target,
            temperature=shard.temperature,
            vocab_start=vocab_start,
            valid_vocab=valid_vocab,
            with_entropy=with_entropy,
        )
    return LogitsLogprob(*LogprobFromLogits.apply(logits, target, shard, _backend(chosen)))


def logprob_from_logits_(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    valid_vocab: int | None = None,
    with_entropy: bool = True,
    group: dist.ProcessGroup | None = None,
    impl: Impl | None = None,
) -> LogitsLogprob:
    """`logprob_from_logits` whose backward overwrites `logits` with their gradient instead of taking as much again.

    For logits that nothing else reads after this call: their values are gone once backward has run, and a second
    backward raises RuntimeError. Forward writes nothing. Raises ValueError for logits that are a leaf of the graph
    (they would become their own gradient) or whose rows share memory. No reference implementation: it has no buffer
    to give back.
    """
    name = "logprob_from_logits_"
    chosen = _choose(name, logits, target, impl)
    shard = _checked_shard(
        name, logits, target, temperature, vocab_start, valid_vocab, with_entropy, group, overwrites=True
    )
    if logits.requires_grad and logits.is_leaf:
        raise ValueError(
            f"{name}: logits {tuple(logits.shape)} are a leaf of the graph, backward would overwrite them with their "
            "own gradient; call logprob_from_logits"
        )
    if len(logits) > 1 and logits.stride(0) < logits.shape[1]:
        raise ValueError(
            f"{name}: logits {tuple(logits.shape)} of stride {logits.stride()} have rows that share memory, which "
            "backward would overwrite; pass logits.contiguous() or call logprob_from_logits"
        )
    return LogitsLogprob(*LogprobFromLogits.apply(logits, target, shard, _backend(chosen)))


def _choose(name: str, logits: Tensor, target: Tensor, impl: Impl | None) -> Impl:
    if logits.ndim != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"{name}: got logits {tuple(logits.shape)} and target {tuple(target.shape)}; expected logits [N, V_local] "
            "and target [N]"
        )
    if logits.dtype not in _DTYPES:
        allowed = ", ".join(str(dtype) for dtype in _DTYPES)
        raise TypeError(f"{name}: got logits of {logits.dtype}; must be one of {allowed}")
    if target.dtype != torch.int64:
        raise TypeError(f"{name}: got target of {target.dtype}; must be torch.int64")
    if logits.device != target.device:
        raise ValueError(
            f"{name}: got logits on {logits.device}, target on {target.device}; put them on one device"
        )
    offered: list[Impl] = ["portable"] if name.endswith("_") else ["reference", "portable"]
    # kernels compute in float32, which would not be what float64 logits ask for
    if logits.dtype != torch.float64:
        offered.append("triton")
    if logits.dtype in (torch.float32, torch.bfloat16):
        offered += ["host", "cuda"]
    return choose_impl(name, impl, device=logits.device, offered=offered)


def _checked_shard(
    name: str,
    logits: Tensor,
    target: Tensor,
    temperature: float | Tensor,
    vocab_start: int,
    valid_vocab: int | None,
    with_entropy: bool,
    group: dist.ProcessGroup | None,
    overwrites: bool = False,
) -> Shard:
    num_columns = _real_columns(name, logits, vocab_start, valid_vocab)
    if num_columns == 0 and group is None:
        raise ValueError(
            f"{name}: logits {tuple(logits.shape)} have no real column at vocab_start = {vocab_start}, valid_vocab = "
            f"{valid_vocab}; only one shard of several may be all padding: pass group"
        )
    return Shard(
        temperature=_checked_temperature(name, temperature, logits, target),
        vocab_start=vocab_start,
        num_columns=num_columns,
        group=group,
        with_entropy=with_entropy,
        overwrites_logits=overwrites,
    )


def _real_columns(name: str, logits: Tensor, vocab_start: int, valid_vocab: int | None) -> int:
    """How many columns of this shard, from its first on, are not padding."""
    if vocab_start < 0 or (valid_vocab is not None and valid_vocab < 1):
        raise ValueError(
            f"{name}: vocab_start = {vocab_start} must be at least 0, valid_vocab = {valid_vocab} at least 1"
        )
    columns = logits.shape[1]
    if columns > _MAX_COLUMNS:
        raise ValueError(
            f"{name}: got {columns} columns, at most {_MAX_COLUMNS}; shard the vocabulary over group"
        )
    return columns if valid_vocab is None else min(columns, max(valid_vocab - vocab_start, 0))


def _checked_temperature(
    name: str, temperature: float | Tensor, logits: Tensor, target: Tensor
) -> float | Tensor:
    if not isinstance(temperature, Tensor):
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"{name}: temperature = {temperature}, must be finite and above 0")
        return float(temperature)
    if temperature.shape != target.shape or temperature.device != logits.device:
        raise ValueError(
            f"{name}: got temperature {tuple(temperature.shape)} on {temperature.device}; must be a number, or one for "
            f"each token, {tuple(target.shape)} on {logits.device}"
        )
    if not temperature.is_floating_point() or temperature.requires_grad:
        raise TypeError(
            f"{name}: got temperature of {temperature.dtype}, requires_grad = {temperature.requires_grad}; must be "
            "of a floating dtype and has no gradient: pass temperature.float().detach()"
        )
    # reading the values would stop the device: NaN marks the tokens instead
    usable = torch.isfinite(temperature) & (temperature > 0)
    return torch.where(usable, temperature, float("nan")).to(compute_dtype(logits)).contiguous()


def _backend(impl: Impl) -> Backend:
    if impl == "triton":
        # needs Triton, which CPU machines may lack
        from megatron_rl_kernels.logprob_from_logits import triton_op

        return triton_op
    if impl in ("host", "cuda"):
        # needs a compiler, which many machines lack
        from megatron_rl_kernels.logprob_from_logits import native

        return native
    return portable
