"""What a case of a kernel benchmark is: inputs, contenders that take the same inputs, and the least work there is.

Sizes are named in `SHAPES`. The cases of each op stand in `bench_kernels_head` and `bench_kernels_rows`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
# name -> tensor; only those that both sides of a comparison give are compared
Outputs = dict[str, Tensor]

EAGER, OURS = "torch eager", ("triton", "portable", "host", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of one case; `vocab` is the whole vocabulary, of which one of `tp` ranks holds a slice."""

    name: str
    tokens: int  # through head, norms and activation
    hidden: int
    vocab: int
    tp: int = 1
    loss_tokens: int = 1 << 20  # of a policy loss alone: a global batch
    params: int = 1 << 24  # of an optimizer step or a weight transfer
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 20  # when nothing else is asked for

    def with_dtype(self, name: str | None) -> Shape:
        return self if name is None else replace(self, dtype=getattr(torch, name))

    @property
    def local_vocab(self) -> int:
        return self.vocab // self.tp

    @property
    def ffn(self) -> int:
        return 3 * self.hidden

    @property
    def heads(self) -> int:
        return max(1, self.hidden // 128)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="tiny", tokens=48, hidden=64, vocab=1024, loss_tokens=4096, params=1 << 14,
              dtype=torch.float32, rounds=3),
        Shape(name="gate", tokens=256, hidden=512, vocab=4096, loss_tokens=8192, params=1 << 16),
        Shape(name="laptop", tokens=512, hidden=256, vocab=32000, params=1 << 22, dtype=torch.float32, rounds=5),
        Shape(name="reference", tokens=2048, hidden=1024, vocab=151936, params=1 << 26,
              dtype=torch.float32, rounds=1),
    )
}  # fmt: skip

# hidden size and vocabulary of models in use; a head of 8192 tokens is one micro-batch of long rollouts
H100_HEADS = ((2048, 151936), (4096, 128256), (4096, 151936), (8192, 152064), (7168, 129280))
H100_TOKENS, H100_MAIN = (1024, 4096, 8192, 32768), (4096, 151936)
SIZES = re.compile(r"(\d+)x(\d+)x(\d+)(?:/tp(\d+))?")


def shapes_of(name: str) -> list[Shape]:
    """The shapes that a name stands for: a single one, `h100`, `h100-all`, or sizes such as 8192x4096x151936/tp4."""
    if name in SHAPES:
        return [SHAPES[name]]
    if name == "h100":
        slices = [_head(8192, *H100_MAIN, tp=tp) for tp in (1, 4, 8)]
        return [*slices, *(_head(8192, *head) for head in H100_HEADS if head != H100_MAIN)]
    if name == "h100-all":
        return [
            _head(n, h, v, tp=tp)
            for h, v in H100_HEADS
            for n in H100_TOKENS
            for tp in (1, 4, 8)
            if v % tp == 0
        ]
    sizes = SIZES.fullmatch(name)
    if sizes is None:
        known = ", ".join([*SHAPES, "h100", "h100-all"])
        raise ValueError(f"shapes: {name!r} is not known; name one of {known}, or sizes NxHxV or NxHxV/tpT")
    tokens, hidden, vocab, tp = (int(group or 1) for group in sizes.groups())
    if vocab % tp or not (tokens and hidden and vocab):
        raise ValueError(f"shapes: {name!r} must have sizes above 0 and a vocabulary that tp divides")
    return [_head(tokens, hidden, vocab, tp=tp)]


