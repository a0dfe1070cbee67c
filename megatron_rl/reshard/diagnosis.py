"""What a gap between trainer and engine comes from: the faults by name, and the arithmetic that tells them apart.

Every function here asks whether one explanation reproduces the engine's numbers to within rounding; none of them
guesses from how a gap looks. What has to be tried on models and engines is in `train.diagnose`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.reshard.verify import Values, max_gap


class Fault(enum.Enum):
    """Named causes. The README of this package says of each what it means and what to do."""

    STALE = "stale"
    ONE_LAYER = "one layer"
    HEAD = "head only"
    TEMPERATURE = "temperature"
    TRUNCATED = "truncated sampling"
    ROPE = "rope"
    PREFIX_CACHE = "prefix cache"
    TRANSFER = "damaged transfer"
    NOT_FINITE = "not finite"
    ROUNDING = "bound below rounding"
    UNKNOWN = "unknown"


_ADVICE = {
    Fault.STALE: "the update did not reach the model that answers: read the engine's log around this transfer",
    Fault.ONE_LAYER: "compare the plan of that layer (tools/plan_reshard.py --tensor) with the model's config.json",
    Fault.HEAD: "the engine keeps a copy of the head that updates do not refresh: use a pinned version of vllm, or "
    "untie the head (tie_word_embeddings: false)",
    Fault.TEMPERATURE: "both sides must divide the logits by the same sampling.temperature, once",
    Fault.TRUNCATED: "log-probs over the tokens that were kept do not compare with the trainer's: sample with top_p 1 "
    "and top_k -1",
    Fault.ROPE: "compare rope_theta and rope_scaling of config.json with what the engine's log says it read",
    Fault.PREFIX_CACHE: "the engine must reset its prefix cache with every update",
    Fault.TRANSFER: "the weights were damaged between being read and being loaded: nothing may change parameters "
    "while they are sent, and both machines' memory and network deserve a check",
    Fault.NOT_FINITE: "weights that are not finite, or an engine worker that read outside the interval sent to it",
    Fault.ROUNDING: "raise engine.parity_bound, or leave it out",
    Fault.UNKNOWN: "compare the weights themselves: export both sides and use tools/convert_checkpoint.py verify",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """A fault with what was seen that proves it."""

    fault: Fault
    evidence: str

    def __str__(self) -> str:
        return f"{self.fault.value}: {self.evidence}; {_ADVICE[self.fault]}"


def matching_version(
    history: Mapping[int, Sequence[Values]], engine: Sequence[Values], *, tolerance: float
) -> tuple[int, float] | None:
    """The version whose log-probs the engine repeats, with the largest gap to them; None if it repeats none."""
    gaps = {
        version: max(map(max_gap, values, engine))
        for version, values in history.items()
        if len(values) == len(engine)
    }
    version = min(gaps, key=gaps.__getitem__, default=None)
    return (version, gaps[version]) if version is not None and gaps[version] <= tolerance else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Temperature:
    """The factor on the temperature that explains a gap best, and what it leaves unexplained, in nats."""

    factor: float
    rms: float
    largest: float


def fit_temperature(rows: Tensor, labels: Tensor, engine: Tensor) -> Temperature:
    """The temperature under which `rows` give `engine` best, in the sense of least squares.

    `rows` [N, V] are the trainer's log-probs of every token, `labels` [N] the tokens, `engine` [N] what the engine
    says of them. Factors from 0.1 to 10 are tried.
    """
    rows, engine = rows.double(), engine.double()

    def misfit(log_factor: float) -> Tensor:
        return _at_temperature(rows, labels, math.exp(log_factor)) - engine

    def rms(log_factor: float) -> float:
        return _rms(misfit(log_factor))

    step = 0.1
    steps = round(math.log(10) / step)
    best = min((step * i for i in range(-steps, steps + 1)), key=rms)
    found = _golden_section(rms, best - step, best + step)
    left = misfit(found)
    return Temperature(factor=math.exp(found), rms=_rms(left), largest=float(left.abs().max()))


def _at_temperature(rows: Tensor, labels: Tensor, factor: float) -> Tensor:
    scaled = rows / factor
    chosen = scaled.gather(1, labels[:, None])[:, 0]
    return chosen - scaled.logsumexp(1)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _golden_section(f: Callable[[float], float], low: float, high: float, *, steps: int = 40) -> float:
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(steps):
        width = ratio * (high - low)
        if f(high - width) < f(low + width):
            high = low + width
        else:
            low = high - width
    return (low + high) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Which tokens the engine kept: the `top_k` likeliest, or the fewest that hold `top_p` (an interval)."""

    top_k: int | None
    top_p: tuple[float, float] | None
    kept_mass: tuple[float, float]  # smallest and largest over the positions
    rms: float  # left unexplained, in nats
    largest: float

    def __str__(self) -> str:
        low, high = self.kept_mass
        if self.top_k is not None:
            how = f"top_k = {self.top_k}"
        else:
            assert self.top_p is not None
            how = f"top_p between {self.top_p[0]:.4g} and {self.top_p[1]:.4g}"
        return f"each gap is the log of the mass ({low:.3g} to {high:.3g}) of the tokens that {how} keeps"


