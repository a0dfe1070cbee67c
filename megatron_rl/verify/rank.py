"""What a rank of a proof runs: `python -m megatron_rl.verify.rank JOB`. The command that started it has the verdict."""

from __future__ import annotations

import pickle
import sys
import traceback
from pathlib import Path

from megatron_rl.errors import LostPeerError, MegatronRLError
from megatron_rl.platform.process import run_process
from megatron_rl.train import launcher, rank_process
from megatron_rl.verify.jobs import LayoutJob, ParityJob
from megatron_rl.verify.table import NOT_RUN


def start_ranks(job: object, *, nproc: int, place: Path) -> int:
    """Run `job` as `nproc` local processes and return their exit code; 0: each has done its part."""
    path = place / f"job_{nproc}.pickle"
    path.write_bytes(pickle.dumps(job))
    command = [sys.executable, "-m", "megatron_rl.verify.rank", str(path)]
    return launcher.launch_local(command, nproc=nproc, log_dir=place / "logs")


def main(path: str) -> int:
    """The exit code: 0, 1 for what is a consequence or a bug, 2 for what the user can act on."""
    place = rank_process.rank_environment()
    assert place is not None, "started by the command alone"
    rank_process.enter_rank()
    try:
        from megatron_rl.platform.loading import loading_libraries

        with loading_libraries():
            from megatron_rl.platform.device import import_megatron

            import_megatron()
        # written by the parent of this process a moment ago
        _run(pickle.loads(Path(path).read_bytes()), place.rank)
        return 0
    except LostPeerError as error:
        rank_process.report_failure(str(error), exit_code=1, is_consequence=True)
        return 1
    except MegatronRLError as error:
        rank_process.report_failure(str(error), exit_code=NOT_RUN)
        return NOT_RUN
    except KeyboardInterrupt:
        # the parent says so
        return 130
    except Exception:
        rank_process.report_failure(traceback.format_exc(), exit_code=1)
        return 1


def _run(job: object, rank: int) -> None:
    # loading megatron-core takes seconds, and the parent of the ranks imports this module too
    if isinstance(job, LayoutJob):
        from megatron_rl.verify.layout_rank import run_layouts

        run_layouts(job, rank=rank)
        return
    from megatron_rl.verify.parity_rank import run_parity

    assert isinstance(job, ParityJob)
    run_parity(job, rank=rank)


if __name__ == "__main__":
    run_process(lambda: main(sys.argv[1]))
