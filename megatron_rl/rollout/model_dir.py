"""The model directory of a run on other machines: it has to be at the same path, and be the same model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron_rl.errors import EngineError
from megatron_rl.rollout.wire import Message


def describe_model(hf_path: str | Path) -> Message:
    """What `check_model` on another machine needs to know."""
    path = Path(hf_path).absolute()
    return {"hf_path": str(path), "config_digest": _digest(path / "config.json")}


def check_model(model: Message) -> None:
    """Raises EngineError unless the described model directory is on this machine too."""
    config = Path(model["hf_path"]) / "config.json"
    try:
        found = _digest(config)
    except OSError as error:
        raise EngineError(
            f"{config}: {error.strerror}; paths must be the same on all machines: share the file system, "
            f"or copy the model to the same place"
        ) from error
    if found != model["config_digest"]:
        raise EngineError(f"{config} differs from the trainer's; copy the model directory again")


def _digest(config: Path) -> str:
    return hashlib.sha256(config.read_bytes()).hexdigest()
