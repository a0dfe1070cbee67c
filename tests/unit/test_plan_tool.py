"""tools/plan_reshard.py: what it prints, and one clear line for whatever it cannot plan."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("plan_reshard", ROOT / "tools" / "plan_reshard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "any_name.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def run(tool, config, capsys):
    """Exit code, what is printed, and complaints."""

    def run(source, target, *more, config=config):
        code = tool.main(["--config", str(config), "--source", source, "--target", target, *more])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_summary_says_from_where_to_where_how_much_and_how_long_it_took(run):
    code, out, err = run(
        "tp=2,pp=2,dp=2,ep=2,etp=1", "tp=4,replicas=2", "--ranks-per-node", "4", "--two-tier"
    )
    assert (code, err) == (0, "")
    assert "8 trainer ranks: tp 2, pp 2, dp 2, ep 2, etp 1" in out
    assert "2 engines of tp 4: 8 workers" in out
    assert "4 nodes, every byte enters a node at most once" in out
    assert "1.000 x the minimum" in out
    assert "built and proven complete in 0." in out


def test_json_holds_summary_and_plan(run):
    code, out, _ = run("tp=2", "tp=1,replicas=2", "--json", "--dtype", "float32", "--bucket-mib", "1")
    assert code == 0
    data = json.loads(out)
    assert data["summary"]["ratio_to_minimum"] == 1.0
    assert data["summary"]["element_bytes"] == data["plan"]["element_bytes"] == 4
    assert data["plan"]["bucket_bytes"] == 2**20
    assert len(data["plan"]["segments"]) == len(data["plan"]["routes"]) > 0
    assert 0 < data["summary"]["build_seconds"] < 60


def test_engines_on_the_trainers_devices_receive_by_copies(run):
    code, out, _ = run("tp=1,dp=2", "replicas=2", "--colocated", "--json")
    facts = json.loads(out)["summary"]
    assert code == 0
    assert facts["local_bytes"] == facts["bytes_moved"]


def test_the_path_of_one_tensor(run):
    name = "model.layers.3.mlp.experts.5.down_proj.weight"
    code, out, _ = run("tp=2,pp=2,dp=2,ep=2", "tp=2", "--tensor", name)
    assert code == 0
    assert out.startswith(f"{name}  [64, 32]\nheld by\n")
    assert "local_experts.1.linear_fc2.weight" in out


@pytest.mark.parametrize(
    ("source", "target", "more", "message"),
    [
        ("tp=2,pq=2", "tp=1", (), "--source: unknown key 'pq' in 'tp=2,pq=2'; known here: tp, pp, dp"),
        ("tp=2,etpp=2", "tp=1", (), "--source: unknown key 'etpp' in 'tp=2,etpp=2'; did you mean 'etp'?"),
        (
            "tp=2",
            "tp=1,replica=2",
            (),
            "--target: unknown key 'replica' in 'tp=1,replica=2'; did you mean 'replicas'?",
        ),
        ("tp=two", "tp=1", (), "--source: tp: got 'two', must be a whole number of at least 1"),
        ("tp=2,tp=2", "tp=1", (), "--source: tp is given twice in 'tp=2,tp=2'"),
        ("", "tp=1", (), "--source: unknown key '' in ''; known here: tp, pp"),
        (
            "tp=2",
            "tp=3",
            (),
            "--target tp: got 3, which does not divide the model's 8 attention heads; use 2 or 4",
        ),
        (
            "tp=3",
            "tp=1",
            (),
            "--source tp: got 3, which does not divide the model's 8 attention heads; use 2 or 4",
        ),
        (
            "pp=3",
            "tp=1",
            (),
            "--source pp: got pp*vpp = 3*1 = 3, which does not divide the model's 4 layers; ",
        ),
        (
            "pp=2,first_stage_layers=3,last_stage_layers=3",
            "tp=1",
            (),
            "--source first_stage_layers: got first_stage_layers = 3 and last_stage_layers = 3 with pp = 2",
        ),
        ("pp=2,first=3", "tp=1", (), "--source: unknown key 'first' in 'pp=2,first=3'"),
        ("tp=2,dp=2,ep=3", "tp=1", (), "--source ep: "),
        ("tp=2", "tp=1", ("--tensor", "model.norm"), "tensor model.norm: not one of the model's"),
    ],
)
def test_what_cannot_be_planned_is_one_line_with_exit_code_2(run, source, target, more, message):
    code, out, err = run(source, target, *more)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_a_config_that_is_not_there_is_named(run, tmp_path):
    code, _, err = run("tp=1", "tp=1", config=tmp_path / "gone" / "config.json")
    assert code == 2
    assert err.startswith(f"error: {tmp_path}/gone/config.json: no such file")
    code, _, err = run("tp=1", "tp=1", config=tmp_path / "gone")
    assert code == 2
    assert "no such file; name a Hugging Face directory" in err


def test_a_model_of_another_family_is_named(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "architectures": ["GPT2LMHeadModel"]}))
    code, _, err = run("tp=1", "tp=1", config=tmp_path)
    assert code == 2
    assert 'architectures: got ["GPT2LMHeadModel"], must be one of Qwen2ForCausalLM' in err


def test_help_explains_every_key(tool, capsys):
    with pytest.raises(SystemExit) as caught:
        tool.main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for words in (*tool.SOURCE, *tool.TARGET, "examples:", "--two-tier", "no weights, no GPU"):
        assert words in out


def test_it_runs_as_a_script_without_torch(config):
    code = (
        "import sys, runpy; sys.modules['torch'] = None; "
        f"sys.argv = ['plan_reshard.py', '--config', {str(config)!r}, '--source', 'tp=2', '--target', 'tp=1']; "
        "runpy.run_path('tools/plan_reshard.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 trainer ranks" in done.stdout
