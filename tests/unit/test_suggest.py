"""`check --suggest`: what it ranks, that it can be pasted, and that it keeps its word."""

import json
from functools import cache
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.estimate.candidates import possible_worlds, trainer_choices
from megatron_rl.estimate.estimate import Estimate, build_estimate
from megatron_rl.estimate.hardware import load_hardware
from megatron_rl.estimate.models import named_spec
from megatron_rl.estimate.stage_time import Assumed
from megatron_rl.estimate.suggest import Suggestion, Suggestions
from megatron_rl.estimate.suggest_text import overrides
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.resolve import check_recipe
from tests.helpers.source import ROOT

MATH = str(ROOT / "recipes/klear_reasoner_8b/math_rl.yaml")
SFT = str(ROOT / "recipes/klear_reasoner_8b/sft.yaml")
PLAN = ["--gpu", "h100-80g", "--model-config", "qwen3-8b"]
OVERLAP = ("stages.0.overlap=one_step", "stages.0.algorithm.correction.kind=token_tis")
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "num_experts": 16,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8192, "norm_topk_prob": True, "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def estimated(
    recipe: str, *more: str, model: str = "qwen3-8b", world: int = 64, suggests: bool = False
) -> Estimate:
    loaded = load_recipe(recipe, more)
    spec = named_spec(model, max_positions=loaded.recipe.model.max_positions)
    resolved = check_recipe(loaded, world_size=world, model_spec=spec, planned=True)
    return build_estimate(loaded, resolved, load_hardware("h100-80g"), Assumed(), suggests=suggests)


@cache
def suggested(
    recipe: str, *more: str, model: str = "qwen3-8b", world: int = 64
) -> tuple[Estimate, Suggestions]:
    found = estimated(recipe, *more, model=model, world=world, suggests=True)
    assert found.suggestions is not None
    return found, found.suggestions


def pasted(recipe: str, suggestion: Suggestion, *more: str) -> Estimate:
    """What `check` says of the recipe with the overrides of a suggestion."""
    lines = overrides(suggestion, load_recipe(recipe, more).recipe)
    world = suggestion.trainer.layout.world_size
    if lines[0].startswith("--world"):
        assert lines[0] == f"--world {world}"
        lines = lines[1:]
    return estimated(recipe, *more, *lines, world=world)


@pytest.mark.parametrize(
    ("recipe", "more"), [(MATH, ()), (MATH, OVERLAP), (SFT, ())], ids=["rl", "overlap", "sft"]
)
def test_suggestions_pass_check_when_pasted_and_take_as_long_as_they_said(recipe, more):
    best = suggested(recipe, *more)[1].best
    assert len(best) == 10
    for suggestion in (best[0], best[1], best[9]):
        found = pasted(recipe, suggestion, *more)
        assert found.problems == ()
        assert found.total_s == pytest.approx(suggestion.total_s, rel=0.02)


@pytest.mark.parametrize("recipe", [MATH, SFT], ids=["rl", "sft"])
def test_suggestions_are_ranked_by_time_and_all_fit(recipe):
    found = suggested(recipe)[1]
    times = [suggestion.total_s for suggestion in found.best]
    assert times == sorted(times)
    assert all(suggestion.spare_bytes >= 0 for suggestion in found.best)
    assert found.num_considered > found.num_fit >= 10


def test_what_would_be_faster_but_does_not_fit_is_named_and_refused_when_pasted():
    found = suggested(SFT)[1]
    fastest = found.faster_without_memory[0]
    assert fastest.total_s < found.best[0].total_s and fastest.spare_bytes < 0
    assert "but a GPU has 79.6 GiB" in pasted(SFT, fastest).problems[0].text


def test_engines_on_a_part_of_the_gpus_are_seen_to_be_few():
    few, suggestions = suggested(MATH, "stages.0.engine.tp=1", "stages.0.engine.replicas=8")
    assert few.total_s > 3 * suggestions.best[0].total_s


