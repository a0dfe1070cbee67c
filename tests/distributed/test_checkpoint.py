"""A resumed run is the same run: bit-equal in its layout, equal up to rounding in any other, or refused."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_rl.data.types import TrainSample
from megatron_rl.errors import CheckpointError
from megatron_rl.model.checkpoint_files import find_latest
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.schema import ModelConfig, Recipe
from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig, SftStage
from tests.helpers.distributed import DistributedFailure, run_distributed
from tests.helpers.models import make_tiny_hf

STEPS = 3  # before the checkpoint, and again after it
TOKENS = 64  # packed into one micro-batch, at most
# float32 sums in another order, over three optimizer steps
TOLERANCE = 1e-6
SAVED_AT = {"stage": 1, "step": STEPS, "sampler": {"cursor": 7}}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process group's worth of training in a layout; picklable, so that ranks can be told what to do."""

    hf_path: str
    root: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    sp: bool = False
    dtype: str = "float32"


def recipe_of(run: Run) -> Recipe:
    stage = SftStage(
        kind="sft", data="data.jsonl", steps=2 * STEPS, global_batch_size=8, tokens_per_microbatch=TOKENS,
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5),
        schedule=ScheduleConfig(kind="cosine", warmup_steps=2, min_lr=1e-4),
    )
    return Recipe(name="tiny", model=ModelConfig(hf_path="tiny", dtype=run.dtype), stages=(stage, stage))


def samples_of(step: int) -> list[TrainSample]:
    """Eight samples of 15 packed tokens: micro-batches of 60 at dp 1 and dp 2 alike."""
    rng = random.Random(step)
    prompts = [rng.randint(1, 12) for _ in range(8)]
    return [
        TrainSample(
            token_ids=[rng.randrange(251) for _ in range(16)],
            loss_mask=[False] * prompt + [True] * (16 - prompt),
            sample_id=f"{step}.{number}",
        )
        for number, prompt in enumerate(prompts)
    ]


