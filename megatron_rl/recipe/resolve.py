"""Whether a recipe fits a number of processes and a model, and the numbers that follow from it.

Pure arithmetic and a look at the disk: no torch, no processes. Every violation is reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

# unlike those of Path they say no to what no file can be called
from os.path import exists, isdir, isfile
from pathlib import Path

from megatron_rl.errors import LayoutError, MegatronRLError, ModelError
from megatron_rl.model.hf_tables import hf_tensors, padded_vocab
from megatron_rl.model.spec import ModelSpec
from megatron_rl.model.splits import split_problems
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.amounts import most_prompts_drawn
from megatron_rl.recipe.checks import nearest_multiples, optimizer_steps, stage_problems
from megatron_rl.recipe.load import LoadedRecipe
from megatron_rl.recipe.problems import Problem, raise_problems, shortened
from megatron_rl.recipe.profile_checks import profile_problems
from megatron_rl.recipe.reward_checks import reward_problems
from megatron_rl.recipe.schema import LayoutConfig, Recipe
from megatron_rl.recipe.stages import RlStage, SftStage, Stage
from megatron_rl.recipe.tracking import tracking_problems
from megatron_rl.recipe.transfer import bucket_problems
from megatron_rl.reshard.tables import check_served, check_target


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedStage:
    """Numbers of one stage. An iteration of an SFT stage is one optimizer step."""

    kind: str
    iterations: int
    optimizer_steps: int
    samples_per_step: int  # samples or rollouts of one optimizer step, all dp ranks
    samples_per_step_per_dp: int
    rollouts_per_iteration: int  # 0 for SFT
    max_tokens_per_iteration: int  # prompt and response, if every sample is as long as allowed
    max_tokens_total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """What follows from a recipe, a world and a model."""

    layout: ParallelLayout
    spec: ModelSpec
    num_parameters: int
    padded_vocab: int  # embedding rows over all tp ranks
    layers_per_pp_rank: int  # of the stage with the most
    stage_layers: tuple[int, ...]  # of each pipeline stage
    stages: tuple[ResolvedStage, ...]
    unchecked: tuple[Problem, ...] = ()  # of a plan: what is not there yet, and so was not looked into


def smallest_world(recipe: Recipe) -> int:
    """Fewest processes that the layout fits: one replica of the model, or as many as its experts are dealt to."""
    layout = recipe.layout
    stage_ranks = math.lcm(layout.tp, layout.ep * (layout.etp or layout.tp))
    return stage_ranks * layout.pp


def run_layout(layout: LayoutConfig, *, world_size: int) -> ParallelLayout:
    """The recipe's layout over `world_size` processes. Raises LayoutError when it does not come out even."""
    return ParallelLayout.for_world(
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        sp=layout.sp,
        ep=layout.ep,
        etp=layout.etp,
        first_stage_layers=layout.first_stage_layers,
        last_stage_layers=layout.last_stage_layers,
        world_size=world_size,
    )


def check_recipe(
    loaded: LoadedRecipe, *, world_size: int, model_spec: ModelSpec | None = None, planned: bool = False
) -> Resolved:
    """Check everything that can be checked before a process starts, and derive the numbers.

    `model_spec` None reads `model.hf_path`. `planned`: files and directories that are not there are no violations but
    `Resolved.unchecked`, except for a model that nothing else describes. Raises RecipeError, one line per violation.
    """
    recipe = loaded.recipe
    absent = [*_file_problems(recipe), *tracking_problems(recipe.run)]
    problems = [*([] if planned else absent), *_eval_name_problems(recipe)]
    if planned and model_spec is None:
        model = [problem for problem in absent if problem.path == "model.hf_path"]
        problems += [Problem(p.path, f"{p.text}; a plan needs its sizes: --model-config") for p in model]
    layout, spec, found = _fit(recipe, world_size, model_spec)
    problems += found
    for i, stage in enumerate(recipe.stages):
        reference = list(_reference_problems(stage, f"stages.{i}.algorithm.kl.reference", spec))
        if planned and reference and not _has_reference(stage):
            absent += reference
        else:
            problems += reference
    if problems or layout is None or spec is None:
        raise_problems(loaded.source, problems, loaded.places)
    stage_layers = layout.stage_layers(spec.num_layers)
    return Resolved(
        layout=layout,
        spec=spec,
        num_parameters=sum(math.prod(shape) for shape in hf_tensors(spec).values()),
        padded_vocab=padded_vocab(spec.vocab_size, layout.tp),
        layers_per_pp_rank=max(stage_layers),
        stage_layers=stage_layers,
        stages=tuple(_resolve_stage(stage, layout.dp) for stage in recipe.stages),
        unchecked=tuple(absent) if planned else (),
    )


