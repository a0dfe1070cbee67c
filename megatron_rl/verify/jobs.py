"""What the ranks of a proof are told. Without torch: the command that starts them needs none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_rl.parallel.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutJob:
    """Layouts of one number of processes. The reference is written by a job of one process, and read by the others."""

    recipe: str  # in float32, with the weights in model.hf_path
    layouts: tuple[ParallelLayout, ...]
    place: str  # directory of the reference and of the measurements
    port: int  # where the ranks meet
    timeout_s: float

    @property
    def results(self) -> Path:
        return Path(self.place) / f"world_{self.layouts[0].world_size}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityJob:
    """The recipe's own layout."""

    recipe: str  # with the weights in model.hf_path
    layout: ParallelLayout
    place: str  # directory of the exported model, the logs and the result
    port: int
    timeout_s: float

    @property
    def results(self) -> Path:
        return Path(self.place) / "parity.json"
