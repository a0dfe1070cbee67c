"""Two runs of one recipe compared step by step. Reads run directories; starts nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.verify.table import columns, cut

ACROSS_BOUND = 1e-6  # of the loss, in the first step of another layout: sums in another order
# later steps: the optimizer divides by moments near zero, which makes whole steps of rounding
DRIFT_BOUND = 1e-5
_SHOWN_ROWS, _SHOWN_NAMES = 24, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What a run left that another start of it must leave too."""

    lines: list[dict[str, Any]]  # of metrics.jsonl, in file order
    rollouts: Mapping[str, str] = field(default_factory=dict)  # file name: digest of its bytes
    model: str = ""  # digest of the final weights; empty: none were written

    @classmethod
    def read(cls, run_dir: Path) -> RunRecord:
        text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
        files = sorted((run_dir / "rollouts").glob("*.jsonl"))
        weights = sorted((run_dir / "model").glob("*.safetensors"))
        return cls(
            lines=[json.loads(line) for line in text.split("\n") if line],
            rollouts={path.name: _digest([path]) for path in files},
            model=_digest(weights) if weights else "",
        )

    def num_rl_updates(self) -> int:
        """RL iterations that changed the weights."""
        return sum(line.get("policy/grad_norm", 0.0) > 0.0 for line in self.lines)


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def is_clock(name: str) -> bool:
    """Whether a metric is wall time or made of it, or memory, which no two runs share."""
    return name == "engine/imbalance" or name.startswith(("time/", "throughput/", "memory/")) or name.endswith("_s")


def exact_faults(straight: RunRecord, resumed: RunRecord) -> list[str]:
    """What is not bit for bit the same, in words."""
    faults = list(_step_faults(straight, resumed))
    for want, got in zip(straight.lines, resumed.lines, strict=False):
        names = _different(want, got)
        if names:
            shown = ", ".join(f"{n} {want.get(n)} became {got.get(n)}" for n in names[:_SHOWN_NAMES])
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            faults.append(f"step {want['step']} ({want['stage']}): {shown}{more}")
            # the rest follows from it
            break
    names = sorted(straight.rollouts.keys() | resumed.rollouts.keys())
    changed = [name for name in names if straight.rollouts.get(name) != resumed.rollouts.get(name)]
    if changed:
        faults.append(f"{len(changed)} of {len(names)} rollout files differ, the first is {changed[0]}")
    if straight.model != resumed.model:
        faults.append(
            f"the final weights differ: {straight.model[:16] or 'none'} became {resumed.model[:16] or 'none'}"
        )
    return faults


def across_faults(straight: RunRecord, resumed: RunRecord, *, resumed_after: int) -> list[str]:
    """SFT losses of a run that went on in another layout after so many steps, within the bounds, in words."""
    faults = list(_step_faults(straight, resumed))
    for want, got in zip(straight.lines, resumed.lines, strict=False):
        gap, bound = _loss_gap(want, got), _bound(want["step"], resumed_after)
        if not gap <= bound:
            faults.append(
                f"step {want['step']}: loss {want['sft/loss']} became {got['sft/loss']}, bound {bound:g}"
            )
    return faults


def _bound(step: int, resumed_after: int) -> float:
    if step <= resumed_after:
        return 0.0
    return ACROSS_BOUND if step == resumed_after + 1 else DRIFT_BOUND


def _loss_gap(want: Mapping[str, Any], got: Mapping[str, Any]) -> float:
    return float(abs(want["sft/loss"] - got["sft/loss"]) / max(1.0, abs(want["sft/loss"])))


def _step_faults(straight: RunRecord, resumed: RunRecord) -> Iterator[str]:
    want, got = ([line["step"] for line in record.lines] for record in (straight, resumed))
    if want != got:
        yield f"metrics.jsonl has the steps {_ranges(got)}, not {_ranges(want)} once each"


def _ranges(steps: Sequence[int]) -> str:
    return f"{steps}" if len(steps) <= 2 * _SHOWN_ROWS else f"{steps[:_SHOWN_ROWS]} ..."


def _different(want: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    names = sorted(name for name in want.keys() | got.keys() if not is_clock(name))
    return [name for name in names if want.get(name) != got.get(name)]


def steps_table(straight: RunRecord, resumed: RunRecord, *, across: bool) -> list[str]:
    """One line per step, cut in the middle when long."""
    rows = [("step", "stage", "loss", "gradient norm", "learning rate", "rollouts", "resumed")]
    by_step = {line["step"]: line for line in resumed.lines}
    for line in straight.lines:
        got = by_step.get(line["step"], {})
        name = f"iter_{line.get('iteration', 0):06d}.jsonl"
        has_rollouts = name in straight.rollouts and "sft/loss" not in line
        rows.append(
            (
                str(line["step"]),
                str(line["stage"]),
                _number(line.get("sft/loss", line.get("policy/loss"))),
                _number(line.get("sft/grad_norm", line.get("policy/grad_norm"))),
                _number(line.get("optim/lr")),
                straight.rollouts[name][:8] if has_rollouts else "",
                _how(line, got, across=across),
            )
        )
    heading, *lines = columns(rows)
    return [heading, *cut(lines, limit=_SHOWN_ROWS)]


def _how(want: Mapping[str, Any], got: Mapping[str, Any], *, across: bool) -> str:
    if not got:
        return "missing"
    if across:
        return f"loss {got['sft/loss'] - want['sft/loss']:+.1e}"
    different = _different(want, got)
    compared = sum(not is_clock(name) for name in want)
    return f"{len(different)} of {compared} values differ" if different else f"{compared} values equal"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.7g}"