def test_the_shipped_layout_is_near_the_best_that_is_predicted():
    own, suggestions = suggested(MATH)
    assert own.total_s < 1.05 * suggestions.best[0].total_s
    assert suggestions.place(own.total_s) < suggestions.num_fit / 4
    assert suggestions.place(suggestions.best[0].total_s) == 1


def test_overlap_gets_engines_with_gpus_of_their_own_and_never_more_than_there_are():
    best = suggested(MATH, *OVERLAP)[1].best
    for suggestion in best:
        assert suggestion.engine is not None and suggestion.engine.own_gpus > 0
        assert suggestion.trainer.layout.world_size + suggestion.engine.own_gpus == 64
    phases = best[0].phases
    sides = phases["generate"] + phases["reward"], phases["logprob"] + phases["train"]
    assert best[0].total_s == pytest.approx(max(sides) + phases["sync"])


def test_experts_are_spread_and_never_cut_into_narrow_shards(tmp_path):
    model = str(tmp_path / "config.json")
    Path(model).write_text(json.dumps(EXPERTS))
    best = suggested(MATH, model=model, world=16)[1].best
    assert any(suggestion.trainer.layout.ep > 1 for suggestion in best)
    Path(model).write_text(json.dumps(EXPERTS | {"moe_intermediate_size": 512}))
    spec = named_spec(model, max_positions=40960)
    choices = list(trainer_choices(load_recipe(MATH).recipe, spec, world_size=16, gpus_per_node=8))
    assert {choice.layout.expert_tp for choice in choices} == {1, 2}
    # experts whole, beside a tp of the rest that is higher
    assert {choice.layout.tp for choice in choices if choice.layout.etp == 1} == {2, 4, 8}


def test_a_recipe_that_does_not_fit_is_refused_alone_and_helped_with_suggestions(capsys):
    broken = [SFT, *PLAN, "--world", "64", "layout.tp=1", "layout.sp=false", "model.recompute=none"]
    assert main(["check", *broken]) == 2
    assert "any of these fits" in capsys.readouterr().err
    assert main(["check", *broken, "--suggest"]) == 0
    text = capsys.readouterr().out
    assert "does not fit; it would take" in text
    assert "layout.tp=4" in text


def test_a_layout_that_does_not_do_is_refused_and_others_are_suggested(capsys):
    # dp 12 does not divide the 128 rollouts of an optimizer step
    assert main(["check", MATH, *PLAN, "--world", "48", "--suggest"]) == 2
    captured = capsys.readouterr()
    assert "must be a multiple of the 12 data-parallel ranks" in captured.err
    assert captured.out.startswith("suggestions") and "layout.pp=3" in captured.out
    # what no layout helps is refused alone
    assert main(["check", MATH, *PLAN, "--world", "48", "--suggest", "stages.0.group_size=1"]) == 2
    assert capsys.readouterr().out == ""