def check_without_files(loaded: LoadedRecipe, *, world_size: int) -> None:
    """What `check_recipe` finds wrong on a machine that may have neither the model nor the data: with the recipe alone,
    and with its model if that is there. Raises RecipeError, one line per violation."""
    problems = [*_eval_name_problems(loaded.recipe), *_fit(loaded.recipe, world_size, None)[2]]
    if problems:
        raise_problems(loaded.source, problems, loaded.places)


def _fit(
    recipe: Recipe, world_size: int, spec: ModelSpec | None
) -> tuple[ParallelLayout | None, ModelSpec | None, list[Problem]]:
    """Layout and model, as far as there are any, and all that does not fit them or together."""
    problems: list[Problem] = []
    layout = _layout(recipe, world_size, problems)
    spec = spec or _spec(recipe, problems)
    for i, stage in enumerate(recipe.stages):
        path = f"stages.{i}"
        problems += stage_problems(stage, path)
        problems += reward_problems(stage, path)
        problems += _routing_problems(stage, path, recipe)
        if layout is not None:
            problems += _dp_problems(stage, path, layout.dp)
            problems += _padding_problems(stage, path, layout)
        if spec is not None:
            problems += _length_problems(stage, path, spec)
            if isinstance(stage, RlStage):
                problems += bucket_problems(stage, path, spec, dtype=recipe.model.dtype)
    problems += profile_problems(recipe)
    if spec is not None:
        problems += _split_problems(recipe, spec)
    return layout, spec, problems


def layout_problems(recipe: Recipe, layout: ParallelLayout, spec: ModelSpec) -> Iterator[Problem]:
    """Why `layout`, in the place of the recipe's own, would not do for its batches and its model."""
    for i, stage in enumerate(recipe.stages):
        yield from _dp_problems(stage, f"stages.{i}", layout.dp)
        yield from _padding_problems(stage, f"stages.{i}", layout)
    for text in split_problems(spec, layout):
        yield _as_problem(LayoutError(text), "layout")


def _layout(recipe: Recipe, world_size: int, problems: list[Problem]) -> ParallelLayout | None:
    try:
        return run_layout(recipe.layout, world_size=world_size)
    except LayoutError as error:
        problems.append(_as_problem(error, "layout"))
        return None


def _spec(recipe: Recipe, problems: list[Problem]) -> ModelSpec | None:
    if not isdir(recipe.model.hf_path):
        return None
    try:
        return ModelSpec.from_hf(recipe.model.hf_path, max_positions=recipe.model.max_positions)
    except ModelError as error:
        problems.append(Problem("model.hf_path", str(error)))
        return None


def _file_problems(recipe: Recipe) -> Iterator[Problem]:
    """Each file or directory that a stage will read and that is not there."""
    hf_path = Path(recipe.model.hf_path)
    if not isdir(hf_path):
        yield _missing("model.hf_path", hf_path, "directory")
    if recipe.model.checkpoint is not None and not isdir(recipe.model.checkpoint):
        yield _missing("model.checkpoint", Path(recipe.model.checkpoint), "directory")
    for i, stage in enumerate(recipe.stages):
        if isinstance(stage, SftStage):
            files = {f"stages.{i}.data": stage.data}
        else:
            sets = stage.eval.sets if stage.eval is not None else {}
            files = {f"stages.{i}.prompts": stage.prompts}
            files |= {f"stages.{i}.eval.sets.{name}": path for name, path in sets.items()}
            if stage.engine.secret_file is not None:
                files[f"stages.{i}.engine.secret_file"] = stage.engine.secret_file
        for dotted, file in files.items():
            # a directory stands for the data files in it
            is_there = isfile(file) if dotted.endswith("secret_file") else exists(file)
            if not is_there:
                yield _missing(dotted, Path(file), "file")


