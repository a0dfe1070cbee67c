"""A resumed run is the same run: bit-equal in its layout, equal up to rounding in any other, or refused."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_rl.errors import CheckpointError, LostPeerError
from megatron_rl.model.checkpoint_files import find_latest, inventory
from tests.helpers.distributed import DistributedFailure, run_distributed
from tests.helpers.full_disk import files_limited_to
from tests.helpers.models import make_tiny_hf
from tests.helpers.training import SAVED_AT, STEPS, Run, Session

# float32 sums in another order, over three optimizer steps
TOLERANCE = 1e-6

Job = tuple[Callable[..., Any], Run, list[Any]]


def work(rank: int, world_size: int, jobs: list[Job]) -> list[Any]:
    """What each job returned on this rank. One job after the other, each in model groups of its own."""
    from megatron_rl.parallel import groups

    results = []
    for job, run, args in jobs:
        layout = run.layout(world_size)
        if results:
            groups.destroy_model_groups()
            groups.build_model_groups(layout, timeout_s=60)
        else:
            groups.init_process_groups(
                layout,
                rank=rank,
                world_size=world_size,
                master_addr="127.0.0.1",
                master_port=int(os.environ["MASTER_PORT"]),
                timeout_s=60,
            )
        results.append(job(Session(run, rank, world_size), *args))
    groups.destroy_process_groups()
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
        # rank 0 must not start the next one while others still look
        torch.distributed.barrier()
    for step in (3, 4):
        here.store.save(here.policy, {"stage": 0, "step": step})
    # older ones are deleted meanwhile
    here.store.finish()
    assert sorted(os.listdir(here.root)) == ["latest", "stage_0_step_000003", "stage_0_step_000004"]
    return told


def save_again(here: Session, root: str) -> None:
    """Load a checkpoint in this layout and save it, unchanged, from it."""
    from megatron_rl.model.checkpoint import CheckpointStore

    here.resume()
    store = CheckpointStore(Path(root), keep=1, rank=here.rank, recipe=here.recipe, timeout_s=20)
    store.save(here.policy, SAVED_AT)


def load_damaged(here: Session, copies: Path) -> dict[str, str]:
    """What this rank is told about each of the damaged copies of a checkpoint."""
    saved = here.store.latest()
    assert saved is not None
    if here.rank == 0:
        for name, damage in DAMAGE.items():
            shutil.copytree(saved.path, copies / name)
            damage(copies / name / "optimizer")
    torch.distributed.barrier()
    here.start_stage()
    told = {}
    for name in DAMAGE:
        copy = replace(saved, path=copies / name)
        if name in WELL_SIGNED:
            copy = replace(copy, files=inventory(copy.path))
        with pytest.raises(CheckpointError) as caught:
            here.store.load_optimizer(here.policy, copy)
        told[name] = str(caught.value)
    return told


def put_the_model_in_its_place(optimizer: Path) -> None:
    shutil.rmtree(optimizer)
    shutil.copytree(optimizer.parent / "model", optimizer)


def flip_a_bit(optimizer: Path) -> None:
    file = optimizer / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forget_a_tensor(optimizer: Path) -> None:
    index = pickle.loads((optimizer / ".metadata").read_bytes())
    del index.state_dict_metadata[MOMENT]
    (optimizer / ".metadata").write_bytes(pickle.dumps(index))


def reshape_a_tensor(optimizer: Path) -> None:
    index = pickle.loads((optimizer / ".metadata").read_bytes())
    index.state_dict_metadata[MOMENT].size = torch.Size([7])
    (optimizer / ".metadata").write_bytes(pickle.dumps(index))


MOMENT = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "absent": shutil.rmtree,
    "shardless": lambda optimizer: (optimizer / "__1_0.distcp").unlink(),
    "indexless": lambda optimizer: (optimizer / ".metadata").unlink(),
    "flipped": flip_a_bit,
    "never written": shutil.rmtree,
    "other": put_the_model_in_its_place,
    "forgotten": forget_a_tensor,
    "reshaped": reshape_a_tensor,
}
# those whose files are what their state file says
WELL_SIGNED = ("never written", "other", "forgotten", "reshaped")


def load_into_another_model(here: Session) -> str:
    saved = here.store.latest()
    assert saved is not None
    with pytest.raises(CheckpointError) as caught:
        here.store.load_model(here.policy, saved)
    return str(caught.value)


def save_before_the_first_step(here: Session) -> tuple[list[str], list[dict[str, Any]]]:
    """What such a checkpoint consists of; two steps from before it, and two from it."""
    here.start_stage()
    here.store.save(here.policy, SAVED_AT)
    straight = here.train(0, 2)
    here.resume()
    assert here.policy.optimizer.num_steps == 0
    resumed = here.train(0, 2)
    return sorted(os.listdir(Path(here.root, NAME))), [straight, resumed]


class Interrupted:
    """A policy whose user presses Ctrl-C when its state is asked for."""

    def __init__(self, policy: Any) -> None:
        self.optimizer, self.spec = policy.optimizer, policy.spec

    @property
    def ddp_chunks(self) -> list[Any]:
        raise KeyboardInterrupt


def save_interrupted(here: Session) -> list[str]:
    """What is there after Ctrl-C reached every rank in the middle of a save."""
    here.start_stage()
    with pytest.raises(KeyboardInterrupt):
        here.store.save(Interrupted(here.policy), SAVED_AT)
    torch.distributed.barrier()
    return sorted(os.listdir(here.root))


NAME = "stage_1_step_000003"  # of SAVED_AT


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": str(make_tiny_hf(root / "tied", family="qwen2", tied=True)),
        "untied": str(make_tiny_hf(root / "untied", family="qwen3")),
        "experts": str(make_tiny_hf(root / "experts", family="qwen3_moe")),
        "fewer words": str(make_tiny_hf(root / "fewer", family="qwen3", vocab=200)),
    }


@dataclass(frozen=True)
class Original:
    """A run that saved in the middle and went on, and what every rank measured after the checkpoint."""

    run: Run
    measured: list[dict[str, Any]]


@pytest.fixture(scope="module")
def on_four(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that saves at tp 2 x pp 2, resumed there and at tp 4; starting processes is what costs time here."""
    run = Run(hf_path=models["tied"], root=str(tmp_path_factory.mktemp("tp2_pp2")), tp=2, pp=2)
    tp4 = replace(run, tp=4, pp=1)
    measured, same, other = on_ranks(
        4, (train_save_train, run, []), (resume_train, run, []), (resume_train, tp4, [])
    )
    return {"original": Original(run, measured), "same": same, "tp4": other}


