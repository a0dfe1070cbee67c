"""A shrunk recipe is small, passes `check`, and keeps what makes bugs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_rl.errors import DataError
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.verify.prepare import prepare
from megatron_rl.verify.shorten import shorten
from megatron_rl.verify.shrink_model import Degrees, random_weights, small_config
from tests.helpers.proofs import write_proof

BASE: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768,
    "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def config(architecture: str, *sizes: int, **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **BASE, **dict(zip(SIZES, sizes, strict=True)), **more}


MODELS = {
    "qwen2.5-0.5b": config("Qwen2ForCausalLM", 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "qwen2.5-72b": config("Qwen2ForCausalLM", 8192, 29568, 80, 64, 8),
    "qwen3-0.6b": config("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True),
    "qwen3 without head_dim": config("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8),
    "one kv head": config("Qwen3ForCausalLM", 1024, 3072, 28, 4, 1, head_dim=64, tie_word_embeddings=True),
    "llama-3.1-8b": config(
        "LlamaForCausalLM", 4096, 14336, 32, 32, 8, layer_types=["full_attention"] * 32,
        rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "no grouping": config("LlamaForCausalLM", 2048, 5504, 24, 16, 16),
    "qwen3-30b-a3b": config(
        "Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    ),
}  # fmt: skip


def spec_of(place: Path, values: dict[str, Any]) -> ModelSpec:
    path = place / "config.json"
    path.write_text(json.dumps(values))
    return ModelSpec.from_hf(path)


@pytest.mark.parametrize("name", MODELS)
def test_a_small_model_keeps_what_makes_bugs(tmp_path: Path, name: str) -> None:
    before = spec_of(tmp_path, MODELS[name])
    small = small_config(MODELS[name], before, Degrees(tp=(1, 2), stages=2, ep=2, expert_tp=2))
    after = spec_of(tmp_path, small)
    kept = ("family", "vocab_size", "tied", "qkv_bias", "qk_norm", "rope_theta", "rope_scaling", "norm_eps")
    assert all(getattr(after, key) == getattr(before, key) for key in kept)
    assert after.num_heads // after.num_kv_heads == before.num_heads // before.num_kv_heads
    assert (after.num_kv_heads == 1) == (before.num_kv_heads == 1)
    coupled = [spec.hidden_size == spec.num_heads * spec.head_dim for spec in (before, after)]
    assert coupled[0] == coupled[1]
    assert ("head_dim" in small) == ("head_dim" in MODELS[name] or not coupled[0])
    # without the vocabulary, which is the user's
    others = sum(
        math.prod(s) for n, s in hf_tensors(after).items() if "embed" not in n and "lm_head" not in n
    )
    assert others < 1.2e7
    for layout in (ParallelLayout(tp=2, sp=True), ParallelLayout(pp=2), ParallelLayout(tp=2, pp=2, sp=True)):
        after.check_layout(layout)
    if after.moe is not None and before.moe is not None:
        assert after.moe.normalise_top_k == before.moe.normalise_top_k
        assert 1 < after.moe.experts_per_token < after.moe.num_experts < before.moe.num_experts
        after.check_layout(ParallelLayout(dp=2, ep=2))


def test_degrees_decide_how_small_a_model_may_be(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MODELS["no grouping"])
    small = small_config(MODELS["no grouping"], spec, Degrees(tp=(1, 4), stages=6))
    spec_of(tmp_path, small).check_layout(ParallelLayout(tp=4, pp=3, vpp=2, sp=True))


def test_a_small_model_is_never_larger(tmp_path: Path) -> None:
    tiny = config("Qwen3ForCausalLM", 48, 40, 2, 2, 1, head_dim=16)
    after = small_config(tiny, spec_of(tmp_path, tiny), Degrees(tp=(1, 2)))
    assert all(after[key] <= tiny[key] for key in SIZES)


def test_random_weights_follow_from_the_seed_and_none_is_constant(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {**MODELS["one kv head"], "vocab_size": 32, "num_hidden_layers": 1})
    one, same, other = (random_weights(spec, seed=seed) for seed in (1, 1, 2))
    assert {name: tuple(t.shape) for name, t in one.items()} == hf_tensors(spec)
    assert all(one[n].equal(same[n]) and not one[n].equal(other[n]) and one[n].std() > 0 for n in one)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("source")
    recipe = write_proof(place, num_layers=6, hidden=128, ffn=512)
    # not needed: a proof may be run where the weights are not
    (place / "model" / "model.safetensors").unlink()
    return recipe


def shrunk(source: Path, place: Path, *overrides: str, trains: bool = True, **options: Any):
    place.mkdir()
    return prepare(str(source), overrides, place, shrink=True, trains=trains, **options)


def test_a_shrunk_recipe_passes_check_without_the_weights_and_says_what_changed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = shrunk(source, tmp_path / "place", "layout.tp=4", "layout.sp=true")
    shown = capsys.readouterr().out
    assert "num_hidden_layers: 6 -> 4" in shown and "layout.tp: 4 -> 2" in shown
    assert "weights: random, from seed 1" in shown and "stages.1.rewards.coin: nothing -> 1.0" in shown
    model = Path(prepared.recipe.model.hf_path)
    spec = ModelSpec.from_hf(model)
    assert load_file(model / "model.safetensors").keys() == hf_tensors(spec).keys()
    assert (model / "tokenizer.json").read_bytes() == (
        source.parent / "model" / "tokenizer.json"
    ).read_bytes()
    assert spec.tied and spec.num_kv_heads == 1 and prepared.world_size == 2


def test_samples_of_a_step_divide_by_the_ranks_of_every_layout(source: Path, tmp_path: Path) -> None:
    layouts = [ParallelLayout(dp=3), ParallelLayout(dp=2)]
    sft, rl = shrunk(source, tmp_path / "place", trains=False, layouts=layouts).recipe.stages
    assert sft.global_batch_size % 6 == 0
    assert rl.prompts_per_iteration // rl.updates_per_rollout * rl.group_size % 6 == 0
    # not run: the user's rewards and filter stay
    assert rl.rewards == {"math_answer": 1.0} and rl.algorithm.drop_zero_advantage


def test_every_window_of_a_curriculum_has_rows(source: Path, tmp_path: Path) -> None:
    windows = "stages.1.curriculum=[{iterations: 1, difficulty: [0, 1]}, {iterations: 1, difficulty: [3, 3]}]"
    stage = shrunk(source, tmp_path / "place", windows).recipe.stages[1]
    rows = [json.loads(line) for line in Path(stage.prompts).read_text().splitlines()]
    assert {row["difficulty"] for row in rows} == {0, 1, 3}
    with pytest.raises(DataError, match="difficulty in"):
        shrunk(source, tmp_path / "other", windows.replace("[3, 3]", "[7, 9]"))


def test_what_needs_a_model_that_solves_something_is_left_out_of_a_proof(
    source: Path, tmp_path: Path
) -> None:
    stage = shrunk(
        source,
        tmp_path / "place",
        "stages.1.dynamic_sampling={kind: refill, generate_prompts: 8}",
        "stages.1.overlong={kind: penalty, buffer_tokens: 16}",
        "stages.1.sampling.max_response_tokens=32",
        "stages.1.tokens_per_microbatch=256",
        "stages.1.rescore={samples: 8, drop_below: 0.1}",
        "stages.1.curriculum=[{iterations: 2, pass_rate: [0.2, 0.8]}]",
    ).recipe.stages[1]
    assert stage.dynamic_sampling is None and stage.curriculum == ()
    assert stage.overlong.buffer_tokens == 16 <= stage.sampling.max_response_tokens
    assert (stage.rescore.samples, stage.rescore.drop_below) == (2, 0.0)


def test_no_step_that_a_kill_is_planned_for_is_promoted_away(source: Path) -> None:
    from megatron_rl.recipe.load import load_recipe

    rule = "{on: truncated_frac, window: 1, threshold: 0.5}"
    window = f"{{iterations: 9, difficulty: [0, 3], promote: {rule}}}"
    for override in (f"stages.1.promote={rule}", f"stages.1.curriculum=[{window}]"):
        (_, stage) = shorten(load_recipe(source, ["stages.1.iterations=9", override]).recipe).stages
        assert stage.promote is None and all(each.promote is None for each in stage.curriculum)


def test_a_shortened_run_crosses_a_border_of_the_curriculum_and_saves_on_the_way(source: Path) -> None:
    from megatron_rl.recipe.load import load_recipe
    from megatron_rl.recipe.stages import CurriculumWindow

    recipe = load_recipe(source).recipe
    windows = tuple(CurriculumWindow(iterations=30, difficulty=(n, n)) for n in range(3))
    stage = replace(recipe.stages[1], iterations=90, curriculum=windows)
    short = shorten(replace(recipe, stages=(recipe.stages[0], stage), checkpoint=None))
    assert [window.iterations for window in short.stages[1].curriculum] == [2, 2]
    assert short.stages[1].iterations == 4 and short.checkpoint.every_steps == 2
