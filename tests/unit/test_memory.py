"""Memory predicted before anything starts: counts against the tables, what fits, and what is said where it does not."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from math import prod

import pytest

from megatron_rl.estimate.memory import stage_memory
from megatron_rl.estimate.memory_activations import in_flight
from megatron_rl.estimate.memory_engine import engine_memory
from megatron_rl.estimate.memory_fit import fits, largest_fraction, smallest_fraction, tightest
from megatron_rl.estimate.memory_problems import memory_problems
from megatron_rl.estimate.memory_text import memory_data, memory_rows
from megatron_rl.estimate.memory_types import GIB, StageMemory
from megatron_rl.estimate.memory_weights import fixed_bytes, rank_parameters
from megatron_rl.model.hf_tables import hf_tensors, source_pieces
from megatron_rl.model.pieces import Piece
from megatron_rl.model.spec import ModelSpec, MoeSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.schema import ModelConfig, Recipe
from megatron_rl.recipe.stages import EngineConfig, OptimizerConfig, RlStage, SamplingConfig, SftStage

QWEN3_8B = ModelSpec(
    family="qwen3", num_layers=36, hidden_size=4096, ffn_size=12288, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=151936, max_positions=40960, rope_theta=1e6, norm_eps=1e-6, tied=False, qkv_bias=False, qk_norm=True,
)  # fmt: skip
# a vocabulary without rows of padding at every tp below
SMALL = dataclasses.replace(
    QWEN3_8B,
    num_layers=8,
    hidden_size=256,
    ffn_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=1024,
)
QWEN2 = dataclasses.replace(SMALL, family="qwen2", qkv_bias=True, qk_norm=False, tied=True)
MOE = dataclasses.replace(
    SMALL,
    family="qwen3_moe",
    moe=MoeSpec(num_experts=8, experts_per_token=2, expert_ffn_size=64, normalise_top_k=True),
)
H100_GIB = 79.6


def rl_stage(**changes: object) -> RlStage:
    values: dict[str, object] = {
        "kind": "rl", "prompts": "p", "rewards": {"math_answer": 1.0}, "iterations": 1, "prompts_per_iteration": 128,
        "group_size": 8, "updates_per_rollout": 8, "tokens_per_microbatch": 36864,
        "sampling": SamplingConfig(max_prompt_tokens=4096, max_response_tokens=32768),
        "engine": EngineConfig(replicas=8, gpu_memory_fraction=0.5), "optimizer": OptimizerConfig(lr=1e-6),
    }  # fmt: skip
    return RlStage(**{**values, **changes})  # type: ignore[arg-type]


def recipe_of(stage: RlStage | SftStage, *, recompute: str = "full") -> Recipe:
    model = ModelConfig(hf_path="m", recompute=recompute)  # type: ignore[arg-type]
    return Recipe(name="r", model=model, stages=(stage,))


def memory_of(stage: RlStage | SftStage, layout: ParallelLayout, *, sleeps: bool = False) -> StageMemory:
    return stage_memory(stage, recipe_of(stage).model, QWEN3_8B, layout, sleeps=sleeps)


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (SMALL, ParallelLayout()),
        (SMALL, ParallelLayout(tp=4, pp=2, dp=2)),
        (SMALL, ParallelLayout(pp=4, vpp=2)),
        (QWEN2, ParallelLayout(tp=2)),
        (QWEN2, ParallelLayout(pp=2)),
        (MOE, ParallelLayout(tp=2, dp=4, sp=True, ep=4)),
        (MOE, ParallelLayout(tp=2, dp=2, sp=True, ep=4, etp=1)),
    ],
    ids=str,
)
def test_parameters_of_a_rank_are_what_the_tables_place_on_it(spec, layout):
    for pp_rank in range(layout.pp):
        cells: dict[tuple[int, str], int] = defaultdict(int)
        for piece in source_pieces(spec, layout, rank=layout.rank(tp=0, dp=0, pp=pp_rank)):
            cells[piece.chunk, piece.param] += piece_elements(spec, piece)
        assert rank_parameters(spec, layout, pp_rank=pp_rank).total == sum(cells.values())


def piece_elements(spec: ModelSpec, piece: Piece) -> int:
    shape = hf_tensors(spec)[piece.hf_name]
    return prod(shape) if piece.hf_dim is None else prod(shape) // shape[piece.hf_dim] * piece.length


@pytest.mark.parametrize(("element_bytes", "per_parameter"), [(4, 4 + 4 + 8 / 2), (2, 2 + 4 + 12 / 2)])
def test_dp_ranks_share_the_optimizer_and_bfloat16_has_masters(element_bytes, per_parameter):
    layout = ParallelLayout(dp=2)
    params = rank_parameters(SMALL, layout, pp_rank=0)
    assert fixed_bytes(params, layout, element_bytes=element_bytes).total == params.total * per_parameter


def test_experts_are_shared_by_fewer_ranks_than_the_rest():
    layout = ParallelLayout(tp=2, dp=4, sp=True, ep=4)
    params = rank_parameters(MOE, layout, pp_rank=0)
    assert layout.expert_dp == 1
    fixed = fixed_bytes(params, layout, element_bytes=2)
    assert fixed.optimizer == params.dense * 12 // 4 + params.experts * 12


@pytest.mark.parametrize(
    ("layout", "microbatches", "of_stages"),
    [
        (ParallelLayout(), 8, [[1]]),
        (ParallelLayout(pp=4), 8, [[4], [3], [2], [1]]),
        (ParallelLayout(pp=4), 2, [[2], [2], [2], [1]]),
        # warm-up of 2 * (pp - rank - 1) + (vpp - 1) * pp passes, and one more
        (ParallelLayout(pp=2, vpp=2), 4, [[3, 2], [2, 1]]),
        (ParallelLayout(pp=4, vpp=2), 8, [[7, 4], [5, 4], [4, 3], [4, 1]]),
    ],
    ids=str,
)
def test_stages_hold_the_micro_batches_of_the_schedule(layout, microbatches, of_stages):
    found = [in_flight(layout, pp_rank=rank, microbatches=microbatches) for rank in range(layout.pp)]
    assert found == of_stages


def test_recomputing_keeps_less_and_splitting_holds_less():
    stage = rl_stage()
    kept = stage_memory(stage, ModelConfig(hf_path="m"), QWEN3_8B, ParallelLayout(tp=4, dp=16, sp=True))
    recomputed = memory_of(stage, ParallelLayout(tp=4, dp=16, sp=True))
    split = memory_of(stage, ParallelLayout(tp=8, dp=8, sp=True))
    assert kept.busiest.peak.total > 1.5 * recomputed.busiest.peak.total
    assert recomputed.busiest.peak.total > split.busiest.peak.total


def test_keys_and_values_of_a_token_are_counted_on_each_worker():
    one, four = (engine_memory(QWEN3_8B, EngineConfig(tp=tp), element_bytes=2) for tp in (1, 4))
    # 2 * 36 layers * 8 kv heads * 128 * 2 bytes
    assert one.kv_token_bytes == 147456 == 4 * four.kv_token_bytes
    assert one.weights == pytest.approx(2 * 8.19e9, rel=0.01)
    budget = one.weights + one.overhead + 10 * 1000 * one.kv_token_bytes
    assert one.sequences(budget, 1000) == 10 and one.sequences(budget - 1, 1000) == 9
    assert one.sequences(one.weights, 1000) == 0


def test_options_of_vllm_that_take_memory_are_counted():
    plain, steps, small = (
        engine_memory(QWEN3_8B, EngineConfig(vllm=options), element_bytes=2)
        for options in ({}, {"max_num_batched_tokens": 32768}, {"kv_cache_dtype": "fp8"})
    )
    # 16,384 tokens more of 2 * 4096 + 3 * 12288 numbers
    assert steps.overhead - plain.overhead == 16384 * (2 * 4096 + 3 * 12288) * 2
    assert small.kv_token_bytes * 2 == plain.kv_token_bytes and small.weights == plain.weights


def test_the_largest_fraction_is_the_last_that_fits_and_the_smallest_the_first():
    memory = memory_of(rl_stage(), ParallelLayout(tp=4, dp=16, sp=True))
    capacity = int(H100_GIB * GIB)
    most = largest_fraction(memory, capacity)
    assert fits(memory, capacity, fraction=most) and not fits(memory, capacity, fraction=most + 0.01)
    least = smallest_fraction(memory.engine, capacity, sequences=1, tokens=memory.longest)
    assert fits(memory, capacity, fraction=least) and not fits(memory, capacity, fraction=least - 0.01)


def test_engines_that_sleep_take_turns_with_the_trainer():
    layout, capacity = ParallelLayout(tp=4, dp=16, sp=True), int(H100_GIB * GIB)
    awake, asleep = (memory_of(rl_stage(), layout, sleeps=sleeps) for sleeps in (False, True))
    assert largest_fraction(asleep, capacity) > largest_fraction(awake, capacity)
    # what stays of an engine counts beside the trainer's peak
    assert tightest(asleep).bytes > tightest(awake).bytes


def test_engines_on_other_machines_leave_the_trainer_alone():
    stage = rl_stage(engine=EngineConfig(hosts=("10.0.0.9:7000",), secret_file="s", gpu_memory_fraction=0.9))
    memory = memory_of(stage, ParallelLayout(tp=4, dp=16, sp=True))
    assert not memory.sharing
    assert fits(memory, int(H100_GIB * GIB), fraction=0.9)


def problems(stage: RlStage | SftStage, layout: ParallelLayout, *, recompute: str = "full") -> list[str]:
    recipe = recipe_of(stage, recompute=recompute)
    found = memory_problems(recipe, QWEN3_8B, layout, memory_gib=H100_GIB, gpus_per_node=8)
    return [f"{problem.path}: {problem.text}" for problem in found]


def test_a_stage_that_fits_has_no_problem():
    assert problems(rl_stage(), ParallelLayout(tp=4, dp=16, sp=True)) == []


def test_a_trainer_that_does_not_fit_is_told_changes_that_do():
    stage = SftStage(
        kind="sft", data="d", steps=1, global_batch_size=64, tokens_per_microbatch=65536, max_sample_tokens=4096,
        optimizer=OptimizerConfig(lr=1e-6),
    )  # fmt: skip
    layout = ParallelLayout(tp=2, dp=32, sp=True)
    (text,) = problems(stage, layout, recompute="none")
    assert text.startswith("stages.0.tokens_per_microbatch: with 65536 tokens a rank of pp rank 0 needs ")
    assert "any of these fits: model.recompute full, tokens_per_microbatch " in text
    tokens = int(text.partition("tokens_per_microbatch ")[2].split(",")[0])
    fewer = dataclasses.replace(stage, tokens_per_microbatch=tokens)
    assert problems(fewer, layout, recompute="none") == []
    assert problems(dataclasses.replace(fewer, tokens_per_microbatch=tokens + 1024), layout, recompute="none")
    degree = int(text.partition("layout.tp ")[2].split(",")[0])
    assert problems(stage, ParallelLayout(tp=degree, dp=64 // degree, sp=True), recompute="none") == []


def test_weights_that_do_not_fit_are_a_problem_of_the_layout():
    sampling = SamplingConfig(max_prompt_tokens=1024, max_response_tokens=3072)
    elsewhere = EngineConfig(hosts=("h:1",), secret_file="s")
    stage = rl_stage(tokens_per_microbatch=4096, sampling=sampling, engine=elsewhere)
    recipe = recipe_of(stage)
    (found,) = memory_problems(recipe, QWEN3_8B, ParallelLayout(dp=64), memory_gib=60, gpus_per_node=8)
    assert found.path == "layout"
    assert (
        found.text.startswith("in stages.0 a rank of pp rank 0 needs 6")
        and " in its load phase (" in found.text
    )
    assert "any of these fits: layout.tp 2, layout.pp 2" in found.text


def test_what_never_fits_says_so():
    stage = rl_stage(tokens_per_microbatch=36864)
    (text, *_) = problems(stage, ParallelLayout(dp=1), recompute="none")
    assert text.endswith(
        "no layout of this number of processes fits; use more of them, or GPUs with more memory"
    )


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.9, "but trainer ranks on the same GPUs (pp rank 0) need"),
        (0.25, "but one sequence of 36864 tokens takes 5.1 GiB per worker; use at least"),
    ],
)
def test_a_fraction_that_is_too_large_or_too_small_is_told_its_bound(fraction, text):
    layout = ParallelLayout(tp=4, dp=16, sp=True)
    engine = EngineConfig(replicas=8, gpu_memory_fraction=fraction)
    (found,) = problems(rl_stage(engine=engine), layout)
    assert found.startswith(f"stages.0.engine.gpu_memory_fraction: got {fraction:g} of 79.6 GiB, ")
    assert text in found
    bound = float(found.partition("use at ")[2].split()[1].rstrip(","))
    assert problems(rl_stage(engine=dataclasses.replace(engine, gpu_memory_fraction=bound)), layout) == []


def test_rows_name_the_peak_of_every_pipeline_stage():
    stage = rl_stage()
    memory = memory_of(stage, ParallelLayout(tp=2, pp=4, dp=2, sp=True))
    peaks = dict(memory_rows(memory, stage, memory_gib=H100_GIB))["  peak of each pp rank"].split(", ")
    assert len(peaks) == 4 and peaks[1] != peaks[2]


def test_rows_tell_what_hosts_may_take_if_they_are_the_trainers_machines():
    layout = ParallelLayout(tp=4, dp=16, sp=True)
    engine = EngineConfig(hosts=("10.0.0.9:7000",), secret_file="s")
    rows = dict(
        memory_rows(memory_of(rl_stage(engine=engine), layout), rl_stage(engine=engine), memory_gib=H100_GIB)
    )
    most = largest_fraction(memory_of(rl_stage(), layout), int(H100_GIB * GIB))
    assert rows["  engine.hosts"].endswith(f"(engine.colocated: true), at most {most:g}")


def test_rows_and_data_say_the_same_numbers():
    stage = rl_stage()
    memory = memory_of(stage, ParallelLayout(tp=4, dp=16, sp=True))
    rows = dict(memory_rows(memory, stage, memory_gib=H100_GIB, mean_tokens=9000))
    data = memory_data(memory, stage, memory_gib=H100_GIB)
    assert rows["memory of a rank"].endswith("of 79.6 GiB, in train")
    held = data["engine"]["longest_sequences"]
    assert rows["  KV cache holds"].startswith(f"{held:,} sequences of 36,864 tokens, the longest; ")
    assert f"at most {data['engine']['largest_fraction']:g}" in rows["  fraction beside the trainer"]
    train = data["ranks"][0]["phases"]["train"]
    assert sum(train.values()) == data["peak"]
    assert set(data["ranks"][0]["phases"]) == {"load", "generate", "logprob", "train", "step", "sync", "save"}
