"""Questions about the kernels that only a GPU answers: shares of the library's speed, and where chunks stop to cost.

A part of gpu_check. `--smoke` runs the same code at tiny sizes in Triton's interpreter, on a CPU and with
TRITON_INTERPRET=1 set; its figures mean nothing. Exit code 0: all were answered; 1: one could not be; 3: there is no
GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from bench_kernels_cases import Shape, Source
from bench_kernels_head import head_inputs
from bench_kernels_timing import Ceiling, Clock, CpuClock, CudaClock
from torch import Tensor

from megatron_rl_kernels import tables
from megatron_rl_kernels.linear_logprob import linear_logprob
from megatron_rl_kernels.logprob_from_logits import logprob_from_logits

NO_GPU, FAILED, PASSED = 3, 1, 0
# of the library's rate in the forward: above, Triton is enough; below the second, the library's logits in chunks are
ENOUGH, USABLE = 0.85, 0.60


@dataclass(kw_only=True, slots=True)
class Answer:
    """Figures by name, and what follows from them."""

    question: str
    figures: dict[str, float] = field(default_factory=dict)
    verdict: str = ""
    problem: str = ""


class Session:
    """One device, its ceilings, and the inputs of one head."""

    def __init__(self, clock: Clock, *, smoke: bool, rounds: int) -> None:
        self.clock, self.smoke, self.rounds = clock, smoke, rounds
        sizes = (128, 128, 1024) if smoke else (8192, 4096, 151936)
        self.shape = Shape(name="main", tokens=sizes[0], hidden=sizes[1], vocab=sizes[2])
        self.inputs = head_inputs(self.shape, Source(clock.device))
        size, num_bytes = (256, 2**20) if smoke else (8192, 2**31)
        self.ceiling: Ceiling = clock.ceiling(torch.bfloat16, size=size, num_bytes=num_bytes)
        self.flops = 2.0 * sizes[0] * sizes[1] * sizes[2]

    def seconds(self, work: Callable[[], Any]) -> float:
        """Median, after one that warms up."""
        work()
        return statistics.median(self.clock.seconds(work) for _ in range(self.rounds))

    def forward_seconds(self, *, with_entropy: bool) -> float:
        t = self.inputs
        with torch.no_grad():
            return self.seconds(
                lambda: linear_logprob(
                    t["hidden"], t["weight"], t["target"], with_entropy=with_entropy, impl="triton"
                )
            )


def ceilings(session: Session) -> Answer:
    return Answer(
        question="what do a product of 8192^3 and a copy of 2 GiB reach",
        figures={
            "TFLOP/s": session.ceiling.flops_per_s / 1e12, "TB/s": session.ceiling.bytes_per_s / 1e12
        },
    )  # fmt: skip


def forward_share(session: Session) -> Answer:
    """Decides between Triton, CUDA C++ and the library's logits in chunks."""
    hidden, weight = session.inputs["hidden"], session.inputs["weight"]
    library = session.seconds(lambda: hidden @ weight.T)
    plain, entropy = (session.forward_seconds(with_entropy=flag) for flag in (False, True))
    share = library / plain
    verdict = "stay with Triton" if share >= ENOUGH else "keep Triton, plan CUDA C++"
    if share < USABLE:
        verdict = "use the library's logits in chunks and the row kernel until there is CUDA C++"
    return Answer(
        question="what share of the library's rate does the forward reach",
        figures={
            "library ms": library * 1e3, "forward ms": plain * 1e3, "with entropy ms": entropy * 1e3, "share": share,
            "share with entropy": library / entropy, "TFLOP/s": session.flops / plain / 1e12,
        },
        verdict=verdict,
    )  # fmt: skip


def forward_tiles(session: Session) -> Answer:
    """The table's tile beside others, of which one may be better on this card."""
    key = tables.generation(session.clock.device), 2
    chosen = tables.LINEAR_LOGPROB_FORWARD[key]  # type: ignore[index]
    others = {
        "128x256x64, 8 warps, 4 stages": replace(chosen, num_stages=4),
        "128x256x64, whole tile": replace(chosen, parts=1),
        "128x128x64, 8 warps, 4 stages": replace(chosen, n=128, parts=1, num_stages=4),
        "128x128x64, 4 warps, 4 stages": replace(chosen, n=128, parts=1, num_warps=4, num_stages=4),
        "64x256x64, 4 warps, 4 stages": replace(chosen, m=64, num_warps=4, num_stages=4),
        "8 row blocks together": replace(chosen, group=8),
        "64 row blocks together": replace(chosen, group=64),
    }
    answer = Answer(question="which tile is the fastest in the forward (TFLOP/s)")
    answer.figures["the table's"] = session.flops / session.forward_seconds(with_entropy=False) / 1e12
    for name, tile in others.items():
        with _tile(key, tile):
            try:
                seconds = session.forward_seconds(with_entropy=False)
            # too much shared memory, or too many registers: an answer as well
            except Exception as error:
                answer.verdict += f"{name}: {type(error).__name__}; "
                continue
        answer.figures[name] = session.flops / seconds / 1e12
    best = max(answer.figures, key=lambda name: answer.figures[name])
    answer.verdict += f"fastest: {best}"
    return answer