def _reference_problems(stage: Stage, path: str, spec: ModelSpec | None) -> Iterator[Problem]:
    """A reference policy of its own is scored in the place of the trained one, so it has to have its tensors."""
    kl = stage.algorithm.kl if isinstance(stage, RlStage) else None
    if kl is None or kl.reference is None:
        return
    if not isdir(kl.reference):
        yield _missing(path, Path(kl.reference), "directory")
        return
    try:
        other = ModelSpec.from_hf(Path(kl.reference))
    except ModelError as error:
        yield Problem(path, str(error))
        return
    if spec is not None and hf_tensors(other) != hf_tensors(spec):
        yield Problem(
            path,
            f"{kl.reference} is a model of another shape than model.hf_path; name one with the same tensors",
        )


def _has_reference(stage: Stage) -> bool:
    kl = stage.algorithm.kl if isinstance(stage, RlStage) else None
    return kl is not None and kl.reference is not None and isdir(kl.reference)


def _routing_problems(stage: Stage, path: str, recipe: Recipe) -> Iterator[Problem]:
    """Batches that depend on time, where somebody asked for the same bits every time."""
    if isinstance(stage, RlStage) and stage.engine.routing == "least_loaded" and recipe.run.deterministic:
        yield Problem(
            f"{path}.engine.routing",
            "got least_loaded with run.deterministic: true, but which requests an engine decodes together then "
            "depends on time, and with it the last bits of log-probs; use even, or leave run.deterministic out",
        )


def _eval_name_problems(recipe: Recipe) -> Iterator[Problem]:
    """One name for two files would make one curve of what cannot be compared."""
    files: dict[str, tuple[str, str]] = {}
    for i, stage in enumerate(recipe.stages):
        for name, file in stage.eval.sets.items() if isinstance(stage, RlStage) and stage.eval else ():
            place, first = files.setdefault(name, (f"stages.{i}.eval.sets.{name}", file))
            if file != first:
                yield Problem(
                    f"stages.{i}.eval.sets.{name}",
                    f"is {file}, but {place} of the same name is {first}; give one of them another name",
                )


def _missing(dotted: str, path: Path, what: str) -> Problem:
    shown = shortened(str(path))
    if path.is_absolute():
        return Problem(dotted, f"no {what} {shown}")
    more = "; models are read from disk, nothing is downloaded" if what == "directory" else ""
    return Problem(
        dotted, f"no {what} {shown} in {Path.cwd()}; relative paths start at the current directory{more}"
    )


def _split_problems(recipe: Recipe, spec: ModelSpec) -> Iterator[Problem]:
    """Model sizes that the trainer's or an engine's degrees do not divide."""
    try:
        # whether it fits the number of processes has its own line
        layout = run_layout(recipe.layout, world_size=smallest_world(recipe))
    except LayoutError:
        layout = ParallelLayout(tp=recipe.layout.tp, sp=recipe.layout.sp)
    for problem in split_problems(spec, layout):
        yield _as_problem(LayoutError(problem), "layout")
    if any(isinstance(stage, RlStage) for stage in recipe.stages):
        try:
            check_served(spec)
        except ModelError as error:
            yield _as_problem(error, "model.hf_path")
    for i, stage in enumerate(recipe.stages):
        if isinstance(stage, RlStage):
            try:
                check_target(spec, tp=stage.engine.tp)
            except LayoutError as error:
                yield Problem(f"stages.{i}.engine.tp", _as_problem(error, "engine.tp").text)


def _as_problem(error: MegatronRLError, fallback: str) -> Problem:
    """Errors of the layout start with their own dotted path."""
    path, colon, text = str(error).partition(": ")
    return Problem(path, text) if colon and " " not in path else Problem(fallback, str(error))


