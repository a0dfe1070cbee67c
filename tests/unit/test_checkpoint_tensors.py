"""What a failure while tensors are written or read becomes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl.errors import CheckpointError
from megatron_rl.platform.device import activate


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    activate()
    meeting = tmp_path_factory.mktemp("meeting") / "store"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _write(monkeypatch: pytest.MonkeyPatch, directory: Path, failure: BaseException) -> None:
    """Write nothing, and have `failure` come up in the last step."""
    from megatron_rl.model import checkpoint_tensors

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(checkpoint_tensors, "save_config", fail)
    prepared = checkpoint_tensors.Prepared(shards={}, common={})
    checkpoint_tensors.write_sharded(prepared, directory, dist.group.WORLD)


def test_an_interruption_while_writing_is_an_interruption(monkeypatch, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        _write(monkeypatch, tmp_path, KeyboardInterrupt())


def test_a_failure_while_writing_names_rank_and_reason(monkeypatch, tmp_path):
    with pytest.raises(CheckpointError, match="rank 0: OSError: no room; is the disk full"):
        _write(monkeypatch, tmp_path, OSError("no room"))