def test_text_and_json_show_overrides_and_why_the_next_ones_lose(capsys):
    arguments = ["check", MATH, *PLAN, "--world", "64", "--suggest"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("suggestions"))
    assert "recipe's own" in lines[start + 1] and "x the first" in lines[start + 1]
    assert "layout.tp=" in lines[start + 3] and "engine.gpu_memory_fraction=" in lines[start + 3]
    assert "% slower: " in lines[start + 4]
    assert main([*arguments, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["estimate"]["suggestions"]["best"][0]
    assert " ".join(best["overrides"]) == lines[start + 3].strip()


@pytest.mark.parametrize("given", [["--gpu", "h100-80g"], ["--world", "64"]], ids=["no world", "no gpu"])
def test_suggestions_need_to_know_the_gpus_and_their_number(capsys, given):
    assert main(["check", MATH, "--suggest", *given]) == 2
    assert "add --gpu NAME and --world N" in capsys.readouterr().err


def test_engines_that_sleep_may_have_what_training_needs():
    awake, asleep = (suggested(MATH, *more)[1].best[0] for more in ((), ("stages.0.engine.sleep=true",)))
    assert asleep.memory_fraction > awake.memory_fraction
    assert pasted(MATH, asleep, "stages.0.engine.sleep=true").problems == ()


HOSTS = (
    "stages.0.engine.hosts=[n1:1, n2:1]",
    "stages.0.engine.secret_file=secret",
    "stages.0.engine.replicas=4",
)


@pytest.mark.parametrize("sleeps", [True, False])
def test_suggestions_do_not_keep_the_hosts_of_other_engines(sleeps):
    more = (*HOSTS, f"stages.0.engine.sleep={str(sleeps).lower()}")
    _, found = suggested(MATH, *more)
    for suggestion in found.best[:3]:
        lines = overrides(suggestion, load_recipe(MATH, more).recipe)
        assert {"stages.0.engine.hosts=[]", "stages.0.engine.secret_file=null"} < set(lines)
        assert ("stages.0.engine.colocated=false" in lines) is not sleeps
        again = pasted(MATH, suggestion, *more)
        assert again.problems == ()
        assert again.own_gpus == 64
        assert again.total_s == pytest.approx(suggestion.total_s, rel=0.01)


def test_a_recipe_on_more_gpus_than_the_suggestions_gets_no_place_among_them(capsys):
    assert main(["check", MATH, *PLAN, "--world", "32", "--suggest", *OVERLAP]) == 0
    own = next(line for line in capsys.readouterr().out.splitlines() if "recipe's own" in line)
    assert own.endswith("but on 96 GPUs: 32 of the trainer and those of its engines")


def test_engines_that_the_model_cannot_be_split_by_keep_nobody_from_suggestions(capsys, tmp_path):
    config = json.loads((ROOT / "megatron_rl/estimate/models/qwen3-8b.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"num_attention_heads": 30, "num_key_value_heads": 10})
    )
    plan = ["--gpu", "h100-80g", "--model-config", str(tmp_path / "config.json"), "--world", "64"]
    assert main(["check", MATH, *plan, "--suggest"]) == 2
    said = capsys.readouterr()
    assert "stages.0.engine.tp (line 45): got 4" in said.err
    assert "stages.0.engine.tp=2" in said.out


def test_a_float32_recipe_is_priced_with_its_own_sizes(capsys):
    more = ("model.dtype=float32", "model.recompute=full")
    _, found = suggested(MATH, *more)
    again = pasted(MATH, found.best[0], *more)
    assert again.total_s == pytest.approx(found.best[0].total_s, rel=0.005)
    half = estimated(MATH).times[0].step.generation
    whole = estimated(MATH, *more).times[0].step.generation
    assert half is not None and whole is not None and whole.mean_batch < half.mean_batch
    assert main(["check", MATH, *PLAN, "--world", "64", "--suggest", *more]) == 0
    assert "as in bfloat16 (float32 is slower)" in capsys.readouterr().out


def test_numbers_of_gpus_that_some_layout_is_for_are_among_the_possible_ones_and_found_at_once(capsys):
    loaded = load_recipe(MATH)
    for model in ("qwen3-8b", "qwen3-30b-a3b"):
        spec = named_spec(model, max_positions=loaded.recipe.model.max_positions)
        possible = possible_worlds(loaded.recipe, spec, gpus_per_node=8)
        for world in range(1, 50):
            choices = trainer_choices(loaded.recipe, spec, world_size=world, gpus_per_node=8)
            assert next(choices, None) is None or world in possible
    # each number between would take days
    assert main(["check", MATH, *PLAN, "--world", "100000001", "--suggest"]) == 2
    assert "do not split over 100000001 GPUs; try --world " in capsys.readouterr().err


def test_a_number_of_gpus_that_nothing_splits_over_is_answered_with_the_nearest(capsys):
    assert main(["check", MATH, *PLAN, "--world", "5", "--suggest"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(
        "suggestions  none: model and batches do not split over 5 GPUs; try --world 4 or 6\n"
    )
    assert said.out == ""
