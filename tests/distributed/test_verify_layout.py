"""`verify layout`: sound layouts are proven; what megatron-core could leave out is refuted, and named."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_rl.model.hf_tables import EMBEDDING, hf_tensors
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.load import load_recipe
from megatron_rl.train.launcher import held_port
from megatron_rl.verify.jobs import LayoutJob
from megatron_rl.verify.layouts import Measurement
from tests.helpers.distributed import run_distributed
from tests.helpers.proofs import write_proof

SP, PIPELINE, DATA = ParallelLayout(tp=2, sp=True), ParallelLayout(pp=2), ParallelLayout(dp=2)
SOUND = (SP, PIPELINE, DATA)


def _measure(rank: int, world_size: int, recipe_file: str, place: str, port: int) -> dict[str, Any]:
    """The reference on one process; on two, every sound layout and every fault."""
    from megatron_rl.parallel.groups import build_model_groups, destroy_model_groups
    from megatron_rl.verify.layout_rank import measure_layout, open_ranks

    recipe = load_recipe(recipe_file).recipe
    if world_size == 1:
        job = LayoutJob(
            recipe=recipe_file, layouts=(ParallelLayout(),), place=place, port=port, timeout_s=120.0
        )
        open_ranks(job, rank=rank)
        return {"one": measure_layout(recipe, ParallelLayout(), Path(place), rank=rank)}
    job = LayoutJob(recipe=recipe_file, layouts=SOUND, place=place, port=port, timeout_s=120.0)
    open_ranks(job, rank=rank)
    found: dict[str, Any] = {}
    # faults on the first stage alone
    short = replace(recipe, stages=recipe.stages[:1])
    cases = [(SP, recipe, None), (SP, short, "sp"), (PIPELINE, recipe, None), (PIPELINE, short, "tied")]
    cases += [(DATA, recipe, None), (DATA, short, "scale")]
    current = SP
    for layout, measured_recipe, fault in cases:
        if layout != current:
            destroy_model_groups()
            build_model_groups(layout, timeout_s=120.0)
            current = layout
        with _planted(fault):
            found[fault or str(layout)] = measure_layout(measured_recipe, layout, Path(place), rank=rank)
    return found


@contextmanager
def _planted(fault: str | None) -> Iterator[None]:
    # the package has a function of this name as well
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    from megatron_rl.train.policy import Policy

    if fault is None:
        yield
    elif fault == "scale":
        with patch.object(Policy, "_wrap", _halved(Policy._wrap)):
            yield
    else:
        name = {"sp": "_allreduce_non_tensor_model_parallel_grads", "tied": "_allreduce_word_embedding_grads"}
        with patch.object(finalize, name[fault], lambda *_args, **_options: None):
            yield


def _halved(wrap: Any) -> Any:
    """The same wrapper, whose sums over data-parallel ranks come out as means of two."""

    def wrapped(policy: Any, chunk: Any) -> Any:
        ddp = wrap(policy, chunk)
        for buffer in ddp.buffers:
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor = 0.5
        return ddp

    return wrapped


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Measurement], dict[str, Any]]:
    place = tmp_path_factory.mktemp("layout")
    recipe = str(write_proof(place))
    with held_port() as port:
        (alone,) = run_distributed(_measure, 1, recipe, str(place), port, timeout_s=400.0)
        ranks = run_distributed(_measure, 2, recipe, str(place), port, timeout_s=400.0)
    # every rank has the whole verdict
    assert ranks[0] == ranks[1]
    return place, alone["one"], ranks[0]


def faults_of(measured: Any, key: str) -> tuple[Measurement, list[str]]:
    """The measurement of the SFT batch, and what is wrong with it."""
    _, references, found = measured
    return found[key][0], found[key][0].faults(references[0])


def names_of(one: Measurement) -> set[str]:
    return {gap.name for gap in one.over}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", SOUND, ids=["tp2-sp", "pp2", "dp2"])
def test_a_sound_layout_is_proven_on_an_sft_and_an_rl_batch(measured, layout: ParallelLayout) -> None:
    place, references, found = measured
    assert [one.part for one in references] == ["sft", "rl"]
    tensors = set(hf_tensors(ModelSpec.from_hf(place / "model")))
    for reference, one in zip(references, found[str(layout)], strict=True):
        assert {gap.name for gap in one.gaps} == tensors
        assert one.faults(reference) == []
        # the bound is two orders above what rounding does here
        assert one.worst.relative < 1e-5, one.worst
    # both branches of the surrogate are walked
    assert references[1].shares is not None and min(references[1].shares) > 0.05


@pytest.mark.timeout(900)
def test_norms_without_their_sequence_parallel_sum_are_refuted_and_named(measured) -> None:
    one, faults = faults_of(measured, "sp")
    tensors = hf_tensors(ModelSpec.from_hf(measured[0] / "model"))
    assert names_of(one) == {name for name in tensors if name.endswith("norm.weight")}
    assert set(one.unequal) <= names_of(one) and one.unequal
    assert any("gradient tensors differ: model." in fault and "norm.weight" in fault for fault in faults)


@pytest.mark.timeout(900)
def test_a_tied_embedding_without_the_sum_of_its_two_ends_is_refuted_and_named(measured) -> None:
    one, faults = faults_of(measured, "tied")
    assert names_of(one) == {EMBEDDING} == set(one.unequal)
    assert any(
        fault.startswith(f"1 of {len(one.gaps)} gradient tensors differ: {EMBEDDING}") for fault in faults
    )


@pytest.mark.timeout(900)
def test_a_wrong_factor_over_data_parallel_ranks_is_refuted_in_every_tensor(measured) -> None:
    one, faults = faults_of(measured, "scale")
    assert names_of(one) == {gap.name for gap in one.gaps}
    assert all(gap.relative == pytest.approx(0.5, abs=0.01) for gap in one.gaps)
    assert "and " in faults[-1] and " more" in faults[-1]
    # the loss is right: only gradients show it
    assert not any(fault.startswith("the loss") for fault in faults)
