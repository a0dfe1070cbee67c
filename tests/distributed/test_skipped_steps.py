"""A gradient with inf on one rank: no rank takes the step, and the next ones go as if it had not been."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.models import make_tiny_hf
from tests.helpers.training import Run, Session

# of steps 0 to 3, the two that are spoilt
SPOILT = range(1, 3)


def _train(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    from megatron_rl.errors import TrainingError
    from megatron_rl.parallel import groups

    groups.init_process_groups(
        run.layout(world_size), rank=rank, world_size=world_size, master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]), timeout_s=60,
    )  # fmt: skip
    found: dict[str, Any] = {}

    undisturbed = Session(run, rank, world_size)
    undisturbed.start_stage()
    found["undisturbed"] = [undisturbed.train(step, step + 1) for step in (0, 3)]

    session = Session(run, rank, world_size)
    stage = session.recipe.stages[1]
    session.policy.start_stage(
        replace(stage.optimizer, max_skipped_steps=len(SPOILT)), stage.schedule, total_steps=stage.steps
    )
    first = session.train(0, 1)
    with _spoilt(session, on=rank == 1):
        found["skipped"] = [session.train(step, step + 1)["weights"] == first["weights"] for step in SPOILT]
        found["in_a_row"] = session.policy.optimizer.skipped_in_a_row
    found["disturbed"] = [first, session.train(3, 4)]
    found["steps"] = (session.policy.optimizer.num_steps, session.policy.optimizer.skipped_in_a_row)

    # a run that resumes goes on counting where it was
    session.policy.optimizer.skipped_in_a_row = 1
    with _spoilt(session, on=rank == 1):
        session.train(4, 5)
        with pytest.raises(TrainingError, match="as in 3 steps in a row") as refused:
            session.train(5, 6)
    found["message"] = str(refused.value)
    groups.destroy_process_groups()
    return found


class _spoilt:
    """While it lasts, the gradient of one parameter of this rank is infinite."""

    def __init__(self, session: Session, *, on: bool) -> None:
        self._weight = next(session.policy.chunks[0].parameters())
        self._on = on

    def __enter__(self) -> None:
        self._hook = self._weight.register_hook(lambda grad: grad + float("inf")) if self._on else None

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()


@pytest.mark.timeout(300)
def test_steps_with_inf_on_one_rank_are_skipped_by_all_and_one_too_many_ends_the_run(tmp_path: Path) -> None:
    hf_path = make_tiny_hf(tmp_path / "model")
    for found in run_distributed(
        _train, 2, Run(hf_path=str(hf_path), root=str(tmp_path / "run")), timeout_s=240
    ):
        assert found["skipped"] == [True, True]
        assert found["in_a_row"] == 2
        # losses, gradient norms, learning rates and weights of the steps that were taken: bit for bit
        for name in ("steps", "weights"):
            disturbed, undisturbed = (
                [step[name] for step in found[which]] for which in ("disturbed", "undisturbed")
            )
            assert disturbed == undisturbed, name
        assert found["steps"] == (2, 0)
        assert "allow more than optimizer.max_skipped_steps = 2" in found["message"]