def _head(tokens: int, hidden: int, vocab: int, *, tp: int = 1) -> Shape:
    name = f"{tokens}x{hidden}x{vocab}" + (f"/tp{tp}" if tp > 1 else "")
    return Shape(name=name, tokens=tokens, hidden=hidden, vocab=vocab, tp=tp, params=1 << 28)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to compute an op. `run` reads the case's tensors by name and gives named outputs.

    `gemms` counts the products of [N, H] x [H, V] that forward, and backward after it, really make. `only_time`: its
    outputs mean something else (reduced, other dtype), so they are not compared. `destroys` names inputs that it
    overwrites.
    """

    run: Callable[[Tensors], Outputs]
    gemms: tuple[int, int] = (0, 0)
    only_time: bool = False
    destroys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """The work that no implementation avoids, forward alone and forward with backward."""

    gemm_flops: float = 0.0  # of one product
    gemms: tuple[int, int] = (0, 0)
    num_bytes: tuple[float, float]


@dataclass(kw_only=True, slots=True)
class Case:
    """One op at one shape; of the `row_wise` tensors any number of rows is a case too."""

    op: str
    variant: str = ""
    shape: Shape
    tensors: Tensors
    row_wise: tuple[str, ...]
    leaves: tuple[str, ...]  # names of tensors with gradient
    upstream: Mapping[str, Tensor]  # gradient of each output that has one
    contenders: dict[str, Contender]
    reference: Contender
    least: Least
    num_rows: int
    is_cheap: bool = False  # in float64 too: all rows are compared
    unavailable: dict[str, str] = field(default_factory=dict)  # contender -> why it is not here

    def fresh(self) -> Tensors:
        """The tensors, with leaves that record gradients and share memory with the originals."""
        return {
            name: tensor.detach().requires_grad_(name in self.leaves) for name, tensor in self.tensors.items()
        }

    def sampled(self, rows: int) -> Case:
        """The same case in float64 with its first `rows` rows."""
        return replace(
            self,
            tensors={
                name: _exact(tensor[:rows] if name in self.row_wise else tensor)
                for name, tensor in self.tensors.items()
            },
            upstream={
                name: _exact(tensor[:rows] if tensor.ndim else tensor)
                for name, tensor in self.upstream.items()
            },
            num_rows=rows,
        )


def _exact(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def forward_backward(case: Case, contender: Contender, tensors: Tensors) -> tuple[Outputs, list[Tensor]]:
    """Outputs, and gradients of the case's leaves where it has any."""
    outputs = contender.run(tensors)
    return outputs, backward(case, outputs, tensors)


def backward(case: Case, outputs: Outputs, tensors: Tensors) -> list[Tensor]:
    named = [name for name in case.upstream if name in outputs and outputs[name].requires_grad]
    if not named or not case.leaves:
        return []
    given = [
        # of a contender that sums up, the gradient of each token is the same
        case.upstream[name].to(out.dtype) if case.upstream[name].shape == out.shape else torch.ones_like(out)
        for name, out in ((name, outputs[name]) for name in named)
    ]
    return list(torch.autograd.grad([outputs[n] for n in named], [tensors[n] for n in case.leaves], given))


def errors(case: Case, contender: Contender, *, rows: int) -> dict[str, float]:
    """Against the reference in float64 on the first `rows` rows.

    Outputs by their largest absolute error, gradients (`d name`) by relative norm. What is summed over all rows is
    compared only where all of them are sampled.
    """
    rows = case.num_rows if case.is_cheap else min(rows, case.num_rows)
    tensors = {name: t.clone().requires_grad_(t.requires_grad) for name, t in case.fresh().items()}
    outputs, gradients = forward_backward(case, contender, tensors)
    exact = case.sampled(rows)
    exact_tensors = exact.fresh()
    wanted, wanted_gradients = forward_backward(exact, case.reference, exact_tensors)
    # an op that works in place has its result in its input
    found = {}
    for name, want in wanted.items():
        got = _matching(outputs.get(name), want, case.num_rows, rows)
        if got is not None:
            found[name] = float((got.detach().double() - want.detach()).abs().max()) if want.numel() else 0.0
    for name, got, want in zip(case.leaves, gradients, wanted_gradients, strict=False):
        part = _matching(got, want, case.num_rows, rows)
        if part is not None:
            found[f"d {name}"] = float((part.double() - want).norm() / want.norm().clamp_min(1e-30))
    return found


def _matching(got: Tensor | None, want: Tensor, num_rows: int, rows: int) -> Tensor | None:
    """The part of `got` that `want` has, or None where sums over other rows cannot be compared."""
    if got is None:
        return None
    if rows == num_rows:
        return got
    is_row_wise = got.ndim > 0 and got.shape[0] == num_rows and want.shape[0] == rows
    return got[:rows] if is_row_wise else None


class Source:
    """Random inputs of one case, the same for the same seed. Zeros would run faster than what training sees."""

    def __init__(self, device: torch.device, *, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        noise = torch.empty(shape, device=self.device, dtype=dtype)
        return noise.normal_(0.0, scale, generator=self._generator)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, device=self.device, generator=self._generator)

    def chance(self, share: float, *shape: int) -> Tensor:
        """bool, True for about that share."""
        return torch.rand(shape, device=self.device, generator=self._generator) < share
