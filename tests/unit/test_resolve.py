"""A recipe is checked against the world, the model and the disk in one go, and its numbers follow."""

import json
import re
from dataclasses import replace

import pytest

from megatron_rl.errors import RecipeError
from megatron_rl.model.spec import ModelSpec, MoeSpec
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.resolve import check_recipe, smallest_world
from megatron_rl.recipe.summary import summary_table
from tests.helpers.recipes import write_recipe


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_recipe(tmp_path)


def problems(recipe, *overrides, world=1):
    """Dotted path to message."""
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe(recipe, overrides), world_size=world)
    lines = [line.strip().split(": ", 1) for line in str(caught.value).splitlines()[1:]]
    return {where.split(" ")[0]: text for where, text in lines}


def test_a_checkpoint_to_start_from_must_be_there(recipe):
    found = problems(recipe, "model.checkpoint=imported")
    assert found["model.checkpoint"].startswith("no directory imported in ")


@pytest.mark.parametrize("name", ["a" * 5000, "a/" * 5000, "a\\0b"], ids=["long", "deep", "nul"])
def test_a_path_that_no_file_can_have_is_one_that_is_not_there(recipe, name):
    found = problems(
        recipe, f'model.hf_path="{name}"', f'stages.1.prompts="{name}"', f'stages.0.data="{name}"'
    )
    assert set(found) == {"model.hf_path", "stages.1.prompts", "stages.0.data"}
    assert all(text.startswith("no ") and len(text) < 600 for text in found.values())


def test_a_good_recipe_gives_its_numbers(recipe):
    loaded = load_recipe(recipe, ["layout.tp=2", "layout.pp=2"])
    resolved = check_recipe(loaded, world_size=8)
    assert (resolved.layout.tp, resolved.layout.pp, resolved.layout.dp) == (2, 2, 2)
    assert resolved.padded_vocab == 96
    assert resolved.layers_per_pp_rank == 2
    # embedding and head 2 * 70*64; per layer q, o 2 * 64*64, k, v 2 * 32*64, biases 64 + 2*32, mlp 3 * 96*64,
    # two norms of 64; final norm 64
    per_layer = 2 * 64 * 64 + 2 * 32 * 64 + 128 + 3 * 96 * 64 + 128
    assert resolved.num_parameters == 2 * 70 * 64 + 4 * per_layer + 64
    sft, rl = resolved.stages
    assert (sft.optimizer_steps, sft.samples_per_step, sft.samples_per_step_per_dp) == (20, 8, 4)
    assert (rl.iterations, rl.optimizer_steps, rl.rollouts_per_iteration) == (6, 12, 32)
    assert (rl.samples_per_step, rl.samples_per_step_per_dp) == (16, 8)
    assert (rl.max_tokens_per_iteration, rl.max_tokens_total) == (32 * 96, 6 * 32 * 96)
    assert smallest_world(loaded.recipe) == 4


def test_a_given_spec_is_used_instead_of_the_directory(recipe):
    spec = ModelSpec(
        family="qwen2", num_layers=2, hidden_size=8, ffn_size=8, num_heads=2, num_kv_heads=1, head_dim=4,
        vocab_size=10, max_positions=128, rope_theta=1e4, norm_eps=1e-6, tied=True,
        qkv_bias=True, qk_norm=False,
    )  # fmt: skip
    assert check_recipe(load_recipe(recipe), world_size=1, model_spec=spec).spec is spec


def test_an_engine_that_cannot_split_the_vocabulary_is_a_problem(recipe):
    spec = ModelSpec(
        family="qwen2", num_layers=2, hidden_size=24, ffn_size=96, num_heads=6, num_kv_heads=3, head_dim=4,
        vocab_size=70, max_positions=128, rope_theta=1e4, norm_eps=1e-6, tied=True,
        qkv_bias=True, qk_norm=False,
    )  # fmt: skip
    words = r"stages\.1\.engine\.tp.*: got 3, which does not divide the model's 128 padded vocabulary rows"
    with pytest.raises(RecipeError, match=words):
        check_recipe(load_recipe(recipe, ["stages.1.engine.tp=3"]), world_size=1, model_spec=spec)


