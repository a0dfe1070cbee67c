"""A laptop's version of a recipe: a small model of the same kind, the first rows of the data, small batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rl.data.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.batch import OverlongConfig
from megatron_rl.recipe.dataset import DatasetConfig
from megatron_rl.recipe.origins import leaves
from megatron_rl.recipe.schema import LayoutConfig, Recipe
from megatron_rl.recipe.stages import CurriculumWindow, RlStage, SftStage, Stage
from megatron_rl.verify.shorten import with_coin
from megatron_rl.verify.shrink_data import cut_prompts, cut_samples
from megatron_rl.verify.shrink_model import Degrees, write_small_model

_SAMPLES, _PROMPTS, _GROUP, _RESPONSE = 8, 4, 4, 24  # of a small run


def shrink(
    recipe: Recipe, place: Path, *, layouts: Sequence[ParallelLayout], trains: bool
) -> tuple[Recipe, list[str]]:
    """A laptop's version of `recipe` below `place`, and what changed, in words.

    `layouts` must still split the model. `trains`: it will be run, so every group of rollouts must teach something,
    which the answers of a random model do not. Raises DataError for data of which nothing can be used.
    """
    layout = _small_layout(recipe.layout)
    every = [*layouts, _as_parallel(layout)]
    engines = [min(stage.engine.tp, 2) for stage in recipe.stages if isinstance(stage, RlStage)]
    degrees = Degrees(
        tp=tuple(sorted({each.tp for each in every} | set(engines))),
        stages=math.lcm(*(each.pp * each.vpp for each in every)),
        ep=math.lcm(*(each.ep for each in every)),
        expert_tp=math.lcm(*(each.expert_tp for each in every)),
    )
    source, model = Path(recipe.model.hf_path), place / "model"
    changes = write_small_model(source, model, degrees, seed=recipe.run.seed)
    tokenizer, dps = load_tokenizer(source), [each.dp for each in every]
    # padding of sequence parallelism must not outgrow a micro-batch
    cutter = _Cutter(place, tokenizer, shares=math.lcm(*dps), multiple=math.lcm(*degrees.tp), trains=trains)
    small = replace(
        recipe,
        # what a machine with GPUs may ask for, a laptop may not have
        model=replace(recipe.model, hf_path=str(model), checkpoint=None, spec="auto", kernels="auto"),
        layout=layout,
        # a proof is no experiment to keep
        run=replace(recipe.run, wandb=None),
        stages=tuple(cutter.stage(index, stage) for index, stage in enumerate(recipe.stages)),
    )
    return small, [*changes, *_differences(recipe, small)]


def _small_layout(layout: LayoutConfig) -> LayoutConfig:
    tp, pp, ep = (min(degree, 2) for degree in (layout.tp, layout.pp, layout.ep))
    return replace(
        layout,
        tp=tp,
        pp=pp,
        vpp=min(layout.vpp, 2),
        ep=ep,
        etp=None if layout.etp is None else min(layout.etp, tp),
        first_stage_layers=None,
        last_stage_layers=None,
    )


def _as_parallel(layout: LayoutConfig) -> ParallelLayout:
    return ParallelLayout(
        tp=layout.tp, pp=layout.pp, vpp=layout.vpp, dp=layout.ep, ep=layout.ep, etp=layout.etp
    )


class _Cutter:
    """Makes stages small; their data files go below `place`."""

    def __init__(
        self, place: Path, tokenizer: Tokenizer, *, shares: int, multiple: int, trains: bool
    ) -> None:
        """Samples of a step are a multiple of `shares`, tokens of a micro-batch of `multiple`."""
        self._place, self._tokenizer, self._trains = place, tokenizer, trains
        self._shares, self._multiple = shares, multiple

    def stage(self, index: int, stage: Stage) -> Stage:
        return self._sft(index, stage) if isinstance(stage, SftStage) else self._rl(index, stage)

    def _sft(self, index: int, stage: SftStage) -> SftStage:
        data = self._place / f"stage_{index}_sft.jsonl"
        longest = cut_samples(stage, data, self._tokenizer)
        return replace(
            stage,
            data=str(data),
            epochs=None,
            global_batch_size=self._rounded(min(stage.global_batch_size, _SAMPLES), self._shares),
            max_sample_tokens=longest,
            # about two of the longest samples, so that a step has several micro-batches
            tokens_per_microbatch=self._rounded(2 * longest, self._multiple),
        )

    def _rl(self, index: int, stage: RlStage) -> RlStage:
        prompts = self._place / f"stage_{index}_prompts.jsonl"
        # a random model measures no pass rates that a window could mean
        is_measured = stage.rescore is not None and any(window.pass_rate for window in stage.curriculum)
        windows = () if is_measured else stage.curriculum
        longest = self._cut(stage.prompts, prompts, stage, stage.dataset, windows)
        sets = {}
        for name, path in stage.eval.sets.items() if stage.eval else ():
            sets[name] = str(self._place / f"stage_{index}_eval_{name}.jsonl")
            longest = max(longest, self._cut(path, Path(sets[name]), stage, DatasetConfig(), ()))
        updates, group = min(stage.updates_per_rollout, 2), min(stage.group_size, _GROUP)
        per_update = _PROMPTS // updates
        while per_update * group % self._shares:
            per_update += 1
        response = min(stage.sampling.max_response_tokens, _RESPONSE)
        if stage.algorithm.kl is not None:
            # a directory of a model of the full size does not fit
            kl = replace(stage.algorithm.kl, reference=None)
            stage = replace(stage, algorithm=replace(stage.algorithm, kl=kl))
        if self._trains:
            # a random model solves nothing
            stage = with_coin(stage)
        return replace(
            stage,
            prompts=str(prompts),
            prompts_per_iteration=per_update * updates,
            group_size=group,
            updates_per_rollout=updates,
            tokens_per_microbatch=self._rounded(2 * (longest + response), self._multiple),
            sampling=replace(stage.sampling, max_prompt_tokens=longest, max_response_tokens=response),
            # rounds until outcomes differ would have no end
            dynamic_sampling=None,
            overlong=_overlong(stage.overlong, response),
            curriculum=windows,
            rescore=replace(stage.rescore, samples=2, drop_below=0.0) if stage.rescore else None,
            grader=replace(stage.grader, workers=1),
            engine=replace(
                stage.engine,
                tp=min(stage.engine.tp, 2),
                replicas=min(stage.engine.replicas, 2),
                hosts=(),
                secret_file=None,
                transport="auto",
                two_tier=False,
                max_concurrent=min(stage.engine.max_concurrent, 32),
                kv_cache_gib=1,
            ),
            eval=replace(stage.eval, sets=sets) if stage.eval else None,
        )

    def _cut(
        self,
        source: str,
        out: Path,
        stage: RlStage,
        dataset: DatasetConfig,
        windows: Sequence[CurriculumWindow],
    ) -> int:
        return cut_prompts(
            source,
            out,
            self._tokenizer,
            windows,
            max_tokens=stage.sampling.max_prompt_tokens,
            dataset=dataset,
            template=stage.prompt_template,
        )

    def _rounded(self, value: int, of: int) -> int:
        return -(-value // of) * of


def _overlong(overlong: OverlongConfig | None, response: int) -> OverlongConfig | None:
    if overlong is None or overlong.kind != "penalty":
        return overlong
    return replace(overlong, buffer_tokens=min(overlong.buffer_tokens, response))


def _differences(recipe: Recipe, small: Recipe) -> list[str]:
    before = {".".join(path): value for path, value in leaves(recipe)}
    changed = []
    for path, value in leaves(small):
        name = ".".join(path)
        if before.get(name) != value and not isinstance(value, str):
            changed.append(f"{name}: {before.get(name, 'nothing')} -> {value}")
        elif before.get(name) != value:
            changed.append(f"{name}: {before.get(name)} -> {Path(str(value)).name} of the proof")
    return changed