@pytest.fixture(scope="module")
def on_two(
    on_four: dict[str, Any], models: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """By case what each of two ranks measured or was told."""
    root, run = tmp_path_factory.mktemp("on_two"), on_four["original"].run
    dp2 = Run(hf_path=models["untied"], root=str(root / "dp2"))
    pp2 = replace(run, tp=1, pp=2)
    vpp2, through = replace(pp2, vpp=2), replace(pp2, root=str(root / "through"))
    experts = Run(hf_path=models["experts"], root=str(root / "experts"), ep=2)
    jobs: dict[str, Job] = {
        "dp2": (train_save_train, dp2, []),
        "dp2 again": (resume_train, dp2, []),
        "damaged": (load_damaged, dp2, [root / "damaged"]),
        "other model": (load_into_another_model, replace(dp2, hf_path=models["fewer words"]), []),
        "to dp2": (resume_train, replace(run, tp=1, pp=1), []),
        "to tp2 sp": (resume_train, replace(run, pp=1, sp=True), []),
        "to pp2": (resume_train, pp2, []),
        "to pp2 vpp2": (resume_train, vpp2, []),
        "save from vpp2": (save_again, vpp2, [through.root]),
        "through vpp2": (resume_train, through, []),
        "experts": (train_save_train, experts, []),
        "experts again": (resume_train, experts, []),
        "experts to tp2 sp": (resume_train, replace(experts, ep=1, tp=2, sp=True), []),
        "experts to pp2": (resume_train, replace(experts, ep=1, pp=2), []),
        "no step": (save_before_the_first_step, replace(dp2, root=str(root / "no step")), []),
        "interrupted": (save_interrupted, replace(dp2, root=str(root / "interrupted")), []),
        "full disks": (save_on_full_disks, replace(dp2, root=str(root / "full"), pp=2), []),
    }
    return dict(zip(jobs, on_ranks(2, *jobs.values()), strict=True))


def assert_continues(resumed: list[dict[str, Any]], original: Original) -> None:
    for rank in resumed:
        for got, want in zip(rank["steps"], original.measured[0]["steps"], strict=True):
            assert got == pytest.approx(want, rel=TOLERANCE)


def test_resume_in_the_same_layout_is_bit_equal(on_four: dict[str, Any], on_two: dict[str, Any]) -> None:
    assert on_four["same"] == on_four["original"].measured
    assert on_two["dp2 again"] == on_two["dp2"]
    assert on_two["experts again"] == on_two["experts"]


def test_resume_at_tp4_continues_with_the_same_losses_and_norms(on_four: dict[str, Any]) -> None:
    # tp 4 pads the vocabulary of 251 to another size
    assert_continues(on_four["tp4"], on_four["original"])


@pytest.mark.parametrize("case", ["to dp2", "to tp2 sp", "to pp2", "to pp2 vpp2"])
def test_resume_on_fewer_ranks_continues_with_the_same_losses_and_norms(
    on_four: dict[str, Any], on_two: dict[str, Any], case: str
) -> None:
    assert_continues(on_two[case], on_four["original"])


@pytest.mark.parametrize("case", ["experts to tp2 sp", "experts to pp2"])
def test_experts_spread_in_another_way_continue_with_the_same_losses_and_norms(
    on_two: dict[str, Any], models: dict[str, str], case: str
) -> None:
    run = Run(hf_path=models["experts"], root="")
    assert_continues(on_two[case], Original(run, on_two["experts"]))


def test_resume_on_one_rank_continues_with_the_same_losses_and_norms(on_four: dict[str, Any]) -> None:
    alone = replace(on_four["original"].run, tp=1, pp=1)
    assert_continues(on_ranks(1, (resume_train, alone, []))[0], on_four["original"])


def test_a_checkpoint_that_passed_through_vpp2_is_the_same_checkpoint(on_two: dict[str, Any]) -> None:
    assert on_two["through vpp2"] == on_two["to pp2"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("absent", r"FileNotFoundError: .*absent/optimizer/"),
        ("shardless", r"FileNotFoundError: .*shardless/optimizer/__1_0\.distcp"),
        ("indexless", r"FileNotFoundError: .*indexless/optimizer/\.metadata"),
        (
            "flipped",
            r"flipped/optimizer/__1_0\.distcp: was changed after it was saved: its sha256 is \w{64}, must be",
        ),
        ("never written", "never written: holds no optimizer, after 3 optimizer steps"),
        ("other", r"missing optimizer\.state\.exp_avg\..* unexpected .*decoder\.final_layernorm\.weight"),
        ("forgotten", f"missing {re.escape(MOMENT)}; it belongs"),
        ("reshaped", rf"wrong shape {re.escape(MOMENT)} \[7\], must be \[64\]"),
    ],
)
def test_a_damaged_optimizer_is_refused_by_name_on_every_rank(
    on_two: dict[str, Any], damage: str, words: str
) -> None:
    for told in on_two["damaged"]:
        assert re.search(words, told[damage]), told[damage]


def test_another_model_is_refused_by_its_numbers_on_every_rank(on_two: dict[str, Any]) -> None:
    for message in on_two["other model"]:
        assert f"{NAME}: holds another model than model.hf_path (vocab_size: was 251, is 200)" in message


def test_a_checkpoint_before_the_first_optimizer_step_holds_no_optimizer_and_resumes(
    on_two: dict[str, Any],
) -> None:
    for files, (straight, resumed) in on_two["no step"]:
        assert files == ["generators", "model", "state.json"]
        assert resumed == straight


def test_ctrl_c_while_saving_leaves_nothing_behind(on_two: dict[str, Any]) -> None:
    assert on_two["interrupted"] == [[], []]


def test_a_full_disk_of_one_rank_is_an_error_on_every_rank_and_publishes_nothing(
    on_two: dict[str, Any],
) -> None:
    for told in on_two["full disks"]:
        for unlucky, message in enumerate(told):
            assert f"rank {unlucky}: OSError: [Errno 27] File too large: " in message
            assert ".tmp-stage_0_step_000002" in message and "nothing was published" in message


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
    with pytest.raises(LostPeerError) as caught:
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
