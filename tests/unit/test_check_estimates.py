"""`check` as a planner uses it: a machine type, no model and no data on the disk."""

import json
import re
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.estimate.models import known_models, named_spec
from megatron_rl.estimate.work import model_work
from tests.helpers.source import ROOT

MATH = str(ROOT / "recipes/klear_reasoner_8b/math_rl.yaml")
FULL = str(ROOT / "recipes/klear_reasoner_8b/full.yaml")
PLAN = ["--world", "64", "--gpu", "h100-80g", "--model-config", "qwen3-8b"]


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def data_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["check", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["check", *arguments]) == 2
    return capsys.readouterr().err


def test_an_8b_run_on_64_h100_is_planned_with_nothing_downloaded(capsys):
    assert main(["check", MATH, *PLAN]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = {line[:26].strip(): line[26:].strip() for line in lines}
    assert "on 64 GPUs" in heads["iteration"]
    assert "generate" in heads["iteration is"] and "GPU hours" in heads["in all"]
    assert "a guess, say --response-mean" in "\n".join(lines)
    unchecked = lines[next(i for i, line in enumerate(lines) if line.startswith("not checked")) :]
    names = [line.split()[0] for line in unchecked[1:]]
    assert names == [
        "model.hf_path",
        "stages.0.prompts",
        "stages.0.eval.sets.aime24",
        "stages.0.eval.sets.aime25",
    ]


def test_without_plan_what_is_not_there_is_still_refused(capsys):
    text = error_of(capsys, MATH, "--world", "64", "--gpu", "h100-80g")
    assert "4 problems" in text and "model.hf_path" in text


def test_a_plan_without_the_models_sizes_says_how_to_give_them(capsys):
    text = error_of(capsys, MATH, "--world", "64", "--plan")
    assert "1 problem" in text and "a plan needs its sizes: --model-config" in text


def test_a_directory_with_nothing_but_a_config_json_is_enough_for_a_plan(capsys, tmp_path):
    (tmp_path / "mine").mkdir()
    config = Path(model_file("qwen3-8b")).read_text()
    (tmp_path / "mine/config.json").write_text(config)
    data = data_of(capsys, MATH, "--world", "64", "--plan", "model.hf_path=mine")
    assert data["model"]["num_parameters"] == 8_190_735_360
    assert "model.hf_path" not in data["not_checked"]
    again = data_of(capsys, MATH, "--world", "64", "--model-config", "mine/config.json")
    assert again["model"]["num_parameters"] == 8_190_735_360


def model_file(name: str) -> Path:
    from megatron_rl.estimate import models

    return Path(models.__file__).parent / f"models/{name}.json"


def test_a_plan_still_finds_what_does_not_fit_together_all_at_once(capsys):
    text = error_of(capsys, MATH, *PLAN, "layout.tp=6", "stages.0.group_size=1", "stages.0.engine.tp=3")
    for path in ("layout", "stages.0.group_size", "stages.0.engine.tp"):
        assert path in text


def test_time_of_every_stage_is_there_for_programs(capsys):
    data = data_of(capsys, FULL, *PLAN)
    sft, math, code = data["estimate"]["time"]
    assert (sft["kind"], math["kind"], code["kind"]) == ("sft", "rl", "rl")
    assert set(math["phases_s"]) == {"generate", "reward", "logprob", "train", "sync"}
    assert sum(math["phases_s"].values()) == pytest.approx(math["step_s"])
    assert math["gpu_hours"] == pytest.approx(math["step_s"] * math["steps"] * 64 / 3600)
    assert math["tokens_per_s_per_gpu"] == pytest.approx(math["tokens_per_step"] / math["step_s"] / 64)
    assert code["phases_s"]["reward"] > math["phases_s"]["reward"]
    assert 0.2 < math["train_mfu"] < 0.5


def test_epochs_of_data_that_is_not_there_leave_gpu_hours_open_until_steps_are_given(capsys):
    assert data_of(capsys, FULL, *PLAN)["estimate"]["time"][0]["gpu_hours"] is None
    given = data_of(capsys, FULL, *PLAN, "stages.0.steps=11719")["estimate"]["time"][0]
    assert given["gpu_hours"] == pytest.approx(given["step_s"] * 11719 * 64 / 3600)


def test_longer_responses_cost_more_and_a_given_mean_is_no_guess(capsys):
    short, long = (
        data_of(capsys, MATH, *PLAN, "--response-mean", mean)["estimate"]["time"][0]
        for mean in ("4000", "16000")
    )
    assert short["mean_tokens"] == 4000 and short["is_mean_given"]
    assert long["step_s"] > 2 * short["step_s"]


def test_more_replicas_and_more_memory_shorten_generation(capsys):
    def generate_s(*more: str) -> float:
        return data_of(capsys, MATH, *PLAN, *more)["estimate"]["time"][0]["phases_s"]["generate"]

    few = generate_s("stages.0.engine.replicas=2")
    assert generate_s() < few / 3
    assert generate_s("stages.0.engine.replicas=2", "--gpu", "h200-141g") < few


def test_engines_on_other_machines_count_as_gpus_of_their_own(capsys):
    hosts = f"stages.0.engine.hosts=[{', '.join(f'10.0.0.{i}:4000' for i in range(8))}]"
    secret = "stages.0.engine.secret_file=secret"
    time = data_of(capsys, MATH, *PLAN, hosts, secret)["estimate"]["time"][0]
    assert (time["num_gpus"], time["engine_gpus"]) == (128, 64)


def test_engines_that_have_no_gpus_are_problems(capsys):
    hosts = ["stages.0.engine.hosts=[10.0.0.1:4000, 10.0.0.2:4000]", "stages.0.engine.secret_file=secret"]
    text = error_of(capsys, MATH, *PLAN, *hosts)
    assert "1 problem" in text and "stages.0.engine.replicas" in text
    assert "got 16 of tp 4 on 2 hosts, of which one would run 8 on 8 GPUs; use at most 4" in text
    text = error_of(capsys, MATH, *PLAN, "stages.0.engine.tp=16", "stages.0.engine.replicas=4")
    assert "stages.0.engine.tp" in text and "an engine runs on one machine, which has 8 GPUs" in text


HOSTS = (
    f"stages.0.engine.hosts=[{', '.join(f'n{i}:4000' for i in range(8))}]",
    "stages.0.engine.secret_file=secret",
)


@pytest.mark.parametrize(
    ("more", "num_gpus", "crosses"),
    [
        ((), 64, False),
        (HOSTS, 128, True),
        ((*HOSTS, "stages.0.engine.colocated=true"), 64, False),
        ((*HOSTS, "stages.0.engine.sleep=true"), 64, False),
        (("stages.0.engine.colocated=false",), 128, True),
        (("stages.0.overlap=one_step", "stages.0.algorithm.correction.kind=token_tis"), 128, True),
    ],
    ids=["no hosts", "hosts", "colocated", "sleeping", "not colocated", "overlap"],
)
def test_engines_are_on_the_trainers_gpus_where_the_recipe_says_so(capsys, more, num_gpus, crosses):
    data = data_of(capsys, MATH, *PLAN, *more)
    assert data["estimate"]["time"][0]["num_gpus"] == num_gpus
    # also in the plan of the transfers, which then stay on their machines
    assert (data["stages"][0]["reshard_plan"]["cross_node_bytes"] > 0) is crosses
    # and in what both need at once
    beside = data["estimate"]["memory"][0]["engine"]["largest_fraction"]
    assert (beside == 0.9) is crosses


def test_more_engines_than_the_trainer_has_gpus_are_a_problem(capsys):
    text = error_of(capsys, MATH, *PLAN[2:], "--world", "8", "stages.0.engine.gpu_memory_fraction=0.5")
    assert "1 problem" in text and "stages.0.engine.replicas" in text
    assert "on 64 GPUs, but the trainer's 8 processes are on 1 machine of 8 GPUs; use at most 2, or" in text
    hosts = ["stages.0.engine.hosts=[localhost:1, localhost:2]", "stages.0.engine.replicas=3"]
    text = error_of(capsys, MATH, *PLAN, *hosts)
    assert "got 3 of tp 4 on 2 hosts, of which one would run 3 on 8 GPUs; use at most 2, or name" in text
    named = [*HOSTS, "stages.0.engine.sleep=true", "stages.0.engine.gpu_memory_fraction=0.5"]
    text = error_of(capsys, MATH, *PLAN[2:], "--world", "8", *named)
    assert "are 8 machines, which engine.sleep says are the trainer's" in text and "name at most 1" in text
    # on a machine with more GPUs than trainer processes all of them count
    more = ["layout.tp=4", "stages.0.engine.replicas=2", "stages.0.engine.gpu_memory_fraction=0.2"]
    data = data_of(capsys, MATH, "--world", "4", "--gpu", "b200", "--model-config", "qwen3-8b", *more)
    assert data["estimate"]["time"][0]["num_gpus"] == 8


def test_a_machine_type_says_how_many_gpus_the_plan_counts_per_machine(capsys, tmp_path):
    own = tmp_path / "four.yaml"
    h100 = (ROOT / "megatron_rl/estimate/gpus/h100-80g.yaml").read_text()
    own.write_text(h100.replace("gpus_per_node: 8", "gpus_per_node: 4"))
    assert main(["check", MATH, "--world", "64", "--gpu", str(own), "--model-config", "qwen3-8b"]) == 0
    assert "between 16 machines" in capsys.readouterr().out


@pytest.mark.parametrize("length", ["0", "0.5", "nan", "inf", "-1", "x"])
def test_a_mean_length_is_at_least_one_token(capsys, length):
    with pytest.raises(SystemExit):
        main(["check", MATH, *PLAN, f"--response-mean={length}"])
    assert "must be a number of tokens, at least 1" in capsys.readouterr().err


def test_a_mean_length_beyond_the_longest_is_said_to_be_cut(capsys):
    assert main(["check", MATH, *PLAN, "--response-mean", "40000", "--prompt-mean", "9999"]) == 0
    out = capsys.readouterr().out
    assert "responses of 32,768 tokens, the longest allowed, prompts of 4,096, the longest allowed" in out


def test_engines_of_the_cluster_page_fit_the_nodes_that_it_gives_them(capsys):
    page = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    (nodes, engine_nodes, replicas), *others = re.findall(
        r"slurm\.sbatch .*--nodes (\d+) --engine-nodes (\d+) \S*math_rl\.yaml '(\S+)'", page
    )
    assert others == []
    hosts = ", ".join(f"node{i}:10000" for i in range(int(nodes) - int(engine_nodes), int(nodes)))
    given = [replicas, f"stages.*.engine.hosts=[{hosts}]", "stages.*.engine.secret_file=secret"]
    time = data_of(capsys, MATH, *PLAN, *given)["estimate"]["time"][0]
    assert (time["num_gpus"], time["engine_gpus"]) == (8 * int(nodes), 8 * int(engine_nodes))


def test_a_wrong_machine_type_or_model_is_answered_with_the_known_ones(capsys):
    assert "did you mean 'h100-80g'" in error_of(capsys, MATH, "--gpu", "h100")
    text = error_of(capsys, MATH, "--gpu", "h100-80g", "--model-config", "qwen3-8")
    assert "did you mean 'qwen3-8b'" in text


def test_options_of_estimates_alone_are_refused(capsys):
    assert "add --gpu NAME" in error_of(capsys, MATH, "--response-mean", "100")


def test_options_machine_model_and_recipe_that_are_wrong_are_named_together(capsys):
    text = error_of(capsys, MATH, "--response-mean", "100", "--suggest", "--recipe-alone")
    assert text.splitlines()[0] == "error: 3 problems"
    assert [line.split(",")[0].split(":")[0] for line in text.splitlines()[1:]] == [
        "  --response-mean", "  --recipe-alone", "  --suggest",
    ]  # fmt: skip
    text = error_of(
        capsys, MATH, "--world", "64", "--gpu", "h100", "--model-config", "qwen3-9b", "stages.0.grop_size=8"
    )
    lines = text.splitlines()
    assert lines[0] == "error: 3 problems"
    assert "--gpu: got 'h100'" in lines[1] and "--model-config: got 'qwen3-9b'" in lines[2]
    assert "stages.0.grop_size (override): unknown key" in lines[-1]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-4b", 4.0), ("qwen3-8b", 8.2), ("qwen3-14b", 14.8), ("qwen3-32b", 32.8), ("qwen3-30b-a3b", 30.5),
        ("qwen2.5-7b", 7.6), ("qwen2.5-32b", 32.8), ("llama-3.1-8b", 8.0), ("llama-3.1-70b", 70.6),
    ],
)  # fmt: skip
def test_known_models_have_the_size_that_their_cards_state(name, billions):
    assert name in known_models()
    assert model_work(named_spec(name)).num_weights / 1e9 == pytest.approx(billions, abs=0.06)


def test_engines_on_all_gpus_get_their_weights_from_trainers_of_their_machine(capsys):
    few = ["stages.0.engine.tp=1", "stages.0.engine.replicas=8"]
    plans = [data_of(capsys, MATH, *PLAN, *more)["stages"][0]["reshard_plan"] for more in (few, [])]
    assert [plan["cross_node_bytes"] for plan in plans] == [0, 0]
    # the first machine alone sends to engines that are there alone
    assert plans[0]["send_imbalance"] > 7.9 and plans[1]["send_imbalance"] < 1.1
