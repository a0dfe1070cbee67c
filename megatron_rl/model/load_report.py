"""What was read from a checkpoint when a run began: tensors, files, generators, and the layouts then and now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_rl.model.checkpoint_files import SavedState
from megatron_rl.model.checkpoint_tensors import Names

_DEGREES = ("tp", "pp", "vpp", "dp", "ep")


@dataclass(kw_only=True, slots=True)
class LoadReport:
    """Filled as the parts are loaded."""

    saved: SavedState
    layout: Mapping[str, Any]
    model: Names | None = None
    optimizer: Names | None = None  # None: a stage that begins with a new one
    generators: str = "left alone"
    verified: dict[str, float] = field(default_factory=lambda: {"files": 0, "bytes": 0, "seconds": 0.0})

    def line(self) -> str:
        """One line for the console."""
        parts = [
            f"{what} {names.loaded} of {names.expected} tensors, {len(names.missing)} missing, "
            f"{len(names.unexpected)} unexpected"
            for what, names in (("model", self.model), ("optimizer", self.optimizer))
            if names is not None
        ]
        if self.optimizer is None:
            parts.append("optimizer new")
        parts.append(f"generators {self.generators}")
        parts.append(f"{self.verified['files']:.0f} files as saved ({self.verified['seconds']:.1f} s)")
        parts.append(f"layout {_layout_text(self.saved.layout)}, now {_layout_text(self.layout)}")
        return f"loaded {self.saved.path}: {'; '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.saved.path),
            "progress": self.saved.progress,
            "optimizer_steps": self.saved.optimizer_steps,
            "recipe_digest": self.saved.recipe_digest,
            "model": _counts(self.model),
            "optimizer": _counts(self.optimizer),
            "generators": self.generators,
            "verified": self.verified,
            "layout_saved": self.saved.layout,
            "layout": self.layout,
        }


def _counts(names: Names | None) -> dict[str, Any] | None:
    return None if names is None else {"loaded": names.loaded, **asdict(names)}


def _layout_text(layout: Mapping[str, Any]) -> str:
    if not layout:
        return "of no run"
    parts = [f"{name}={layout[name]}" for name in _DEGREES if layout[name] > 1] + ["sp"] * bool(layout["sp"])
    return " ".join(parts) or "of one process"