def experts_spec() -> ModelSpec:
    return ModelSpec(
        family="qwen3_moe", num_layers=5, hidden_size=8, ffn_size=8, num_heads=4, num_kv_heads=2, head_dim=4,
        vocab_size=64, max_positions=256, rope_theta=1e4, norm_eps=1e-6, tied=True, qkv_bias=False, qk_norm=True,
        moe=MoeSpec(num_experts=6, experts_per_token=2, expert_ffn_size=8, normalise_top_k=True),
    )  # fmt: skip


def test_experts_and_uneven_stages_give_their_numbers(recipe):
    layout = ["tp=2", "sp=true", "pp=2", "ep=3", "etp=1", "first_stage_layers=2"]
    sizes = ["stages.0.global_batch_size=60", "stages.1.prompts_per_iteration=60"]
    loaded = load_recipe(recipe, [f"layout.{key}" for key in layout] + sizes)
    # a stage of tp 2 holds experts on 3 ranks or multiples: three replicas of the rest are the fewest
    assert smallest_world(loaded.recipe) == 12
    resolved = check_recipe(loaded, world_size=24, model_spec=experts_spec())
    assert (resolved.layout.dp, resolved.layout.expert_tp, resolved.layout.expert_dp) == (6, 1, 4)
    assert (resolved.stage_layers, resolved.layers_per_pp_rank) == ((2, 3), 3)
    table = summary_table(loaded, resolved)
    assert re.search(r"^layers +5, 2, 3 on the pp ranks$", table, re.M)
    assert re.search(r"^experts +6, of which a token takes 2; ep 3 x etp 1 x 4 replicas$", table, re.M)


@pytest.mark.parametrize(
    ("layout", "world", "path", "words"),
    [
        (["tp=2"], 2, "layout.sp", "got false with tp = 2; megatron-core trains experts only on activations"),
        (["ep=4"], 4, "layout.ep", "does not divide the model's 6 experts; use 3 or 6"),
        (["ep=2"], 3, "layout.ep", r"must divide the tp*dp = 1*3 = 3 ranks of a pipeline stage; use 1 or 3"),
        (["ep=2", "etp=3"], 6, "layout.etp", "does not divide the 8 columns of an expert; use 2 or 4"),
        (["etp=2"], 2, "layout.etp", "got 2 with ep = 1 and tp = 1"),
    ],
    ids=str,
)
def test_expert_degrees_that_cannot_be_are_refused_with_others_that_can(recipe, layout, world, path, words):
    sizes = ["stages.0.global_batch_size=60", "stages.1.prompts_per_iteration=60"]
    loaded = load_recipe(recipe, [f"layout.{key}" for key in ("pp=5", *layout)] + sizes)
    with pytest.raises(RecipeError, match=f"{re.escape(path)}.*{re.escape(words)}"):
        check_recipe(loaded, world_size=5 * world, model_spec=experts_spec())


def test_engines_split_experts_by_columns(recipe):
    loaded = load_recipe(recipe, ["layout.pp=5", "stages.1.engine.tp=4"])
    with pytest.raises(RecipeError, match=r"stages\.1\.engine\.tp.*the model's 6 columns of an expert"):
        spec = experts_spec()
        assert spec.moe is not None
        moe = replace(spec.moe, expert_ffn_size=6)
        check_recipe(loaded, world_size=5, model_spec=replace(spec, moe=moe))


@pytest.mark.parametrize("overrides", [["stages.1.tokens_per_microbatch=100"], ["layout.sp=false"]])
def test_a_micro_batch_that_holds_the_padded_longest_sample_is_enough(recipe, overrides):
    layout = ["layout.sp=true", "layout.tp=4"]
    sizes = ["stages.1.sampling.max_response_tokens=66", "stages.1.tokens_per_microbatch=98"]
    check_recipe(load_recipe(recipe, [*layout, *sizes, *overrides]), world_size=4)