@contextmanager
def _tile(key: Any, tile: tables.MatmulTile) -> Iterator[None]:
    table = tables.LINEAR_LOGPROB_FORWARD
    before = table[key]
    table[key] = tile
    try:
        yield
    finally:
        table[key] = before


def weight_gradient(session: Session) -> Answer:
    """The head's gradient is added up in float32 over chunks of tokens: each chunk reads and writes all of it."""
    answer = Answer(question="from which chunk of tokens on does adding up the head's gradient cost little")
    device, shape = session.clock.device, session.shape
    total = torch.zeros(shape.local_vocab, shape.hidden, device=device)
    chunks = (32, 64) if session.smoke else (1024, 2048, 4096, 8192)
    for tokens in chunks:
        dz = torch.empty(tokens, shape.local_vocab, device=device, dtype=torch.bfloat16).normal_()
        hidden, weight = session.inputs["hidden"][:tokens], session.inputs["weight"]
        flops = session.flops * tokens / shape.tokens
        for name, work in (
            ("first", lambda d=dz, x=hidden: _add(total, d.T, x, beta=0)),
            ("added", lambda d=dz, x=hidden: _add(total, d.T, x, beta=1)),
            ("d hidden", lambda d=dz, w=weight: d @ w),
        ):
            answer.figures[f"{tokens} tokens, {name}, TFLOP/s"] = flops / session.seconds(work) / 1e12
        del dz
    first, last = (answer.figures[f"{tokens} tokens, added, TFLOP/s"] for tokens in (chunks[0], chunks[-1]))
    answer.verdict = f"chunks of {chunks[0]} reach {first / last:.0%} of the rate of chunks of {chunks[-1]}"
    return answer


def _add(total: Tensor, left: Tensor, right: Tensor, *, beta: int) -> None:
    if total.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, beta=beta, out=total)
    else:
        total.addmm_(left.float(), right.float(), beta=beta)


def float32_output(session: Session) -> Answer:
    """Whether the library's product of bfloat16 with a float32 result runs at full speed."""
    hidden, weight = session.inputs["hidden"], session.inputs["weight"][: session.shape.tokens]
    flops = 2.0 * hidden.shape[0] * hidden.shape[1] * weight.shape[0]
    rounded = session.seconds(lambda: hidden @ weight.T)
    out = torch.zeros(hidden.shape[0], weight.shape[0], device=session.clock.device)
    exact = session.seconds(lambda: _add(out, hidden, weight.T, beta=0))
    return Answer(
        question="is a library product with a float32 result as fast as one that rounds",
        figures={"rounded TFLOP/s": flops / rounded / 1e12, "float32 TFLOP/s": flops / exact / 1e12},
        verdict=f"{rounded / exact:.0%} of its speed",
    )


def second_pass(session: Session) -> Answer:
    """The row kernel reads a row again in backward: forward and backward by the bytes of their own passes."""
    shape = session.shape
    logits = torch.empty(
        shape.tokens, shape.local_vocab, device=session.clock.device, dtype=torch.bfloat16
    ).normal_()
    target = session.inputs["target"]
    with torch.no_grad():
        forward = session.seconds(
            lambda: logprob_from_logits(logits, target, with_entropy=False, impl="triton")
        )
    leaf = logits.requires_grad_()
    out = logprob_from_logits(leaf, target, with_entropy=False, impl="triton").logprob
    back = session.seconds(lambda: torch.autograd.grad(out, leaf, torch.ones_like(out), retain_graph=True))
    size = logits.numel() * logits.element_size()
    rates = size / forward, 2 * size / back
    return Answer(
        question="what share of the copy rate do the row kernels reach",
        figures={"forward TB/s": rates[0] / 1e12, "backward TB/s": rates[1] / 1e12},
        verdict=" and ".join(f"{rate / session.ceiling.bytes_per_s:.0%}" for rate in rates),
    )


QUESTIONS: tuple[Callable[[Session], Answer], ...] = (
    ceilings, forward_share, forward_tiles, weight_gradient, float32_output, second_pass
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes in the interpreter, on a CPU")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(argv)
    if not args.smoke and not torch.cuda.is_available():
        print(
            "gpu_check_questions: no CUDA GPU here, so nothing was measured; --smoke needs none",
            file=sys.stderr,
        )
        return NO_GPU
    session = Session(
        CpuClock() if args.smoke else CudaClock(), smoke=args.smoke, rounds=1 if args.smoke else args.rounds
    )
    answers = []
    for ask in QUESTIONS:
        try:
            answer = ask(session)
        # one that cannot be answered hides no other
        except Exception as error:
            answer = Answer(question=ask.__name__, problem=f"{type(error).__name__}: {error}")
        answers.append(answer)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in answer.figures.items())
        print(f"{answer.question}? {answer.problem or figures}. {answer.verdict}", flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in answers], indent=1), encoding="utf-8")
    return FAILED if any(answer.problem for answer in answers) else PASSED


if __name__ == "__main__":
    sys.exit(main())