def fit_truncation(rows: Tensor, labels: Tensor, engine: Tensor) -> Truncation | None:
    """The top_k or the top_p under which `rows` [N, V] give `engine` [N] best, in the sense of least squares.

    Renormalising over the tokens that are kept adds minus the log of their mass to each log-prob. None where a token
    of `labels` [N] is one that would not have been kept.
    """
    rows, engine = rows.double(), engine.double()
    chosen = rows.gather(1, labels[:, None])[:, 0]
    log_kept = chosen - engine
    log_mass = rows.sort(1, descending=True).values.logcumsumexp(
        1
    )  # [N, V] of the 1, 2, ... likeliest tokens
    ranks = (rows > chosen[:, None]).sum(1)
    counts_of_k = _best_top_k(log_mass, log_kept)
    counts_of_p = _best_top_p(log_mass, log_kept)
    fits = [
        _truncation(log_mass, log_kept, counts, is_top_k=is_top_k)
        for counts, is_top_k in ((counts_of_p, False), (counts_of_k, True))
        if bool((ranks < counts).all())
    ]
    return min(fits, key=lambda fit: fit.rms, default=None)


def _best_top_k(log_mass: Tensor, log_kept: Tensor) -> Tensor:
    """[N] tokens kept per row: the same number everywhere."""
    misfit = (log_mass - log_kept[:, None]).square().mean(0)
    return (misfit.argmin() + 1).expand(len(log_kept))


def _best_top_p(log_mass: Tensor, log_kept: Tensor) -> Tensor:
    """[N] tokens kept per row: the fewest that hold p. No p can be larger than the smallest mass that was kept."""
    smallest = min(0.0, float(log_kept.min()))
    candidates = [smallest - 1e-6, *(math.log(percent / 100) for percent in range(1, 100))]
    best = min(candidates, key=lambda log_p: _rms(_mass_of(log_mass, _counts(log_mass, log_p)) - log_kept))
    return _counts(log_mass, best)


def _counts(log_mass: Tensor, log_p: float) -> Tensor:
    return ((log_mass < log_p).sum(1) + 1).clamp(max=log_mass.shape[1])


def _mass_of(log_mass: Tensor, counts: Tensor) -> Tensor:
    return log_mass.gather(1, counts[:, None] - 1)[:, 0]


def _truncation(log_mass: Tensor, log_kept: Tensor, counts: Tensor, *, is_top_k: bool) -> Truncation:
    mass = _mass_of(log_mass, counts)
    left = mass - log_kept
    # top_p is above the mass before the last kept token and at most the mass with it, at every position
    before = torch.where(counts > 1, _mass_of(log_mass, (counts - 1).clamp(min=1)).exp(), 0.0)
    return Truncation(
        top_k=int(counts[0]) if is_top_k else None,
        top_p=None if is_top_k else (float(before.max()), float(mass.exp().min())),
        kept_mass=(float(mass.exp().min()), float(mass.exp().max())),
        rms=_rms(left),
        largest=float(left.abs().max()),
    )
