"""Layouts as a user writes them (`tp=2,pp=2,sp`), and the comparison of each with one process as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron_rl.errors import LayoutError
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.schema import LayoutConfig, Recipe
from megatron_rl.verify.table import columns

# float32 sums in another order. A gradient tensor is off by 1e-6 of its largest element on models of a few layers;
# a missing sum, a wrong factor or a shard in the wrong place is off by a tenth of it or more
GRADIENT_BOUND = 1e-4
# of the largest gradient element of the model: a tensor whose gradient cancels to less is compared with this
GRADIENT_FLOOR = 1e-5
LOSS_BOUND = 1e-5  # of the loss, or absolute where that is below 1
NORM_BOUND = 1e-5  # of the gradient norm
SHOWN = 8  # names of tensors

DEFAULTS = ("tp=2", "pp=2", "tp=2,pp=2,sp", "dp=2")
EXPERT_DEFAULTS = ("tp=2,sp", "pp=2", "dp=2", "dp=2,ep=2")
_NAMES = tuple(field.name for field in fields(ParallelLayout))


def is_override(text: str) -> bool:
    """Whether `text`, found behind layouts on the command line, is an override of the recipe."""
    key = text.partition("=")[0]
    return "." in key or key in [field.name for field in fields(Recipe)]


def parse_layout(text: str) -> ParallelLayout:
    """`tp=2,pp=2,sp`: what is not named is 1. Raises LayoutError for names and degrees that do not exist."""
    degrees: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in _NAMES:
            raise LayoutError(f"--layouts {text!r}: unknown {name!r}, allowed are {', '.join(_NAMES)}")
        if name == "sp" and value in ("", "true", "false"):
            degrees[name] = value != "false"
        elif name != "sp" and value.isdecimal():
            degrees[name] = int(value)
        else:
            raise LayoutError(
                f"--layouts {text!r}: got {part.strip()!r}, must look like {name}={'true' if name == 'sp' else 2}"
            )
    layout = ParallelLayout(**degrees)
    if layout.sp and layout.tp == 1:
        raise LayoutError(f"--layouts {text!r}: sp shards between tp ranks; add tp=2 or remove sp")
    return layout


def layout_text(layout: ParallelLayout) -> str:
    """The inverse of `parse_layout`, without what is at its default."""
    default = ParallelLayout()
    parts = [
        name if name == "sp" else f"{name}={getattr(layout, name)}"
        for name in _NAMES
        if getattr(layout, name) != getattr(default, name)
    ]
    return ",".join(parts) or "1 process"


def layout_config(layout: ParallelLayout) -> LayoutConfig:
    """The same as a recipe says it, where dp follows from the number of processes."""
    return LayoutConfig(
        **{f.name: getattr(layout, f.name) for f in fields(LayoutConfig)}  # the names are the same
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGap:
    """One gradient tensor against the reference: largest difference of any element held by any rank."""

    name: str  # of the Hugging Face tensor
    difference: float
    scale: float  # largest element of the reference, or the floor
    rank: int  # where the largest difference is

    @property
    def relative(self) -> float:
        return self.difference / self.scale if self.scale else (0.0 if self.difference == 0 else math.inf)

    @property
    def is_over(self) -> bool:
        # not a number is over every bound
        return not self.relative <= GRADIENT_BOUND

    def __str__(self) -> str:
        return f"{self.name} ({self.relative:.2g} of its largest element, rank {self.rank})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One batch through one layout. `gaps` is empty for the reference itself."""

    part: str  # sft or rl
    layout: str
    loss: float
    grad_norm: float
    gaps: tuple[TensorGap, ...] = ()
    unequal: tuple[str, ...] = ()  # tensors whose replicas differ after an optimizer step
    shares: tuple[float, float] | None = None  # RL: of tokens on which the upper and the lower clip act

    @property
    def over(self) -> list[TensorGap]:
        """Gradient tensors over the bound, the worst first."""
        return sorted((gap for gap in self.gaps if gap.is_over), key=lambda gap: -_sortable(gap.relative))

    @property
    def worst(self) -> TensorGap:
        return max(self.gaps, key=lambda gap: _sortable(gap.relative))

    def faults(self, reference: Measurement) -> list[str]:
        """What differs from the reference, in words; nothing when the layout is proven."""
        found = []
        if not abs(self.loss - reference.loss) <= LOSS_BOUND * max(1.0, abs(reference.loss)):
            found.append(f"the loss is {self.loss:.8g}, not {reference.loss:.8g}")
        if not abs(self.grad_norm - reference.grad_norm) <= NORM_BOUND * reference.grad_norm:
            found.append(f"the gradient norm is {self.grad_norm:.8g}, not {reference.grad_norm:.8g}")
        if self.over:
            found.append(f"{len(self.over)} of {len(self.gaps)} gradient tensors differ: {listed(self.over)}")
        if self.unequal:
            found.append(
                f"after one optimizer step {len(self.unequal)} tensors are not the same on all ranks that hold "
                f"them: {listed(self.unequal)}"
            )
        return found

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measurement:
        return cls(
            **{
                **data,
                "gaps": tuple(TensorGap(**gap) for gap in data["gaps"]),
                "unequal": tuple(data["unequal"]),
                "shares": tuple(data["shares"]) if data["shares"] else None,
            }
        )


def _sortable(value: float) -> float:
    return math.inf if math.isnan(value) else value


def listed(names: Sequence[object]) -> str:
    """The first few, and how many more there are."""
    rest = len(names) - SHOWN
    return ", ".join(str(name) for name in names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def layout_table(references: Sequence[Measurement], measured: Sequence[Measurement]) -> list[str]:
    """Lines of the table: each batch by one process, then by each layout."""
    rows = [("batch", "layout", "loss", "gradient norm", "worst gradient tensor", "over bound", "replicas")]
    for reference in references:
        loss, norm = f"{reference.loss:.7g}", f"{reference.grad_norm:.7g}"
        rows.append((reference.part, reference.layout, loss, norm, "", "", ""))
        for one in measured:
            if one.part != reference.part:
                continue
            rows.append(
                (
                    "",
                    one.layout,
                    f"{one.loss - reference.loss:+.1e}",
                    f"{one.grad_norm / reference.grad_norm - 1 if reference.grad_norm else 0.0:+.1e}",
                    f"{one.worst.relative:.1e} {one.worst.name}" if one.worst.difference else "all bit-equal",
                    f"{len(one.over)} of {len(one.gaps)}",
                    f"{len(one.unequal)} differ" if one.unequal else "equal",
                )
            )
    return columns(rows)
