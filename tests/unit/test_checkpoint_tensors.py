"""What a failure while tensors are read becomes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.errors import CheckpointError
from megatron_rl.platform.device import activate


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    activate()
    meeting = tmp_path_factory.mktemp("meeting") / "store"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _read(monkeypatch: pytest.MonkeyPatch, directory: Path, failure: BaseException) -> None:
    """Read nothing, and have `failure` come up on rank 0."""
    from megatron_rl.model import checkpoint_tensors

    def fail(*_: object) -> None:
        raise CheckpointException("read", {0: (failure, traceback.StackSummary())})

    monkeypatch.setattr(checkpoint_tensors, "load_sharded_metadata", fail)
    checkpoint_tensors.read_sharded({}, directory)


def test_an_interruption_while_reading_is_an_interruption(monkeypatch, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        _read(monkeypatch, tmp_path, KeyboardInterrupt())


def test_a_failure_while_reading_names_rank_and_reason(monkeypatch, tmp_path):
    with pytest.raises(CheckpointError, match="rank 0: OSError: no such disk"):
        _read(monkeypatch, tmp_path, OSError("no such disk"))