class Session:
    """A policy and the checkpoints of its run, on one rank."""

    def __init__(self, run: Run, rank: int, world_size: int) -> None:
        # these import megatron-core, which belongs after the platform is known
        from megatron_rl.model.checkpoint import CheckpointStore
        from megatron_rl.model.spec import ModelSpec
        from megatron_rl.train.policy import Policy

        self.rank, self.root = rank, run.root
        self.layout = ParallelLayout.for_world(
            tp=run.tp, pp=run.pp, vpp=run.vpp, sp=run.sp, world_size=world_size
        )
        self.recipe = recipe_of(run)
        self.store = CheckpointStore(Path(run.root), keep=2, rank=rank, recipe=self.recipe, timeout_s=20)
        config = ModelConfig(hf_path=run.hf_path, dtype=run.dtype, spec="local")
        self.policy = Policy(config, ModelSpec.from_hf(run.hf_path), self.layout, rank=rank)

    def start_stage(self) -> None:
        stage = self.recipe.stages[1]
        self.policy.start_stage(stage.optimizer, stage.schedule, total_steps=2 * STEPS)

    def resume(self) -> None:
        """Model and optimizer as the checkpoint has them."""
        saved = self.store.latest()
        assert saved is not None
        assert saved.progress == SAVED_AT
        self.store.load_model(self.policy, saved)
        self.start_stage()
        self.store.load_optimizer(self.policy, saved)

    def train(self, first: int, last: int) -> dict[str, Any]:
        """Loss, gradient norm and learning rate of each step, and a digest of this rank's weights after."""
        from megatron_rl.algo.losses import sft_loss
        from megatron_rl.train.batches import local_batches

        steps = []
        for step in range(first, last):
            samples = samples_of(step)
            tokens = sum(sample.num_trained_tokens for sample in samples)
            batches = local_batches(
                samples, self.layout, dp_rank=self.policy.dp_rank, tokens_per_microbatch=TOKENS
            )
            metrics = self.policy.forward_backward(batches, partial(sft_loss, normaliser=float(tokens)))
            losses = [metric for batch in metrics for metric in batch if metric.name == "sft/loss"]
            loss = sum(metric.value * metric.weight for metric in losses) / tokens
            stats = self.policy.optimizer_step()
            steps.append((loss, stats.grad_norm, stats.lr))
        return {"steps": steps, "weights": self.digest()}

    def digest(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.policy.named_params():
            for name, value in chunk.items():
                digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


Job = tuple[Callable[..., Any], Run, list[Any]]


def work(rank: int, world_size: int, jobs: list[Job]) -> list[Any]:
    """What each job returned on this rank. One job after the other, each in process groups of its own."""
    from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups

    results = []
    for number, (job, run, args) in enumerate(jobs):
        layout = ParallelLayout.for_world(tp=run.tp, pp=run.pp, vpp=run.vpp, sp=run.sp, world_size=world_size)
        init_process_groups(
            layout, rank=rank, world_size=world_size, master_addr="127.0.0.1",
            master_port=int(os.environ["MASTER_PORT"]) + number, timeout_s=60,
        )
        results.append(job(Session(run, rank, world_size), *args))
        destroy_process_groups()
    return results


def on_ranks(world_size: int, *jobs: Job) -> list[list[Any]]:
    """For each job what every rank returned."""
    ranks = run_distributed(work, world_size, list(jobs), timeout_s=240)
    return [list(job) for job in zip(*ranks, strict=True)]


def train_save_train(here: Session) -> dict[str, Any]:
    here.start_stage()
    here.train(0, STEPS)
    before = here.digest()
    here.store.save(here.policy, SAVED_AT)
    assert here.digest() == before, "saving must not change the weights"
    assert psutil.Process().children(recursive=True) == [], "saving must leave no process behind"
    return here.train(STEPS, 2 * STEPS)


def resume_train(here: Session) -> dict[str, Any]:
    here.resume()
    return here.train(STEPS, 2 * STEPS)


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """Writing more to one file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_on_full_disks(here: Session) -> list[str]:
    """What this rank was told when the disk of rank 0, then of rank 1, was full; saving works before and after."""
    told = []
    here.start_stage()
    here.train(0, 1)
    here.store.save(here.policy, {"stage": 0, "step": 1})
    for unlucky in (0, 1):
        # more than the small files, less than the tensors of a rank
        limit = files_limited_to(20_000) if here.rank == unlucky else nullcontext()
        with limit, pytest.raises(CheckpointError) as caught:
            here.store.save(here.policy, {"stage": 0, "step": 2})
        told.append(str(caught.value))
        torch.distributed.barrier()
        assert sorted(os.listdir(here.root)) == ["latest", "stage_0_step_000001"]
    for step in (3, 4):
        here.store.save(here.policy, {"stage": 0, "step": step})
    assert sorted(os.listdir(here.root)) == ["latest", "stage_0_step_000003", "stage_0_step_000004"]
    return told


def load_damaged(here: Session, damaged: list[Path]) -> list[str]:
    """What this rank is told about each of the damaged copies of a checkpoint."""
    saved = here.store.latest()
    assert saved is not None
    here.start_stage()
    told = []
    for path in damaged:
        with pytest.raises(CheckpointError) as caught:
            here.store.load_optimizer(here.policy, replace(saved, path=path))
        told.append(str(caught.value))
    return told


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": str(make_tiny_hf(root / "tied", family="qwen2", tied=True)),
        "untied": str(make_tiny_hf(root / "untied", family="qwen3")),
    }


@dataclass(frozen=True)
class Original:
    """A run that saved in the middle and went on, and what every rank measured after the checkpoint."""

    run: Run
    measured: list[dict[str, Any]]


@pytest.fixture(scope="module")
def tp2_pp2(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Original:
    run = Run(hf_path=models["tied"], root=str(tmp_path_factory.mktemp("tp2_pp2")), tp=2, pp=2)
    return Original(run, on_ranks(4, (train_save_train, run, []))[0])


def assert_continues(resumed: list[dict[str, Any]], original: Original, case: object) -> None:
    for rank in resumed:
        for got, want in zip(rank["steps"], original.measured[0]["steps"], strict=True):
            assert got == pytest.approx(want, rel=TOLERANCE), case


def in_layout(original: Original, tp: int, pp: int, vpp: int, sp: bool) -> Run:
    return replace(original.run, tp=tp, pp=pp, vpp=vpp, sp=sp)


def test_resume_in_the_same_layout_is_bit_equal_and_tp4_agrees(tp2_pp2: Original) -> None:
    # tp 4 pads the vocabulary of 251 to another size
    tp4 = in_layout(tp2_pp2, 4, 1, 1, False)
    same, other = on_ranks(4, (resume_train, tp2_pp2.run, []), (resume_train, tp4, []))
    assert same == tp2_pp2.measured
    assert_continues(other, tp2_pp2, "tp4")


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [(1, [(1, 1, 1, False)]), (2, [(1, 2, 1, False), (1, 1, 1, False), (2, 1, 1, True)])],
    ids=["tp1", "pp2-dp2-tp2sp"],
)
def test_resume_in_another_layout_continues_with_the_same_losses_and_norms(
    tp2_pp2: Original, world_size: int, layouts: list[tuple[int, int, int, bool]]
) -> None:
    runs = [in_layout(tp2_pp2, *layout) for layout in layouts]
    for run, resumed in zip(runs, on_ranks(world_size, *((resume_train, run, []) for run in runs)), strict=True):
        assert_continues(resumed, tp2_pp2, run)


@pytest.fixture(scope="module")
def on_two(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks measured: a run that saves at dp 2, and a run with full disks."""
    root = tmp_path_factory.mktemp("on_two")
    dp2 = Run(hf_path=models["untied"], root=str(root / "dp2"))
    full = Run(hf_path=models["untied"], root=str(root / "full"), pp=2)
    measured, told = on_ranks(2, (train_save_train, dp2, []), (save_on_full_disks, full, []))
    return {"dp2": Original(dp2, measured), "full disks": told}


def test_resume_at_dp2_is_bit_equal_and_other_optimizers_are_refused(
    on_two: dict[str, Any], tmp_path: Path
) -> None:
    dp2 = on_two["dp2"]
    damaged = damaged_copies(Path(dp2.run.root, "stage_1_step_000003"), tmp_path)
    resumed, told = on_ranks(2, (resume_train, dp2.run, []), (load_damaged, dp2.run, [damaged]))
    assert resumed == dp2.measured
    for absent, other, garbled in told:
        assert f"{damaged[0] / 'optimizer'}: cannot be read" in absent
        assert "missing optimizer.state.exp_avg.decoder.final_layernorm.weight" in other
        assert "unexpected decoder.final_layernorm.weight" in other
        assert f"{damaged[2] / 'optimizer'}: " in garbled


def save_again(here: Session, root: Path) -> None:
    """Load a checkpoint in this layout and save it, unchanged, from it."""
    from megatron_rl.model.checkpoint import CheckpointStore

    here.resume()
    store = CheckpointStore(root, keep=1, rank=here.rank, recipe=here.recipe, timeout_s=20)
    store.save(here.policy, SAVED_AT)


def test_a_checkpoint_that_passed_through_vpp2_is_the_same_checkpoint(tp2_pp2: Original, tmp_path: Path) -> None:
    pp2, vpp2 = in_layout(tp2_pp2, 1, 2, 1, False), in_layout(tp2_pp2, 1, 2, 2, False)
    _, through, direct = on_ranks(
        2,
        (save_again, vpp2, [tmp_path]),
        (resume_train, replace(pp2, root=str(tmp_path)), []),
        (resume_train, pp2, []),
    )
    assert through == direct


def damaged_copies(saved: Path, root: Path) -> list[Path]:
    """The checkpoint without its optimizer, with the model in its place, and with zeros for tensors."""
    copies = [root / name for name in ("absent", "other", "garbled")]
    for copy in copies:
        shutil.copytree(saved, copy)
    for copy in copies[:2]:
        shutil.rmtree(copy / "optimizer")
    shutil.copytree(saved / "model", copies[1] / "optimizer")
    for file in copies[2].glob("optimizer/*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    return copies


def test_a_full_disk_of_one_rank_is_an_error_on_every_rank_and_publishes_nothing(on_two: dict[str, Any]) -> None:
    for told in on_two["full disks"]:
        for unlucky, message in enumerate(told):
            assert f"rank {unlucky}: RuntimeError" in message
            assert "is the disk full?" in message


class Killed:
    """A policy that ends its process in the middle of a save, when its state is asked for."""

    @property
    def ddp_chunks(self) -> list[Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


def save_while_rank_one_is_killed(here: Session, told: Path) -> None:
    here.start_stage()
    here.train(0, 1)
    here.store.save(here.policy, {"stage": 0, "step": 1})
    policy: Any = Killed() if here.rank == 1 else here.policy
    with pytest.raises(CheckpointError) as caught:
        here.store.save(policy, {"stage": 0, "step": 2})
    told.write_text(str(caught.value))


def test_a_rank_killed_while_saving_is_an_error_elsewhere_and_leaves_the_previous_checkpoint(
    models: dict[str, str], tmp_path: Path
) -> None:
    run = Run(hf_path=models["untied"], root=str(tmp_path / "run"), pp=2)
    with pytest.raises(DistributedFailure):
        on_ranks(2, (save_while_rank_one_is_killed, run, [tmp_path / "told"]))
    assert "a rank stopped" in (tmp_path / "told").read_text()
    assert sorted(os.listdir(run.root)) == ["latest", "stage_0_step_000001"]
    saved = find_latest(Path(run.root))
    assert saved is not None
    assert saved.progress == {"stage": 0, "step": 1}