CASES = [
    # overrides, world, path, words
    (["layout.tp=2", "layout.pp=2"], 6, "layout",
     "tp*pp = 2*2 = 4 does not divide the 6 processes of this run; start 4 or 8"),
    (["layout.tp=3"], 3, "layout.tp", "does not divide the model's 4 attention heads; use 2 or 4"),
    (["layout.pp=3"], 3, "layout.pp", "does not divide the model's 4 layers; make pp*vpp 2 or 4"),
    (["layout.vpp=2"], 1, "layout.vpp", "interleaving needs pp >= 2"),
    (["layout.first_stage_layers=1"], 1, "layout.first_stage_layers", "got 1 with pp=1; one stage holds all layers"),
    (["layout.pp=2", "layout.first_stage_layers=1", "layout.last_stage_layers=2"], 2, "layout.first_stage_layers",
     "does not split the model's 4 layers into stages that are multiples of vpp; "
     "use first_stage_layers = 1 and last_stage_layers = 3 or first_stage_layers = 2 and last_stage_layers = 2"),
    (["layout.pp=2", "layout.last_stage_layers=4"], 2, "layout.last_stage_layers",
     "use last_stage_layers = 3 or last_stage_layers = 2"),
    (["layout.ep=2"], 2, "layout.ep", "got 2, but the model has no experts; set it to 1"),
    (["layout.etp=1"], 1, "layout.etp", "got 1, but the model has no experts; set it to null"),
    (["stages.1.engine.tp=3"], 1, "stages.1.engine.tp", "does not divide the model's 4 attention heads"),
    (["stages.0.global_batch_size=10"], 4, "stages.0.global_batch_size",
     "multiple of the 4 data-parallel ranks; use 8 or 12"),
    (["stages.1.prompts_per_iteration=9"], 1, "stages.1.prompts_per_iteration",
     "updates_per_rollout = 2; use 8 or 10"),
    (["stages.1.prompts_per_iteration=2", "stages.1.group_size=3"], 2, "stages.1.prompts_per_iteration",
     "2 / 2 * 3 = 3 rollouts per optimizer step, must be a multiple of the 2 data-parallel ranks; use 4 prompts"),
    (["stages.1.group_size=1"], 1, "stages.1.group_size", "got 1, must be at least 2"),
    (["stages.0.schedule.warmup_steps=21"], 1, "stages.0.schedule.warmup_steps", "use at most 20"),
    (["stages.1.schedule.warmup_steps=13"], 1, "stages.1.schedule.warmup_steps", "has 12 optimizer steps"),
    (["stages.0.schedule.min_lr=1"], 1, "stages.0.schedule.min_lr", "must be at most optimizer.lr = 0.001"),
    (["stages.1.schedule.min_lr=1e-6"], 1, "stages.1.schedule.min_lr", "a constant schedule does not use"),
    (["stages.1.algorithm.dual_clip=1"], 1, "stages.1.algorithm.dual_clip", "got 1.0, must be above 1"),
    (["stages.1.algorithm.surrogate=grpo", "stages.1.algorithm.clip_high=0.3"], 1,
     "stages.1.algorithm.clip_high",
     "not used by surrogate grpo, only by ppo, clip_higher, gppo, "),
    (["stages.1.algorithm.surrogate=clip_higher", "stages.1.algorithm.beta_low=0.5"], 1,
     "stages.1.algorithm.beta_low", "not used by surrogate clip_higher, only by gppo"),
    (["stages.1.curriculum.0.iterations=3"], 1, "stages.1.curriculum", "windows last 7 iterations"),
    (["stages.1.curriculum.1.difficulty=[5, 3]"], 1, "stages.1.curriculum.1.difficulty", "got [5, 3]"),
    (["stages.1.rewards.formt=1"], 1, "stages.1.rewards.formt", "did you mean 'format'?"),
    (["stages.1.rewards={math_answer: 1, code_tests: 1}"], 1, "stages.1.rewards", "both judge the answer"),
    (["stages.1.rewards={format: 1}"], 1, "stages.1.rewards", "no reward judges the answer"),
    (["stages.1.eval.sets={}"], 1, "stages.1.eval.sets", "is empty"),
    (["stages.1.sampling.top_p=0.9"], 1, "stages.1.sampling.top_p", "must be 1.0 in training rollouts"),
    (["stages.1.sampling.top_k=5"], 1, "stages.1.sampling.top_k", "must be -1 in training rollouts"),
    (["stages.1.sampling.max_response_tokens=240"], 1, "stages.1.sampling.max_response_tokens",
     "32 + 240 = 272, but the model has 256 positions"),
    (["stages.0.max_sample_tokens=300"], 1, "stages.0.max_sample_tokens", "the model has 256 positions"),
    (["stages.1.tokens_per_microbatch=95"], 1, "stages.1.tokens_per_microbatch", "raise it to 96"),
    (["stages.0.tokens_per_microbatch=127"], 1, "stages.0.tokens_per_microbatch", "raise it to 128"),
    (["layout.sp=true", "layout.tp=4", "stages.1.sampling.max_response_tokens=66",
      "stages.1.tokens_per_microbatch=98"], 4, "stages.1.tokens_per_microbatch",
     "with tp = 4 can fill 96, but the longest sample takes 97 positions; raise it to 100"),
    (["layout.sp=true", "layout.tp=4", "stages.0.max_sample_tokens=126", "stages.0.tokens_per_microbatch=127"],
     4, "stages.0.tokens_per_microbatch", "the longest sample takes 125 positions; raise it to 128"),
    (["stages.1.engine.port=70000"], 1, "stages.1.engine.port", "at most 65535"),
    (["model.hf_path=nowhere"], 1, "model.hf_path", "no directory nowhere in "),
    (["stages.0.data=a.jsonl"], 1, "stages.0.data", "no file a.jsonl in "),
    (["stages.1.prompts=/b.jsonl"], 1, "stages.1.prompts", "no file /b.jsonl"),
    (["stages.1.eval.sets.heldout=c.jsonl"], 1, "stages.1.eval.sets.heldout", "no file c.jsonl in "),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world", "path", "words"), CASES, ids=[case[0][-1] for case in CASES])
def test_what_does_not_fit_is_the_one_problem_reported(recipe, overrides, world, path, words):
    found = problems(recipe, *overrides, world=world)
    assert list(found) == [path]
    assert words in found[path]


def test_a_model_that_cannot_be_built_is_a_problem_of_its_path(recipe):
    config = recipe.parent / "model" / "config.json"
    config.write_text(config.read_text().replace("Qwen2ForCausalLM", "BertModel"))
    assert "BertModel" in problems(recipe)["model.hf_path"]


def test_violations_of_world_model_stages_and_disk_are_reported_together(recipe):
    found = problems(
        recipe,
        "layout.tp=3", "layout.pp=3", "stages.0.data=x", "stages.0.schedule.warmup_steps=99",
        "stages.1.sampling.top_p=0.5", "stages.1.engine.tp=8", "stages.1.rewards={formt: 1}",
        world=10,
    )  # fmt: skip
    assert set(found) == {
        "layout", "layout.tp", "layout.pp", "stages.0.data", "stages.0.schedule.warmup_steps",
        "stages.1.sampling.top_p", "stages.1.engine.tp", "stages.1.rewards", "stages.1.rewards.formt",
    }  # fmt: skip


def test_a_reference_policy_shows_its_memory_and_has_to_be_there(recipe):
    kl = "stages.1.algorithm.kl={coefficient: 0.01}"
    loaded = load_recipe(recipe, [kl, "layout.tp=2"])
    resolved = check_recipe(loaded, world_size=2)
    kib = resolved.num_parameters * 4 / 2 / 2**10
    want = rf"^  reference policy +about {kib:,.1f}".removesuffix(".0") + " KiB of host memory per rank"
    assert re.search(want, summary_table(loaded, resolved), re.M)
    plain = load_recipe(recipe)
    assert "reference policy" not in summary_table(plain, check_recipe(plain, world_size=1))
    for heads in (4, 8):
        (recipe.parent / f"of_{heads}").mkdir()
        config = {
            **json.loads((recipe.parent / "model" / "config.json").read_text()),
            "num_attention_heads": heads,
        }
        (recipe.parent / f"of_{heads}" / "config.json").write_text(json.dumps(config))
    check_recipe(load_recipe(recipe, [kl, "stages.1.algorithm.kl.reference=of_4"]), world_size=1)
    shaped = problems(recipe, kl, "stages.1.algorithm.kl.reference=of_8")
    assert "of another shape" in shaped["stages.1.algorithm.kl.reference"]
    found = problems(recipe, kl, "stages.1.algorithm.kl.reference=nowhere")
    assert (
        set(found) == {"stages.1.algorithm.kl.reference"}
        and "no directory nowhere" in found["stages.1.algorithm.kl.reference"]
    )


@pytest.mark.parametrize("surrogate", ["grpo", "clip_higher", "gppo"])
def test_default_clip_options_fit_every_surrogate(recipe, surrogate):
    check_recipe(load_recipe(recipe, [f"stages.1.algorithm.surrogate={surrogate}"]), world_size=1)


def test_an_entry_in_the_table_of_rewards_is_all_that_a_recipe_needs_to_name_it(recipe, monkeypatch):
    from megatron_rl.rewards import REWARDS

    override = "stages.1.rewards={math_answer: 1.0, brevity: 0.2}"
    assert set(problems(recipe, override)) == {"stages.1.rewards.brevity"}
    monkeypatch.setitem(REWARDS, "brevity", REWARDS["format"])
    check_recipe(load_recipe(recipe, [override]), world_size=1)
    monkeypatch.setitem(REWARDS, "brevity", REWARDS["math_answer"])
    assert "both judge" in problems(recipe, override)["stages.1.rewards"]


def test_max_positions_of_the_recipe_stand_in_place_of_the_models(recipe):
    longer = ["stages.1.sampling.max_response_tokens=400", "stages.1.tokens_per_microbatch=512"]
    assert "set model.max_positions" in problems(recipe, *longer)["stages.1.sampling.max_response_tokens"]
    resolved = check_recipe(load_recipe(recipe, [*longer, "model.max_positions=432"]), world_size=1)
    assert resolved.spec.max_positions == 432


def test_one_name_of_an_evaluation_set_means_one_file(recipe):
    text = recipe.read_text()
    head, stage = text.split("  - kind: rl")
    stage, rest = stage.split("checkpoint:")
    second = stage.replace("heldout: heldout.jsonl", "heldout: train.jsonl")
    recipe.write_text(f"{head}  - kind: rl{stage}  - kind: rl{second}checkpoint:{rest}")
    found = problems(recipe)
    assert set(found) == {"stages.2.eval.sets.heldout"}
    assert (
        "stages.1.eval.sets.heldout of the same name is heldout.jsonl" in found["stages.2.eval.sets.heldout"]
    )


def test_a_profile_of_steps_that_the_run_does_not_have_is_a_problem(recipe):
    total = sum(
        getattr(stage, "steps", 0) or getattr(stage, "iterations", 0)
        for stage in load_recipe(recipe).recipe.stages
    )
    found = problems(recipe, f"run.profile={{first_step: {total + 1}}}")
    assert found["run.profile.first_step"].startswith(
        f"got {total + 1}, but the run has {total} steps over its stages"
    )
    loaded = load_recipe(recipe, [f"run.profile={{first_step: {total}, steps: 9}}"])
    assert check_recipe(loaded, world_size=1).layout.dp == 1


def test_a_profile_of_more_steps_than_a_trace_can_hold_is_a_problem(recipe):
    many = ("run.profile={first_step: 1, steps: 1000000000}", "stages.1.iterations=1000000000")
    assert re.fullmatch(
        r"got 1000000000, must be at most \d{4,6} here: its trace would have more than 5,000,000 spans",
        problems(recipe, *many)["run.profile.steps"],
    )
    operators = problems(recipe, many[0].replace("}", ", operators: true}"))
    assert operators["run.profile.steps"].startswith("got 1000000000, must be at most 20 here: operators")
    # as many as there are, which are few
    loaded = load_recipe(recipe, many[:1])
    assert check_recipe(loaded, world_size=1).layout.dp == 1


def test_buckets_that_would_cut_a_large_model_into_very_many_are_refused(recipe):
    spec = ModelSpec(
        family="llama", num_layers=80, hidden_size=8192, ffn_size=28672, num_heads=64, num_kv_heads=8,
        head_dim=128, vocab_size=128256, max_positions=8192, rope_theta=5e5, norm_eps=1e-5, tied=False,
        qkv_bias=False, qk_norm=False,
    )  # fmt: skip
    small, allowed = (load_recipe(recipe, [f"stages.1.engine.bucket_mib={mib}"]) for mib in (1, 5))
    with pytest.raises(
        RecipeError, match=r"bucket_mib.*: got 1, which would cut .* use at least 5, better 256"
    ):
        check_recipe(small, world_size=1, model_spec=spec)
    assert check_recipe(allowed, world_size=1, model_spec=spec).num_parameters > 70e9
