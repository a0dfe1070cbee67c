"""The numbers of a run on Weights & Biases, where the recipe asks for it. A service that fails costs no run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.recipe.schema import WandbConfig


class Tracker:
    """One wandb run for each run directory, by an id made of its path: a resumed run continues it.

    `say` is told of the first thing that goes wrong; nothing is sent after it.
    """

    def __init__(
        self,
        config: WandbConfig,
        run_dir: Path,
        settings: Mapping[str, str],
        *,
        say: Callable[[str], None],
    ) -> None:
        self._say, self._run = say, None
        place = str(run_dir.resolve())
        self._run = self._try(
            lambda: _wandb(config).init(
                project=config.project,
                mode=config.mode,
                dir=place,
                name=run_dir.resolve().name,
                id=hashlib.sha256(place.encode()).hexdigest()[:16],
                resume="allow",
                config=dict(settings),
                # the console of a run is its own
                settings={"console": "off", "silent": True},
            ),
            cure="" if config.mode == "offline" else "; log in first (wandb login), or set mode to offline",
        )

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """The numbers of one step of the run's step axis."""
        run = self._run
        if run is not None:
            self._try(lambda: run.log(dict(values), step=step))

    def close(self) -> None:
        """Send what is left. Safe to call twice."""
        run, self._run = self._run, None
        if run is not None:
            self._try(run.finish)

    def _try(self, work: Callable[[], Any], *, cure: str = "") -> Any:
        try:
            return work()
        # a network, an account, another version of the package: none of it is part of the run
        except Exception as error:
            self._run = None
            cause = f"{type(error).__name__}: {error}".removesuffix(": ")
            self._say(f"run.wandb: given up for this run ({cause}){cure}")
            return None


def _wandb(config: WandbConfig) -> Any:
    import wandb

    # where it sees a terminal the package asks for an account and waits; nobody sits at a run to answer
    if config.mode == "online" and not wandb.login(timeout=1):
        raise PermissionError("no account")
    return wandb
