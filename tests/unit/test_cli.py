"""The command line: exit codes, one readable block per error, and commands that stay light."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli import main, write_any_text
from megatron_rl.recipe.load import load_recipe
from megatron_rl.train.run_dir import choose_run_dir
from tests.helpers.recipes import write_recipe


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return str(write_recipe(tmp_path))


def test_check_prints_the_derived_numbers(recipe, capsys):
    assert main(["check", recipe, "--world", "4", "layout.tp=2"]) == 0
    out = capsys.readouterr().out
    assert "4 processes = tp 2 x pp 1 x dp 2" in out
    assert "rollouts per iteration  32" in out


def test_check_prints_how_weights_will_travel_to_each_rl_stage(recipe, capsys):
    assert main(["check", recipe, "layout.tp=2", "stages.1.engine.tp=2", "stages.1.engine.replicas=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    moved, per_rank, pieces = (line for line in lines if line.startswith("  weights "))
    assert "on one machine, 1.00 x the minimum" in moved
    assert "max/mean 1.0" in per_rank
    assert "1 bucket of at most 256 MiB per worker, " in pieces
    hosts = ["stages.1.engine.hosts=[a:1, b:1]", "stages.1.engine.secret_file=sft.jsonl"]
    assert main(["check", recipe, "stages.1.engine.replicas=2", *hosts]) == 0
    assert "between 3 machines" in capsys.readouterr().out


def test_check_resolved_prints_every_key_as_a_recipe(recipe, tmp_path, capsys):
    assert main(["check", recipe, "--resolved", "stages.0.steps=30"]) == 0
    text = capsys.readouterr().out
    assert "    steps: 30  # override\n" in text and "      max_grad_norm: 1.0  # default\n" in text
    assert "\nlayout:\n  tp: 1" in text and "request_timeout_s: 600.0  # default" in text
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load_recipe(again).recipe == load_recipe(recipe, ["stages.0.steps=30"]).recipe
    assert main(["check", recipe, "--resolved", "--json"]) == 2
    assert "--resolved: prints the recipe in place of numbers" in capsys.readouterr().err
    assert main(["check", recipe, "--resolved", "stages.1.group_size=0"]) == 2


def test_check_json_holds_the_same_numbers_for_programs(recipe, capsys):
    assert main(["check", recipe, "layout.pp=2", "--json", "stages.0.steps=30"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["world_size"] == 2
    assert data["layout"].items() >= {"tp": 1, "pp": 2, "vpp": 1, "dp": 1, "sp": False}.items()
    assert data["stages"][0]["optimizer_steps"] == 30
    assert data["model"]["num_layers"] == 4
    sft, rl = (stage["reshard_plan"] for stage in data["stages"])
    assert sft is None
    assert rl["source"]["pp"] == 2
    assert rl["bytes_moved"] == rl["minimum_bytes"] == sum(rl["sent_bytes"].values())


def test_a_user_error_is_one_block_on_stderr_with_exit_code_2(recipe, capsys):
    assert main(["check", recipe, "layout.tq=2", "stages.1.group_size=0"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == f"error: {recipe}: 2 problems"
    assert "Traceback" not in captured.err


def test_options_may_stand_between_overrides(recipe, capsys):
    assert main(["check", recipe, "layout.tp=2", "--world", "2", "run.seed=3"]) == 0
    assert "tp 2 x pp 1 x dp 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["train"], ["check", "r.yaml", "--world", "0"], ["train", "r", "--bad"]]
)
def test_wrong_usage_exits_with_code_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: megatron-rl" in capsys.readouterr().err


def test_train_refuses_a_recipe_before_any_process_starts(recipe, tmp_path, capsys):
    assert main(["train", recipe, "--run-dir", "run", "--nproc", "3", "layout.tp=2"]) == 2
    assert "does not divide the 3 processes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_train_refuses_a_run_directory_in_use(recipe, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    assert main(["train", recipe, "--run-dir", "run", "--nproc", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: --run-dir run: holds an earlier run; add --resume")


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["--resume"], "needs --run-dir"), (["--resume", "--run-dir", "gone"], "no such directory")],
)
def test_resume_needs_the_directory_of_a_run(recipe, capsys, argv, words):
    assert main(["train", recipe, *argv]) == 2
    assert words in capsys.readouterr().err


def test_a_run_directory_that_cannot_be_made_is_a_user_error_before_anything_starts(recipe, capsys):
    assert main(["train", recipe, "--run-dir", "/dev/null/run", "--nproc", "2"]) == 2
    assert capsys.readouterr().err == (
        "error: --run-dir /dev/null/run: cannot be written (Not a directory); choose another directory\n"
    )


def test_a_report_that_cannot_be_written_is_a_user_error(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"stage": "sft", "iteration": 1, "step": 1, "time_s": 1.0}\n')
    (tmp_path / "report.html").mkdir()
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not list(tmp_path.glob("*.tmp"))


def test_a_rank_of_torchrun_needs_a_run_directory(recipe, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["train", recipe]) == 2
    assert "--run-dir: required under torchrun" in capsys.readouterr().err


def test_fresh_run_directories_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = set()
    for _ in range(4):
        path = choose_run_dir(None, name="small", resume=False)
        assert path not in seen
        seen.add(path)
        path.mkdir(parents=True)


def test_a_start_that_failed_before_its_first_step_does_not_make_a_run_directory_used(tmp_path):
    for name in ("logs", "tensorboard"):
        (tmp_path / "run" / name).mkdir(parents=True)
    for name in ("metrics.jsonl", "recipe.resolved.yaml"):
        (tmp_path / "run" / name).touch()
    assert choose_run_dir(tmp_path / "run", name="small", resume=False) == tmp_path / "run"


def test_check_imports_none_of_the_heavy_packages(recipe):
    program = (
        "import sys; from megatron_rl.cli import main; code = main(['check', sys.argv[1]]); "
        "heavy = {'torch', 'vllm', 'triton', 'megatron', 'transformers', 'numpy'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, recipe],
        capture_output=True,
        text=True,
        timeout=60,
        env=_path_to_here(),
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_python_dash_m_is_the_command(recipe):
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl", "check", recipe, "a=1"],
        capture_output=True, text=True, timeout=60, env=_path_to_here(),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "unknown key" in done.stderr


def _path_to_here():
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def test_what_a_stream_has_no_letters_for_is_escaped():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    write_any_text(stream, None)
    print("runs/fü/\udcff ▁█", file=stream, flush=True)
    assert stream.buffer.getvalue() == rb"runs/f\xfc/\udcff \u2581\u2588" + b"\n"


def test_report_of_a_directory_without_a_run_is_a_user_error(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
