"""A trainer that owns a two-worker engine: pushes weights, prints JSON lines, then waits to be killed.

Run as `python -m tests.helpers.engine_owner OLD NEW LOGS` on models of `write_qwen2(..., tied=False)`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.weight_sync import WeightSync
from tests.helpers.engine import hf_weights, qwen2_spec, rank_params


def main(old_dir: str, new_dir: str, log_dir: str) -> None:
    torch.set_num_threads(1)
    spec, config = qwen2_spec(tied=False), EngineConfig(tp=2, max_concurrent=8)
    engine = VllmEngine.start(
        config, hf_path=old_dir, dtype="float32", spec=spec, max_model_len=64, seed=1, log_dir=log_dir
    )
    params = rank_params(spec, ParallelLayout(), 0, hf_weights(Path(new_dir)))
    sync = WeightSync(
        lambda: params, spec=spec, layout=ParallelLayout(), rank=0, engine=engine, config=config,
        dtype=torch.float32,
    )  # fmt: skip
    old = engine.score([3, 7, 9, 11, 250])
    sync.push(1)
    new = engine.score([3, 7, 9, 11, 250])
    print(json.dumps({"pid": engine.pids[0], "old": old, "new": new}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
