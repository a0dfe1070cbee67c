"""A checkpoint that is written beside the training is the one that a save which waits would have written."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_rl.errors import CheckpointError, LostPeerError
from megatron_rl.model.checkpoint_files import find_latest
from tests.distributed.test_checkpoint import Job, on_ranks, resume_train
from tests.helpers.distributed import DistributedFailure
from tests.helpers.full_disk import process_files_limited_to
from tests.helpers.models import make_tiny_hf
from tests.helpers.processes import state_of, wait_for
from tests.helpers.training import SAVED_AT, STEPS, Run, Session

WAIT_S = 10.0  # checkpoint.timeout_s of the runs that must hear of a writer in time


def train_save_train(here: Session) -> tuple[dict[str, Any], list[str]]:
    """The steps after a save that is written meanwhile; then what is there once it is published."""
    here.start_stage()
    here.train(0, STEPS)
    with here.store as store:
        store.save(here.policy, SAVED_AT)
        assert find_latest(Path(here.root)) is None or store.is_saving
        after = here.train(STEPS, 2 * STEPS)
        deadline = time.monotonic() + 60
        while store.is_saving:
            assert time.monotonic() < deadline
            store.poll()
    assert psutil.Process().children(recursive=True) == [], "closing must leave no process behind"
    return after, sorted(os.listdir(here.root))


def compare_reports(here: Session) -> tuple[str, dict[str, Any]]:
    here.resume()
    report = here.store.take_report()
    assert report is not None
    return report.line(), report.to_json()


def writer_of(here: Session) -> int:
    (child,) = psutil.Process().children()
    return child.pid


def told(action: Callable[[], None]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def meet_faults(here: Session) -> dict[str, Any]:
    """What this rank was told, and what was there, after each fault of the writer of rank 1."""
    found: dict[str, Any] = {}
    unlucky = here.rank == 1
    here.start_stage()
    here.train(0, 1)
    with here.store as store:

        def listing(name: str) -> None:
            torch.distributed.barrier()
            found[name] = sorted(os.listdir(here.root))
            # rank 0 must not start the next one while others still look
            torch.distributed.barrier()

        # more than the small files, less than the tensors of a rank
        limit = process_files_limited_to(writer_of(here), 20_000) if unlucky else nullcontext()
        with limit:
            store.save(here.policy, {"stage": 0, "step": 1})
            found["full told"] = told(store.finish)
        listing("full")

        store.save(here.policy, {"stage": 0, "step": 2})
        if unlucky:
            # it has just been started
            os.kill(writer_of(here), signal.SIGKILL)
        store.finish()
        listing("killed once")

        if unlucky:
            os.kill(writer_of(here), signal.SIGSTOP)
        store.save(here.policy, {"stage": 0, "step": 3})
        store.poll()
        began = time.monotonic()
        found["stopped told"] = told(store.finish)
        found["stopped after"] = time.monotonic() - began
        listing("stopped")

        for step in (4, 5):
            store.save(here.policy, {"stage": 0, "step": step})
    listing("given up")
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_hf(tmp_path_factory.mktemp("models") / "tied", family="qwen2", tied=True))


@pytest.fixture(scope="module")
def cases(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case what each of two ranks measured or was told."""
    root = tmp_path_factory.mktemp("async")
    dp2 = Run(hf_path=model, root=str(root / "dp2"), asynchronous=True)
    faults = replace(dp2, root=str(root / "faults"), timeout_s=WAIT_S)
    jobs: dict[str, Job] = {
        "saved": (train_save_train, dp2, []),
        "resumed": (resume_train, dp2, []),
        "same layout": (compare_reports, dp2, []),
        "other layout": (compare_reports, replace(dp2, pp=2), []),
        "faults": (meet_faults, faults, []),
    }
    return dict(zip(jobs, on_ranks(2, *jobs.values()), strict=True))


def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_what_was_saved(
    cases: dict[str, Any],
) -> None:
    for (after, names), resumed in zip(cases["saved"], cases["resumed"], strict=True):
        assert names == ["latest", "stage_1_step_000003"]
        assert resumed == after