def _dp_problems(stage: Stage, path: str, dp: int) -> Iterator[Problem]:
    if isinstance(stage, SftStage):
        if stage.global_batch_size % dp:
            yield Problem(
                f"{path}.global_batch_size",
                f"got {stage.global_batch_size}, must be a multiple of the {dp} data-parallel ranks; "
                f"use {nearest_multiples(stage.global_batch_size, dp)}",
            )
        return
    samples = samples_per_step(stage)
    # prompts that do not split into updates have their own line
    if stage.prompts_per_iteration % stage.updates_per_rollout == 0 and samples % dp:
        fitting = stage.updates_per_rollout * dp // math.gcd(dp, stage.group_size)
        yield Problem(
            f"{path}.prompts_per_iteration",
            f"prompts_per_iteration / updates_per_rollout * group_size = {stage.prompts_per_iteration} / "
            f"{stage.updates_per_rollout} * {stage.group_size} = {samples} rollouts per optimizer step, "
            f"must be a multiple of the {dp} data-parallel ranks; "
            f"use {nearest_multiples(stage.prompts_per_iteration, fitting)} prompts",
        )


def _padding_problems(stage: Stage, path: str, layout: ParallelLayout) -> Iterator[Problem]:
    """Sequence parallelism pads a micro-batch to a multiple of tp, so only whole multiples can be filled."""
    positions = longest_sample(stage) - 1  # the last token is only predicted
    budget = stage.tokens_per_microbatch
    # one below the longest sample has its own line
    if layout.sp and budget > positions > budget // layout.tp * layout.tp:
        yield Problem(
            f"{path}.tokens_per_microbatch",
            f"got {budget}, of which layout.sp with tp = {layout.tp} can fill {budget // layout.tp * layout.tp}, "
            f"but the longest sample takes {positions} positions; "
            f"raise it to {-(-positions // layout.tp) * layout.tp} or lower the longest sample",
        )


def _length_problems(stage: Stage, path: str, spec: ModelSpec) -> Iterator[Problem]:
    if isinstance(stage, RlStage) and stage.eval is not None and stage.eval.max_response_tokens is not None:
        tokens, prompt = stage.eval.max_response_tokens, stage.sampling.max_prompt_tokens
        if prompt + tokens > spec.max_positions:
            yield Problem(
                f"{path}.eval.max_response_tokens",
                f"sampling.max_prompt_tokens + eval.max_response_tokens = {prompt} + {tokens} = {prompt + tokens}, "
                f"but the model has {spec.max_positions} positions; lower it, or evaluate the exported model with "
                f"`megatron-rl eval --yarn FACTOR`",
            )
    longest = longest_sample(stage)
    if longest <= spec.max_positions:
        return
    if isinstance(stage, SftStage):
        yield Problem(
            f"{path}.max_sample_tokens",
            f"got {longest}, but the model has {spec.max_positions} positions; use at most that many, "
            "or set model.max_positions if its rotary base serves more",
        )
    else:
        sampling = stage.sampling
        yield Problem(
            f"{path}.sampling.max_response_tokens",
            f"max_prompt_tokens + max_response_tokens = {sampling.max_prompt_tokens} + "
            f"{sampling.max_response_tokens} = {longest}, but the model has {spec.max_positions} positions; "
            "lower one of them, or set model.max_positions if its rotary base serves more",
        )


def samples_per_step(stage: Stage) -> int:
    """Samples or rollouts of one optimizer step, all dp ranks."""
    if isinstance(stage, SftStage):
        return stage.global_batch_size
    return stage.prompts_per_iteration // stage.updates_per_rollout * stage.group_size


def longest_sample(stage: Stage) -> int:
    """Tokens, prompt and response."""
    if isinstance(stage, SftStage):
        return stage.max_sample_tokens
    return stage.sampling.max_prompt_tokens + stage.sampling.max_response_tokens


def _resolve_stage(stage: Stage, dp: int) -> ResolvedStage:
    if isinstance(stage, RlStage):
        iterations, rollouts = stage.iterations, most_prompts_drawn(stage) * stage.group_size
    else:
        iterations, rollouts = stage.steps, 0
    samples = samples_per_step(stage)
    tokens = (rollouts or samples) * longest_sample(stage)
    return ResolvedStage(
        kind=stage.kind,
        iterations=iterations,
        optimizer_steps=optimizer_steps(stage),
        samples_per_step=samples,
        samples_per_step_per_dp=samples // dp,
        rollouts_per_iteration=rollouts,
        max_tokens_per_iteration=tokens,
        max_tokens_total=tokens * iterations,
    )
