"""What vLLM does on CPU when its own interface is used without our defences, and what becomes of it with them.

The first half of each test says why a defence is there. When one of them fails after an upgrade, vLLM may have
mended it, and the defence may go.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bare_vllm import DROPPED
from tests.helpers.engine import write_qwen2

ROOT = Path(__file__).parents[2]
BOUND = 1e-4  # float32 against float32, other kernels
WRONG = 0.1  # nats: no rounding
LINEAR = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests.helpers.bare_vllm` reports of one live engine."""
    root = tmp_path_factory.mktemp("bare")
    old, new = (write_qwen2(root / str(seed), seed=seed, tied=True) for seed in (1, 2))
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.bare_vllm", str(old), str(new)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_a_tied_head_stays_behind_unless_it_is_packed_again(seen):
    assert seen["tied_head"]["bare"] > WRONG
    assert seen["tied_head"]["ours"] < BOUND


def test_cached_prefixes_stay_behind_unless_the_cache_is_reset(seen):
    assert seen["prefix_cache"]["bare"] > WRONG
    assert seen["prefix_cache"]["ours"] < BOUND


def test_a_tensor_that_does_not_come_is_accepted_unless_we_count(seen):
    assert seen["missing_tensor"]["bare"] is None
    gap = seen["missing_tensor"]["bare_gap"]
    assert math.isnan(gap) or gap > WRONG
    assert f"loader stopped before {DROPPED} (and 0 more)" in seen["missing_tensor"]["ours"]
    assert seen["missing_tensor"]["ours_gap_after"] < BOUND


def test_checksums_of_vllm_do_not_see_a_packed_weight_change(seen):
    """Ours are of the bytes on the wire; that one wrong byte is noticed is tested with the transfer."""
    unchanged = set(seen["checksums"]["all"]) - set(seen["checksums"]["changed"])
    kinds = {name.split(".layers.")[-1].split(".", 1)[-1] for name in unchanged}
    assert kinds == {f"{layer}.weight" for layer in LINEAR}


def test_weights_loaded_past_the_layerwise_reload_are_refused_or_wrong(seen):
    """On CPU a live linear layer has no elements left to load into."""
    assert seen["plain_load"] is not None


def test_an_update_that_fails_halfway_is_the_end_unless_the_model_is_put_back(seen):
    failed = seen["failed_update"]
    assert failed["bare"] == failed["ours"] == "ConnectionError: the sender is gone"
    assert failed["bare_retry"] is not None
    assert failed["bare_answer"] is not None
    assert failed["bare_without_values"]
    assert failed["ours_without_values"] == []
    assert failed["ours_gap"] < BOUND
