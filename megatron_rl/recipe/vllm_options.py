"""`engine.vllm`: which options vLLM has and which values they take, by the source that is installed, and which of them
are not the recipe's to set there. Never imports vLLM, which takes a minute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.recipe.problems import Problem, did_you_mean, show
from megatron_rl.recipe.vllm_source import Argument, read_arguments

_ROLLOUTS = "rollouts are sampled one way alone, which training relies on; remove it"
_MODEL = "set model.hf_path"
_LOCAL = "a model is a directory, never a download, and a recipe is copied into the run's records; remove it"
_TOKENS = "prompts arrive as tokens of the tokenizer in model.hf_path; remove it"
_LENGTH = "set sampling.max_prompt_tokens and sampling.max_response_tokens"
_PARALLEL = "an engine is split by engine.tp alone; set that, and engine.replicas for more of them"
_WEIGHTS = "weights come from the trainer, in model.dtype; remove it"

# what our engines set themselves, or what would not hold with them: what to do instead
OWNED: Mapping[str, str] = {
    "model": _MODEL,
    "model_weights": _MODEL,
    "hf_config_path": _MODEL,
    "revision": _MODEL,
    "code_revision": _LOCAL,
    "download_dir": _LOCAL,
    "hf_token": _LOCAL,
    "runner": _ROLLOUTS,
    "convert": _ROLLOUTS,
    "tokenizer": _TOKENS,
    "tokenizer_mode": _TOKENS,
    "tokenizer_revision": _TOKENS,
    "skip_tokenizer_init": _TOKENS,
    "dtype": "set model.dtype",
    "seed": "set run.seed",
    "max_model_len": _LENGTH,
    "max_num_seqs": "set engine.max_concurrent",
    "gpu_memory_utilization": "set engine.gpu_memory_fraction",
    "kv_cache_memory_bytes": "set engine.kv_cache_gib, or engine.gpu_memory_fraction on GPUs",
    "tensor_parallel_size": "set engine.tp",
    "pipeline_parallel_size": _PARALLEL,
    "prefill_context_parallel_size": _PARALLEL,
    "decode_context_parallel_size": _PARALLEL,
    "data_parallel_size": _PARALLEL,
    "data_parallel_size_local": _PARALLEL,
    "data_parallel_rank": _PARALLEL,
    "data_parallel_start_rank": _PARALLEL,
    "data_parallel_address": _PARALLEL,
    "data_parallel_rpc_port": _PARALLEL,
    "data_parallel_backend": _PARALLEL,
    "data_parallel_external_lb": _PARALLEL,
    "data_parallel_hybrid_lb": _PARALLEL,
    "data_parallel_multi_port_external_lb": _PARALLEL,
    "enable_elastic_ep": _PARALLEL,
    "enable_expert_parallel": _PARALLEL,
    "enable_eplb": _PARALLEL,
    "nnodes": "set engine.hosts",
    "node_rank": "set engine.hosts",
    "master_addr": "set engine.hosts",
    "master_port": "set engine.hosts",
    "device_ids": "each replica gets the next engine.tp of the GPUs in CUDA_VISIBLE_DEVICES; remove it",
    "distributed_executor_backend": "set engine.hosts for other machines; workers of one are processes",
    "worker_cls": _WEIGHTS,
    "worker_extension_cls": _WEIGHTS,
    "scheduler_cls": _ROLLOUTS,
    "load_format": _WEIGHTS,
    "weight_transfer_config": _WEIGHTS,
    "quantization": _WEIGHTS,
    "quantization_config": _WEIGHTS,
    "enable_lora": _WEIGHTS,
    "hf_overrides": "set model.max_positions for more positions; the rest is config.json's",
    "enable_sleep_mode": "set engine.sleep",
    "sleep_preserve_parameter_names": "every parameter arrives with the next transfer; remove it",
    "logprobs_mode": _ROLLOUTS,
    "max_logprobs": _ROLLOUTS,
    "generation_config": "set sampling; generation_config.json is not read",
    "override_generation_config": "set sampling; generation_config.json is not read",
    "logits_processors": _ROLLOUTS,
    "speculative_config": _ROLLOUTS,
    "spec_method": _ROLLOUTS,
    "spec_model": _ROLLOUTS,
    "spec_tokens": _ROLLOUTS,
    "watermark_config": _ROLLOUTS,
    "stream_interval": "completions are taken whole; remove it",
    "disable_log_stats": "metrics are the trainer's; see metrics.jsonl, or remove it",
}


def vllm_options() -> Mapping[str, Argument] | None:
    """Each argument of the installed vLLM by name. None without vLLM, or with one that keeps them elsewhere."""
    spec = find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    return read_arguments(Path(places[0])) if places else None


def option_problems(options: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """What is wrong with `engine.vllm`, at dotted path `path`."""
    known = vllm_options() if options else None
    for name, value in options.items():
        place = f"{path}.{name}"
        if name in OWNED:
            yield Problem(place, f"is not set here: {OWNED[name]}")
        elif known is None:
            continue
        elif name not in known:
            free = [each for each in known if each not in OWNED]
            yield Problem(place, f"the installed vLLM has no such argument{did_you_mean(name, free)}")
        elif not known[name].takes(value):
            hint = did_you_mean(value, known[name].spellings())
            yield Problem(place, f"got {show(value)}, vLLM takes {known[name]}{hint}")


def unchecked_notice(options: Mapping[str, Any]) -> str | None:
    """What could not be looked at on this machine; None where everything was."""
    if not options or vllm_options() is not None:
        return None
    return f"{', '.join(options)}: not checked, vLLM is not installed here"
