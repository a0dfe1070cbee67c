"""Copies of a parameter stay the same bits on every rank, and a missing sum is named in the first steps."""

from __future__ import annotations

import os
import random
import sys
from functools import partial
from typing import Any

import pytest

from megatron_rl.parallel.layout import ParallelLayout
from tests.helpers.distributed import run_distributed
from tests.helpers.models import make_tiny_hf

STEPS = 4  # one more than are checked
# without a step that changes weights, test_policy_invariance.py goes through many more
SOUND = [
    ("dense", ParallelLayout(tp=2, sp=True)),
    ("dense", ParallelLayout(pp=2, vpp=2)),
    ("dense", ParallelLayout(dp=2)),
    ("moe", ParallelLayout(tp=2, sp=True, ep=2, etp=1)),
]
# layout, and the function of megatron-core that is left out
FAULTS = {
    "norms": (ParallelLayout(tp=2, sp=True), "_allreduce_non_tensor_model_parallel_grads"),
    "q and k norms": (ParallelLayout(tp=2), "_allreduce_non_tensor_model_parallel_grads"),
    "tied head": (ParallelLayout(pp=2), "_allreduce_word_embedding_grads"),
    "gather": (ParallelLayout(dp=2), "start_param_sync"),
}


def _samples() -> list[Any]:
    from megatron_rl.data.types import TrainSample

    rng = random.Random(0)
    return [
        TrainSample(
            token_ids=[rng.randrange(251) for _ in range(12)],
            loss_mask=[False] * 4 + [True] * 8,
            sample_id=str(i),
        )
        for i in range(8)
    ]


def _train(hf_path: str, layout: ParallelLayout, rank: int, dtype: str = "float32") -> str:
    """What `STEPS` optimizer steps said: nothing, or the complaint."""
    from megatron_rl.algo.losses import sft_loss
    from megatron_rl.errors import TrainingError
    from megatron_rl.model.spec import ModelSpec
    from megatron_rl.recipe.schema import ModelConfig
    from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig
    from megatron_rl.train.batches import local_batches
    from megatron_rl.train.policy import Policy

    config = ModelConfig(hf_path=hf_path, dtype=dtype, spec="local")  # type: ignore[arg-type]
    policy = Policy(config, ModelSpec.from_hf(hf_path), layout, rank=rank)
    policy.start_stage(OptimizerConfig(lr=1e-3), ScheduleConfig(), total_steps=STEPS)
    samples = _samples()
    batches = local_batches(samples, layout, dp_rank=policy.dp_rank, tokens_per_microbatch=24)
    try:
        for _ in range(STEPS):
            policy.forward_backward(batches, partial(sft_loss, normaliser=64.0))
            policy.optimizer_step()
    except TrainingError as error:
        return str(error)
    return ""


def _leave_out(name: str) -> tuple[Any, str, Any]:
    """Make megatron-core's `name` do nothing; returns what undoes it."""
    from megatron.core.distributed import DistributedDataParallel

    # the package has a function of the module's name
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    owner = DistributedDataParallel if name == "start_param_sync" else module
    saved = (owner, name, getattr(owner, name))
    setattr(owner, name, lambda *args, **kwargs: None)
    return saved


def _ranks(rank: int, world_size: int, models: dict[str, str], sound: Any, faults: Any) -> dict[str, Any]:
    import torch

    from megatron_rl.parallel.groups import build_model_groups, destroy_model_groups, init_process_groups

    first, *_ = [layout for _, layout in sound]
    init_process_groups(
        first, rank=rank, world_size=world_size, master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]), timeout_s=60,
    )  # fmt: skip
    said: dict[str, Any] = {"sound": []}
    for kind, layout in sound:
        destroy_model_groups()
        build_model_groups(layout, timeout_s=60)
        said["sound"].append(_train(models[kind], layout, rank))
    for case, (layout, name) in faults.items():
        destroy_model_groups()
        build_model_groups(layout, timeout_s=60)
        owner, attribute, original = _leave_out(name)
        try:
            said[case] = _train(models["dense"], layout, rank)
            if case == "norms":
                said["norms in bfloat16"] = _train(models["dense"], layout, rank, "bfloat16")
        finally:
            setattr(owner, attribute, original)
    torch.distributed.barrier()
    return said


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("replicas")
    # q and k norms, a tied head and four layers: every kind of copy
    dense = make_tiny_hf(root / "dense", family="qwen3", tied=True, num_layers=4)
    moe = make_tiny_hf(root / "moe", family="qwen3_moe", num_layers=1, experts=4)
    return {"dense": str(dense), "moe": str(moe)}


@pytest.fixture(scope="module")
def on_two(models: dict[str, str]) -> list[dict[str, Any]]:
    return run_distributed(_ranks, 2, models, SOUND, FAULTS, timeout_s=400)


@pytest.mark.timeout(500)
def test_copies_agree_in_every_kind_of_layout(on_two: list[dict[str, Any]]) -> None:
    assert [rank["sound"] for rank in on_two] == [[""] * len(SOUND)] * 2


@pytest.mark.timeout(500)
@pytest.mark.parametrize("case", [*FAULTS, "norms in bfloat16"])
def test_a_sum_that_is_left_out_is_named_on_every_rank_after_the_first_step(
    on_two: list[dict[str, Any]], case: str
) -> None:
    message, other = (rank[case] for rank in on_two)
    assert message == other
    assert "after optimizer step 1 of the stage" in message
    assert "(ranks 0 | 1)" in message


@pytest.mark.timeout(500)
def test_the_message_names_the_parameters_and_the_likely_cause(on_two: list[dict[str, Any]]) -> None:
    said = on_two[0]
    for case in ("norms", "norms in bfloat16"):
        # the norms of four layers, of queries and keys, and the last one
        assert "the gradients of 17 parameters differ" in said[case]
        assert "model.layers.0.input_layernorm.weight" in said[case]
        assert "not summed over the tensor-parallel ranks" in said[case]
    # without sequence parallelism only the norms of single heads need a sum
    assert "the gradients of 8 parameters differ" in said["q and k norms"]
    assert "model.layers.0.self_attn.q_norm.weight" in said["q and k norms"]
    assert "the gradients of 1 parameters differ" in said["tied head"]
    assert "model.embed_tokens.weight" in said["tied head"]
    assert "first and the last pipeline stage" in said["tied head"]
    assert "the weights of" in said["gather"]
    assert "was not gathered by the others" in said["gather"]
