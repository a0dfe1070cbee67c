"""Every shipped recipe passes `check` where its files are, and says what its source says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.errors import RecipeError
from megatron_rl.estimate.hardware import load_hardware
from megatron_rl.estimate.memory_problems import memory_problems
from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.load import LEFT_OPEN, load_recipe
from megatron_rl.recipe.resolve import check_recipe, run_layout
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import RlStage, SftStage
from megatron_rl.recipe.yaml_text import parse_document
from tests.helpers.source import ROOT

QWEN3_8B_BASE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
TWIN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 352,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 263,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
RECIPES = {path.relative_to(ROOT / "recipes").as_posix(): path for path in (ROOT / "recipes").rglob("*.yaml")}
FULL_SIZE = sorted(name for name in RECIPES if "/" in name and not name.endswith("_tiny.yaml"))


def load(name: str) -> Recipe:
    """The recipe, with a model for what it leaves open."""
    is_open = f"hf_path: {LEFT_OPEN}" in RECIPES[name].read_text()
    return load_recipe(RECIPES[name], ["model.hf_path=models/Qwen2.5-7B"] * is_open).recipe


def lay_out(recipe: Recipe, place: Path) -> None:
    """The model's config.json and a file for each that the recipe reads, below `place`."""
    kinds: dict[str, dict[str, Any]] = {"Qwen2.5": QWEN25_7B, "Qwen3": QWEN3_8B_BASE, "Klear": QWEN3_8B_BASE}
    model = place / recipe.model.hf_path
    model.mkdir(parents=True)
    chosen = next((config for part, config in kinds.items() if part in model.name), None)
    is_tiny = recipe.name.endswith("_tiny") or recipe.name == "quickstart"
    (model / "config.json").write_text(json.dumps(TWIN if is_tiny else chosen or QWEN3_8B_BASE))
    for stage in recipe.stages:
        sets = stage.eval.sets.values() if isinstance(stage, RlStage) and stage.eval else ()
        for file in [stage.data if isinstance(stage, SftStage) else stage.prompts, *sets]:
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            # enough rows for a tenth of the steps to be a warm-up of 1172
            (place / file).write_text("{}\n" * (160_000 if isinstance(stage, SftStage) else 1))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_passes_check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load(name)
    lay_out(recipe, tmp_path)
    loaded = load_recipe(RECIPES[name], [f"model.hf_path={recipe.model.hf_path}"])
    resolved = check_recipe(loaded, world_size=64 if name in FULL_SIZE else 2)
    if name in FULL_SIZE:
        assert resolved.layout.dp == 16 and 7e9 < resolved.num_parameters < 9e9


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_recipes_are_predicted_to_fit_64_h100(name: str, tmp_path: Path) -> None:
    recipe = load(name)
    lay_out(recipe, tmp_path)
    positions = recipe.model.max_positions
    spec = ModelSpec.from_hf(tmp_path / recipe.model.hf_path, max_positions=positions)
    layout, h100 = run_layout(recipe.layout, world_size=64), load_hardware("h100-80g")
    sizes = {"memory_gib": h100.memory_gib, "gpus_per_node": h100.gpus_per_node}
    assert memory_problems(recipe, spec, layout, **sizes) == []
    # and not because nothing is ever found
    assert memory_problems(recipe, spec, layout, **sizes | {"memory_gib": 16.0})


def test_the_model_that_compass_thinker_started_from_must_be_given() -> None:
    with pytest.raises(RecipeError, match=r"model\.hf_path .*is left open"):
        load_recipe(RECIPES["compass_thinker_7b/curriculum_30k.yaml"])


