"""One run on one rank: set up once, then the stages in order; resumes in the middle of one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from megatron_rl.data.seeds import derive_seed
from megatron_rl.data.sft_data import SftData, load_sft_data
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import EngineError
from megatron_rl.evaluation.in_training import longest_sequence
from megatron_rl.model.checkpoint import CheckpointStore, SavedState
from megatron_rl.model.checkpoint_files import find_checkpoint
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.groups import (
    destroy_process_groups,
    init_process_groups,
    new_border_group,
    new_driver_group,
)
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform import device
from megatron_rl.platform.determinism import is_deterministic, make_deterministic
from megatron_rl.platform.network import choose_gloo_interface
from megatron_rl.recipe.load import LoadedRecipe, compat_line
from megatron_rl.recipe.profile_checks import passed_window, steps_before
from megatron_rl.recipe.resolve import run_layout
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import RlStage, SftStage
from megatron_rl.rollout.replicas import check_hosts
from megatron_rl.rollout.start_message import start_message
from megatron_rl.rollout.vllm_trial import refusal
from megatron_rl.train.context import RunContext
from megatron_rl.train.launcher import free_port
from megatron_rl.train.policy import Policy
from megatron_rl.train.profile import Profile
from megatron_rl.train.progress import Progress, stage_label
from megatron_rl.train.rank_process import RankEnvironment, RankProcess
from megatron_rl.train.reporter import Reporter
from megatron_rl.train.rl import run_rl
from megatron_rl.train.rl_data import RlData, load_rl_data
from megatron_rl.train.run_data import check_never_saved
from megatron_rl.train.sft import run_sft
from megatron_rl.train.watchdog import Watchdog


def run_training(loaded: LoadedRecipe, *, resume: bool, process: RankProcess) -> None:
    """Run all stages of the recipe on this rank; every rank of the run calls it."""
    recipe, run_dir, place = loaded.recipe, process.run_dir, process.place
    checkpoints = CheckpointStore(
        run_dir / "checkpoints",
        keep=recipe.checkpoint.keep if recipe.checkpoint else 1,
        rank=place.rank,
        recipe=recipe,
        timeout_s=recipe.checkpoint.timeout_s if recipe.checkpoint else recipe.run.collective_timeout_s,
        asynchronous=recipe.checkpoint is not None and recipe.checkpoint.asynchronous,
    )
    saved = checkpoints.latest() if resume else None
    if resume and saved is None and place.rank == 0:
        check_never_saved(run_dir, recipe)
    progress = Progress(**saved.progress) if saved else Progress()
    with (
        Reporter(
            run_dir, loaded, is_driver=place.rank == 0, resumed=progress if resume else None
        ) as reporter,
        checkpoints,
    ):
        reporter.say(f"run directory: {run_dir}")
        if line := compat_line(loaded):
            reporter.say(line)
        port = int(os.environ.get("MASTER_PORT", 0)) or free_port()
        layout = _set_up_process(recipe, place, port)
        with Watchdog(
            process, address=_master_addr(), port=port, silence_timeout_s=recipe.run.silence_timeout_s
        ):
            process.phases.enter("load")
            run = _open_run(recipe, process, layout, reporter, checkpoints, saved)
            if resume and saved is None:
                reporter.say(f"no checkpoint in {run_dir}: starting from the beginning")
            _run_stages(progress, run)
            # a window that reaches beyond the end
            run.say_profiled(run.profile.finish())
            checkpoints.finish()
            process.phases.enter("export")
            _export(run)
            process.phases.enter("stop")
            reporter.finish()
    destroy_process_groups()


def _run_stages(progress: Progress, run: RunContext) -> None:
    """What is left of the run. All data is read first: a broken file must not cost the stages before it."""
    stages = run.recipe.stages
    remaining = [
        index
        for index in range(progress.stage, len(stages))
        if not (index == progress.stage and progress.step == progress.last_step(stages))
    ]
    if not remaining:
        run.reporter.say(
            "nothing is left to train: every step of every stage is done; writing the model again"
        )
        run.report_loaded()
    done = steps_before(stages, progress.stage) + progress.step
    if remaining and done and (line := passed_window(run.recipe.run.profile, done)):
        run.reporter.say(line)
    run.phases.enter("data")
    data = {index: _load_data(index, run, is_next=index == remaining[0]) for index in remaining}
    for index in remaining:
        if index != progress.stage:
            progress = progress.next_stage(index)
        stage, stage_data = stages[index], data.pop(index)
        progress = _on_data(progress, stage_data, run)
        if isinstance(stage, SftStage):
            assert isinstance(stage_data, SftData)
            progress = run_sft(stage, stage_data, progress, run)
        else:
            assert not isinstance(stage_data, SftData)
            progress = run_rl(stage, stage_data, progress, run)


def _on_data(progress: Progress, data: SftData | RlData | None, run: RunContext) -> Progress:
    """See Progress.on_data; `data` is None on ranks that read none."""
    stage = run.recipe.stages[progress.stage]
    if isinstance(data, SftData):
        assert isinstance(stage, SftStage)
        return progress.on_data(data.digest(), place=f"stages.{progress.stage}.data: {stage.data}")
    if data is not None:
        assert not isinstance(stage, SftStage)
        return progress.on_data(
            data.prompts.digest(), place=f"stages.{progress.stage}.prompts: {stage.prompts}"
        )
    return progress


def _load_data(index: int, run: RunContext, *, is_next: bool) -> SftData | RlData | None:
    """`is_next`: nothing is trained before this stage."""
    stage, seed = run.recipe.stages[index], run.recipe.run.seed
    if isinstance(stage, SftStage):
        sft = load_sft_data(
            stage.data,
            tokenizer=run.tokenizer,
            max_sample_tokens=stage.max_sample_tokens,
            seed=derive_seed(seed, index, "samples"),
            columns=stage.columns,
        )
        passes = stage.steps * stage.global_batch_size / len(sft)
        label = stage_label(run.recipe.stages, index)
        run.reporter.say(f"{label}: {sft.summary()}; {stage.steps} steps pass over them {passes:.2f} times")
        return sft
    if not run.is_driver:
        return None
    if stage.engine.hosts:
        # a host that cannot be used must not cost the stages before either
        check_hosts(stage.engine, hf_path=run.recipe.model.hf_path)
    elif stage.engine.vllm and not is_next:
        _try_options(index, stage, run)
    rl = load_rl_data(stage, run.tokenizer, run_seed=seed, stage_index=index)
    run.reporter.say(f"{stage_label(run.recipe.stages, index)}: {rl.summary()}")
    return rl


def _try_options(index: int, stage: RlStage, run: RunContext) -> None:
    """Values that only vLLM can judge would end the run when its engines start, after the stages before."""
    label = stage_label(run.recipe.stages, index)
    run.reporter.say(f"{label}: asking vLLM about engine.vllm before the stages that come first")
    start = start_message(
        stage.engine,
        hf_path=run.recipe.model.hf_path,
        dtype=run.recipe.model.dtype,
        spec=run.spec,
        max_model_len=longest_sequence(stage),
        seed=run.recipe.run.seed,
    )
    start["devices"] = list(range(stage.engine.tp)) if device.has_accelerator() else None
    said = refusal(start, timeout_s=stage.engine.start_timeout_s)
    if said is not None:
        raise EngineError(f"stages.{index}.engine.vllm: {said}")


def _export(run: RunContext) -> None:
    """The final weights as a Hugging Face directory; replaces that of an earlier end of the same run. Collective."""
    out_dir = run.run_dir / "model"
    if run.is_driver:
        # half a deletion must not look like a model; one that was killed is taken up again
        doomed = out_dir.with_name(".old-model")
        shutil.rmtree(doomed, ignore_errors=True)
        if out_dir.exists():
            out_dir.rename(doomed)
            shutil.rmtree(doomed)
    run.policy.save_hf(str(out_dir), hf_source=run.recipe.model.hf_path)


def _set_up_process(recipe: Recipe, place: RankEnvironment, port: int) -> ParallelLayout:
    torch.set_num_threads(recipe.run.torch_threads)
    if is_deterministic(recipe.run.deterministic):
        make_deterministic(os.environ)
    if device.has_accelerator():
        torch.cuda.set_device(place.local_rank)
    layout = run_layout(recipe.layout, world_size=place.world_size)
    if int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size)) < place.world_size:
        choose_gloo_interface(os.environ, host=_master_addr(), port=port)
    init_process_groups(
        layout,
        rank=place.rank,
        world_size=place.world_size,
        master_addr=_master_addr(),
        master_port=port,
        timeout_s=recipe.run.collective_timeout_s,
        seed=recipe.run.seed,
    )
    return layout


def _open_run(
    recipe: Recipe,
    process: RankProcess,
    layout: ParallelLayout,
    reporter: Reporter,
    checkpoints: CheckpointStore,
    saved: SavedState | None,
) -> RunContext:
    spec = ModelSpec.from_hf(recipe.model.hf_path, max_positions=recipe.model.max_positions)
    tokenizer = load_tokenizer(recipe.model.hf_path)
    reporter.reads(tokenizer)
    policy = Policy(recipe.model, spec, layout, rank=process.place.rank)
    policy.spans = process.phases.spans
    border_group = new_border_group(timeout_s=recipe.run.collective_timeout_s)
    if saved is not None:
        # before any optimizer: it copies the weights
        checkpoints.load_model(policy, saved)
        checkpoints.load_generators(policy, saved)
        reporter.say(f"resuming from {saved.path}")
    elif recipe.model.checkpoint is not None:
        start = find_checkpoint(Path(recipe.model.checkpoint))
        checkpoints.load_model(policy, start)
        reporter.say(f"starting from the weights of {start.path}")
    return RunContext(
        recipe=recipe,
        run_dir=process.run_dir,
        rank=process.place.rank,
        layout=layout,
        spec=spec,
        policy=policy,
        tokenizer=tokenizer,
        reporter=reporter,
        checkpoints=checkpoints,
        phases=process.phases,
        stop=process.stop,
        host=_master_addr(),
        driver_group=new_driver_group(),
        border_group=border_group,
        profile=Profile(
            recipe.run.profile,
            process.run_dir,
            policy.spans,
            rank=process.place.rank,
            group=border_group,
            say=reporter.say,
        ),
        resumed_from=saved,
    )


def _master_addr() -> str:
    """Address of rank 0, by torchrun's convention."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")
