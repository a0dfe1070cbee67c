"""One run on one rank: set up once, then the stages in order; resumes in the middle of one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch

from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.model.checkpoint import CheckpointStore, SavedState
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform import device
from megatron_rl.recipe.load import LoadedRecipe
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import SftStage, Stage
from megatron_rl.train.context import RunContext
from megatron_rl.train.launcher import RankEnvironment, rank_environment
from megatron_rl.train.policy import Policy
from megatron_rl.train.progress import Progress, stage_length
from megatron_rl.train.reporter import Reporter
from megatron_rl.train.rl import run_rl
from megatron_rl.train.sft import run_sft


def run_training(loaded: LoadedRecipe, *, run_dir: Path, resume: bool) -> None:
    """Run all stages of the recipe on this rank; every rank of the run calls it."""
    recipe = loaded.recipe
    place = rank_environment() or RankEnvironment(rank=0, local_rank=0, world_size=1)
    checkpoints = CheckpointStore(
        run_dir / "checkpoints",
        keep=recipe.checkpoint.keep if recipe.checkpoint else 1,
        rank=place.rank,
        recipe=recipe,
        timeout_s=recipe.run.collective_timeout_s,
    )
    saved = checkpoints.latest() if resume else None
    progress = Progress(**saved.progress) if saved else Progress()
    with Reporter(
        run_dir, loaded, is_driver=place.rank == 0, resumed=progress if resume else None
    ) as reporter:
        layout = _set_up_process(recipe, place)
        run = _open_run(recipe, run_dir, place, layout, reporter, checkpoints, saved)
        for index in range(progress.stage, len(recipe.stages)):
            start = progress if index == progress.stage else Progress(stage=index)
            _run_stage(recipe.stages[index], start, run)
        run.policy.save_hf(str(run_dir / "model"), hf_source=recipe.model.hf_path)
        reporter.finish()
    destroy_process_groups()


def _run_stage(stage: Stage, progress: Progress, run: RunContext) -> None:
    if progress.step == stage_length(stage):
        return  # the checkpoint was taken at its end
    if isinstance(stage, SftStage):
        run_sft(stage, progress, run)
    else:
        run_rl(stage, progress, run)


def _set_up_process(recipe: Recipe, place: RankEnvironment) -> ParallelLayout:
    torch.set_num_threads(recipe.run.torch_threads)
    if recipe.run.deterministic:
        torch.use_deterministic_algorithms(True)
    if device.has_accelerator():
        torch.cuda.set_device(place.local_rank)
    layout = ParallelLayout.for_world(
        tp=recipe.layout.tp,
        pp=recipe.layout.pp,
        vpp=recipe.layout.vpp,
        sp=recipe.layout.sp,
        world_size=place.world_size,
    )
    init_process_groups(
        layout,
        rank=place.rank,
        world_size=place.world_size,
        master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(os.environ.get("MASTER_PORT", 0)) or _free_port(),
        timeout_s=recipe.run.collective_timeout_s,
        seed=recipe.run.seed,
    )
    return layout


def _open_run(
    recipe: Recipe,
    run_dir: Path,
    place: RankEnvironment,
    layout: ParallelLayout,
    reporter: Reporter,
    checkpoints: CheckpointStore,
    saved: SavedState | None,
) -> RunContext:
    spec = ModelSpec.from_hf(recipe.model.hf_path)
    tokenizer = load_tokenizer(recipe.model.hf_path)
    policy = Policy(recipe.model, spec, layout, rank=place.rank)
    if saved is not None:
        # before any optimizer: it copies the weights
        checkpoints.load_model(policy, saved)
        reporter.say(f"resuming from {saved.path}")
    return RunContext(
        recipe=recipe,
        run_dir=run_dir,
        rank=place.rank,
        layout=layout,
        spec=spec,
        policy=policy,
        tokenizer=tokenizer,
        reporter=reporter,
        checkpoints=checkpoints,
        resumed_from=saved,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