def rl_stage(name: str, number: int = 0) -> RlStage:
    stage = [stage for stage in load(name).stages if isinstance(stage, RlStage)][number]
    assert isinstance(stage, RlStage)
    return stage


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "full"])
def test_klear_sft_is_what_the_paper_states(whole: bool) -> None:
    # arXiv 2508.07629, section 4.1
    stage = load(f"klear_reasoner_8b/{'full' if whole else 'sft'}.yaml").stages[0]
    assert isinstance(stage, SftStage)
    assert (stage.epochs, stage.max_sample_tokens) == (4, 32768)
    assert (stage.optimizer.lr, stage.schedule.min_lr, stage.schedule.kind) == (8e-5, 4e-5, "cosine")


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "full"])
@pytest.mark.parametrize(
    ("number", "file", "lr", "updates", "reward"),
    [(0, "math_rl", 1e-6, 8, "math_answer"), (1, "code_rl", 5e-7, 4, "code_tests")],
    ids=["math", "code"],
)
def test_klear_rl_is_what_paper_and_script_state(
    whole: bool, number: int, file: str, lr: float, updates: int, reward: str
) -> None:
    # arXiv 2508.07629, sections 3.2 and 4.1, and Kwai-Klear/KlearReasoner recipe/dapo/perf_run_dapo_ours_*.sh
    stage = (
        rl_stage("klear_reasoner_8b/full.yaml", number)
        if whole
        else rl_stage(f"klear_reasoner_8b/{file}.yaml")
    )
    algorithm, sampling, optimizer = stage.algorithm, stage.sampling, stage.optimizer
    assert (stage.prompts_per_iteration, stage.group_size, stage.updates_per_rollout) == (128, 8, updates)
    assert stage.dynamic_sampling is not None
    assert (stage.dynamic_sampling.kind, stage.dynamic_sampling.generate_prompts) == ("oversample", 256)
    assert (algorithm.surrogate, algorithm.clip_low, algorithm.clip_high) == ("gppo", 0.2, 0.28)
    assert (algorithm.beta_low, algorithm.beta_high, algorithm.sft_on_positives) == (1.0, 1.0, 0.1)
    assert (algorithm.advantage, algorithm.aggregate, algorithm.drop_zero_advantage) == (
        "group_std", "token_mean", True,
    )  # fmt: skip
    # the paper's side of what the released code does differently
    assert algorithm.dual_clip is None and stage.grader.scale == (0.0, 1.0)
    assert (sampling.temperature, sampling.max_prompt_tokens, sampling.max_response_tokens) == (
        1.0,
        4096,
        32768,
    )
    assert sampling.prompt_truncation == "left"
    assert (optimizer.lr, optimizer.weight_decay, optimizer.max_grad_norm) == (lr, 0.1, 1.0)
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.999)
    assert (stage.schedule.kind, stage.schedule.warmup_steps) == ("constant", 10)
    assert stage.eval is not None
    assert (stage.eval.every, stage.eval.temperature, stage.eval.top_p) == (5, 0.6, 0.95)
    assert stage.rewards == {reward: 1.0} and stage.overlong is None


# the values of full.yaml are those of the three recipes beside it, which say where they come from
@pytest.mark.parametrize("name", [name for name in FULL_SIZE if not name.endswith("full.yaml")])
def test_a_full_size_recipe_marks_what_is_stated_and_what_is_ours(name: str) -> None:
    lines = [line for line in RECIPES[name].read_text().splitlines() if not line.startswith("#")]
    assert sum("[S]" in line for line in lines) >= 3 and sum("[O]" in line for line in lines) >= 3


@pytest.mark.parametrize("name", sorted(name for name in RECIPES if name.endswith("_tiny.yaml")))
def test_a_twin_goes_the_same_way_as_its_recipe(name: str) -> None:
    twin, whole = load(name), load(name.replace("_tiny", ""))
    assert [stage.kind for stage in twin.stages] == [stage.kind for stage in whole.stages]
    for small, large in zip(twin.stages, whole.stages, strict=True):
        if isinstance(small, RlStage) and isinstance(large, RlStage):
            assert small.algorithm == large.algorithm and small.rewards == large.rewards
            for part in ("dynamic_sampling", "rescore", "promote", "overlong"):
                assert (getattr(small, part) is None) == (getattr(large, part) is None), part


EXPERIMENTS = sorted((ROOT / "tools" / "ablations").glob("*.yaml"))


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_every_arm_of_an_ablation_passes_check(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = parse_document(file.read_text(), source=str(file)).data
    monkeypatch.chdir(tmp_path)
    path = ROOT / experiment["recipe"]
    lay_out(load_recipe(path, experiment["common"]).recipe, tmp_path)
    for overrides in experiment["arms"].values():
        check_recipe(load_recipe(path, [*experiment["common"], *overrides]), world_size=1)
