"""What an engine process is started with; `devices` are added where it runs."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.rollout.wire import Message
from megatron_rl.rollout.yarn import Yarn


def start_message(
    config: EngineConfig,
    *,
    hf_path: str | Path,
    dtype: str,
    spec: ModelSpec,
    max_model_len: int,
    seed: int,
    threads: int = 1,
    yarn: Yarn | None = None,
) -> Message:
    """See `VllmEngine.start` for what each of them means."""
    return {
        "hf_path": str(Path(hf_path).absolute()),  # an engine host was started in another directory
        "dtype": dtype,
        "tp": config.tp,
        "seed": seed,
        "threads": threads,
        "max_model_len": max_model_len,
        "max_positions": spec.max_positions,
        "max_concurrent": config.max_concurrent,
        "kv_cache_gib": config.kv_cache_gib,
        "gpu_memory_fraction": config.gpu_memory_fraction,
        "vllm": dict(config.vllm),
        "sleep": config.sleep,
        "heartbeat_timeout_s": config.heartbeat_timeout_s,
        "hf_overrides": {} if yarn is None else yarn.overrides(spec),
    }
