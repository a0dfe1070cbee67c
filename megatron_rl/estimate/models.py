"""Sizes of a model that is not on the disk yet: a config.json of the user's, or facts of a public one by name."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.errors import ModelError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.problems import did_you_mean

_OWN = Path(__file__).parent / "models"


def known_models() -> tuple[str, ...]:
    """Names of the public models whose sizes come with the package."""
    return tuple(sorted(path.stem for path in _OWN.glob("*.json")))


def named_spec(name_or_path: str, *, max_positions: int | None = None) -> ModelSpec:
    """The model of a config.json, of a directory with one, or of a known name. Raises ModelError for anything else."""
    known = known_models()
    if name_or_path in known:
        return ModelSpec.from_hf(_OWN / f"{name_or_path}.json", max_positions=max_positions)
    path = Path(name_or_path)
    if not path.exists():
        raise ModelError(
            f"--model-config: got {name_or_path!r}, must be a config.json, a directory with one, or one of "
            f"{', '.join(known)}{did_you_mean(name_or_path.lower(), known)}"
        )
    return ModelSpec.from_hf(path, max_positions=max_positions)