def test_a_load_report_counts_tensors_and_says_what_became_of_the_generators(cases: dict[str, Any]) -> None:
    line, report = cases["same layout"][0]
    num_tensors = report["model"]["expected"]
    assert report["model"] == {
        "loaded": num_tensors, "expected": num_tensors, "found": num_tensors,
        "missing": [], "unexpected": [], "wrong_shape": [],
    }  # fmt: skip
    assert report["optimizer"]["loaded"] == report["optimizer"]["expected"] > 0
    assert report["generators"] == "restored"
    assert report["layout"] == report["layout_saved"] and report["layout"]["dp"] == 2
    # a file of tensors and one of generators from each rank, and the three that describe a directory, twice
    assert report["verified"]["files"] == 2 * (2 + 3) + 2
    assert json.loads(json.dumps(report)) == report
    assert f"model {num_tensors} of {num_tensors} tensors, 0 missing, 0 unexpected" in line
    assert "generators restored" in line and "layout dp=2, now dp=2" in line


def test_generators_start_anew_in_another_layout(cases: dict[str, Any]) -> None:
    line, report = cases["other layout"][0]
    assert "generators seeded anew from run.seed and the step" in line and "layout dp=2, now pp=2" in line
    assert report["optimizer"]["loaded"] == report["optimizer"]["expected"] > 0


def test_a_killed_writer_costs_nothing(cases: dict[str, Any]) -> None:
    for found in cases["faults"]:
        assert found["killed once"] == ["latest", "stage_0_step_000002"]


def test_a_stopped_writer_is_an_error_on_every_rank_within_its_time_out(cases: dict[str, Any]) -> None:
    for found in cases["faults"]:
        assert "rank 1: checkpoint writer (pid" in found["stopped told"]
        assert f"did not finish within {WAIT_S:g} s" in found["stopped told"]
        assert "earlier checkpoints are intact" in found["stopped told"]
        assert found["stopped after"] < 2 * WAIT_S
        assert found["stopped"] == ["latest", "stage_0_step_000002"]


def test_a_full_disk_of_a_writer_is_an_error_on_every_rank_and_publishes_nothing(
    cases: dict[str, Any],
) -> None:
    for found in cases["faults"]:
        assert "rank 1: checkpoint writer (pid" in found["full told"]
        assert "File too large: " in found["full told"]
        assert found["full"] == []


def test_a_save_waits_for_the_one_before_it_and_one_that_is_given_up_leaves_nothing(
    cases: dict[str, Any],
) -> None:
    for found in cases["faults"]:
        assert found["given up"] == ["latest", "stage_0_step_000002", "stage_0_step_000004"]


def save_and_be_killed(here: Session, told_file: Path) -> None:
    here.start_stage()
    here.train(0, 1)
    with here.store as store:
        store.save(here.policy, {"stage": 0, "step": 1})
        store.finish()
        store.save(here.policy, {"stage": 0, "step": 2})
        (told_file.with_suffix(f".{here.rank}")).write_text(str(writer_of(here)))
        torch.distributed.barrier()
        past_it = told_file.with_suffix(".past_the_barrier")
        if here.rank == 1:
            # not while the other rank is still in there
            wait_for(past_it.exists, "the other rank", timeout_s=60.0)
            os.kill(os.getpid(), signal.SIGKILL)
        past_it.touch()
        with pytest.raises(LostPeerError) as caught:
            store.finish()
    told_file.write_text(str(caught.value))


def test_a_rank_killed_while_its_writer_writes_leaves_the_previous_checkpoint_and_no_process(
    model: str, tmp_path: Path
) -> None:
    run = Run(hf_path=model, root=str(tmp_path / "run"), asynchronous=True)
    with pytest.raises(DistributedFailure):
        on_ranks(2, (save_and_be_killed, run, [tmp_path / "told"]))
    assert "a rank stopped" in (tmp_path / "told").read_text()
    assert sorted(os.listdir(run.root)) == ["latest", "stage_0_step_000001"]
    writers = [int((tmp_path / f"told.{rank}").read_text()) for rank in range(2)]
    # reaped by the machine's init, if it reaps at all
    wait_for(lambda: all(state_of(pid) in "ZX" for pid in writers), "the end of both writers", timeout_s=20.0)
