"""The tiny model is a whole Hugging Face directory, the same for the same seed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.data.chat import render_conversation, render_prompt, stop_token_ids
from megatron_rl.data.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CONVERSATION = [
    {"role": "user", "content": "4+7-1"},
    {"role": "assistant", "content": "<think>4+7=11,11-1=10</think>\\boxed{10}"},
]


@pytest.fixture(scope="module")
def tool():
    """The tool in this process: loading torch anew for each run would take most of the time."""
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "tools" / "make_tiny_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    command = [sys.executable, "tools/make_tiny_model.py", "--out", str(path)]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    return path


def test_transformers_loads_the_model_and_it_computes(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer("4+7-1", return_tensors="pt").input_ids
    logits = model(ids).logits
    assert logits.shape == (1, 5, 64)
    assert logits.dtype == torch.float32
    assert bool(logits.isfinite().all())


def test_model_has_the_sizes_that_were_asked_for(model_dir):
    config = AutoModelForCausalLM.from_pretrained(model_dir).config
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("qwen2", 4, 128)
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (4, 2, 352)
    assert config.max_position_embeddings == 512
    assert not config.tie_word_embeddings


def test_prompt_is_two_markers_and_one_token_per_character(model_dir):
    tokenizer = load_tokenizer(model_dir)
    ids = render_prompt(tokenizer, CONVERSATION[:1])
    assert tokenizer.decode(ids) == "<user>4+7-1<assistant>"
    assert len(ids) == 7


def test_response_is_trained_on_up_to_eos_with_think_marks_kept_as_plain_tokens(model_dir):
    tokenizer = load_tokenizer(model_dir)
    ids, mask = render_conversation(tokenizer, CONVERSATION)
    response = [i for i, trained in zip(ids, mask, strict=True) if trained]
    assert tokenizer.decode(response) == CONVERSATION[1]["content"] + "<eos>"
    think = tokenizer.encode("<think></think>")
    assert len(think) == 2
    assert tokenizer.special_token_ids.isdisjoint(think)
    hf = AutoTokenizer.from_pretrained(model_dir)
    assert hf.decode(response, skip_special_tokens=True) == CONVERSATION[1]["content"]


def test_eos_is_what_ends_a_response(model_dir):
    tokenizer = load_tokenizer(model_dir)
    assert stop_token_ids(tokenizer) == tokenizer.eos_token_ids == (tokenizer.encode("<eos>")[0],)


def test_every_character_survives_and_others_become_unk(model_dir):
    tokenizer = load_tokenizer(model_dir)
    text = "a\n\n  b 0123456789+-*/=,.\\{}()<>:?^_$ the quick brown fox jumps over the lazy dog"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("aXb")) == "a<unk>b"


def test_autotokenizer_gives_the_same_ids_and_text(model_dir):
    ours, hf = load_tokenizer(model_dir), AutoTokenizer.from_pretrained(model_dir)
    text = "<user>4 + 7-1\n\n<assistant><think>4+7=11,  11-1=10</think>\\boxed{10}<eos>"
    assert hf.encode(text, add_special_tokens=False) == ours.encode(text)
    assert hf.decode(ours.encode(text)) == text
    assert hf.apply_chat_template(CONVERSATION[:1], tokenize=False, add_generation_prompt=True) == (
        "<user>4+7-1<assistant>"
    )


def test_same_seed_gives_the_same_bytes_and_another_seed_others(tool, model_dir, tmp_path):
    assert tool.main(["--out", str(tmp_path / "again")]) == 0
    assert tool.main(["--out", str(tmp_path / "other"), "--seed", "2"]) == 0
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (model_dir / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    weights = [(path / "model.safetensors").read_bytes() for path in (model_dir, tmp_path / "other")]
    assert weights[0] != weights[1]


def test_tied_model_stores_no_head_and_replaces_an_earlier_model(tool, tmp_path):
    sizes = ["--layers", "1", "--hidden", "64", "--heads", "2", "--ffn", "64"]
    for extra in ([], ["--tied"]):
        assert tool.main(["--out", str(tmp_path / "m"), *sizes, *extra]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--kv-heads", "3"], "--kv-heads: got 3, must divide --heads 4"),
        (["--head-dim", "31"], "--head-dim: got 31, must be even"),
        (["--hidden", "100"], "= 128, must equal --hidden 100"),
    ],
    ids=["kv_heads", "head_dim", "hidden"],
)
def test_sizes_that_make_no_model_are_one_clear_error(tool, capsys, tmp_path, args, match):
    assert tool.main(["--out", str(tmp_path / "m"), *args]) == 2
    assert match in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_size_of_zero_is_refused_by_the_argument_parser(tool, capsys, tmp_path):
    with pytest.raises(SystemExit):
        tool.main(["--out", str(tmp_path / "m"), "--layers", "0"])
    assert "argument --layers: got '0', must be a whole number of at least 1" in capsys.readouterr().err


def test_directory_that_holds_no_model_is_left_alone(tool, capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert tool.main(["--out", str(tmp_path)]) == 2
    assert "holds no config.json" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_byte_alphabet_keeps_any_text_and_the_reasoning_tags_as_one_token(tool):
    tokenizer = tool.build_tokenizer(all_bytes=True)
    text = '<think>\u00e9\u4e2d \u221a2 `"A"`\t</think>\n'
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.replace("<think>", "").replace("</think>", "").encode()) + 2
    assert tokenizer.unk_token_id not in ids
