"""Starts the engine that `prepare_math_data.py --measure` asks for pass rates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from megatron_rl.data.prepare import Measure
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.data.types import Prompt
from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.rewards.protocol import Reward
from megatron_rl.rollout.measure import Sampling, measure_pass_rates
from megatron_rl.rollout.vllm_engine import VllmEngine


@contextlib.contextmanager
def measuring(
    model: Path, out: Path, *, sampling: Sampling, engine: EngineConfig, dtype: str, grader: Reward
) -> Iterator[Measure]:
    """A function that measures prompts with the weights of `model`, an engine running while it is needed."""
    tokenizer, spec = load_tokenizer(model), ModelSpec.from_hf(model)
    longest = min(sampling.max_prompt_tokens + sampling.max_tokens, spec.max_positions)
    with VllmEngine.start(
        engine,
        hf_path=model,
        dtype=dtype,
        spec=spec,
        max_model_len=longest,
        seed=sampling.seed,
        log_dir=out / "logs",
    ) as running:

        def measure(prompts: Iterable[Prompt]) -> Mapping[str, float]:
            return measure_pass_rates(
                prompts,
                engine=running,
                grader=grader,
                tokenizer=tokenizer,
                sampling=sampling,
                file=out / "measured.jsonl",
                say=lambda text: print(text, flush=True),
            )

        yield measure
