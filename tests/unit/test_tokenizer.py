"""Tokenizers of both kinds keep what they are given, and add nothing."""

from __future__ import annotations

import json

import pytest

from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import DataError
from tests.helpers.tokenizers import CHATML, write_hf_tokenizer, write_sentencepiece


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory):
    return write_hf_tokenizer(tmp_path_factory.mktemp("hf"), template=CHATML)


@pytest.fixture(scope="module")
def sp_path(tmp_path_factory):
    return write_sentencepiece(tmp_path_factory.mktemp("sp"))


@pytest.fixture(params=["hf", "sp"])
def tokenizer(request, hf_path, sp_path):
    return load_tokenizer(hf_path if request.param == "hf" else sp_path)


def test_encode_adds_no_special_token(tokenizer):
    assert not tokenizer.special_token_ids.intersection(tokenizer.encode("1+2=3"))


def test_decode_of_encode_is_the_text(tokenizer):
    text = "<think>4+7 = 11\nso</think>\\boxed{11}"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decode_keeps_special_tokens(tokenizer):
    eos = tokenizer.eos_token_ids[0]
    assert tokenizer.decode([*tokenizer.encode("12"), eos]) in ("12<eos>", "12</s>")


def test_special_tokens_written_in_text_become_one_id(tokenizer):
    eos = tokenizer.eos_token_ids[0]
    assert tokenizer.encode(tokenizer.decode([eos])) == [eos]


def test_every_id_is_below_the_vocabulary_size(tokenizer):
    assert max(tokenizer.encode("az<>{}09")) < tokenizer.vocab_size


@pytest.mark.parametrize(
    ("listed", "want"), [(7, (1, 7)), ([7, 1], (1, 7)), (None, (1,))], ids=["int", "list", "none"]
)
def test_eos_ids_join_tokenizer_and_generation_config(tmp_path, listed, want):
    path = write_hf_tokenizer(tmp_path, template=None)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert load_tokenizer(path).eos_token_ids == want


def test_sentencepiece_reads_eos_ids_of_generation_config(tmp_path):
    path = write_sentencepiece(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert load_tokenizer(path).eos_token_ids == (2, 5)


def test_tokenizer_json_stands_above_the_class_of_the_model_type(tmp_path):
    path = write_hf_tokenizer(tmp_path, template=None)
    # transformers' AutoTokenizer would take Qwen2's byte-level splitting here and lose the spaces.
    (path / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("a  b\n")) == "a  b\n"


def test_missing_directory_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match="nowhere is not a directory"):
        load_tokenizer(tmp_path / "nowhere")


def test_directory_without_tokenizer_is_an_error_that_lists_the_files_needed(tmp_path):
    with pytest.raises(DataError, match=r"none of tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_broken_sentencepiece_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match=r"tokenizer\.model is not a SentencePiece model"):
        load_tokenizer(tmp_path)


def test_broken_hf_file_is_an_error_that_names_the_directory(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot load"):
        load_tokenizer(tmp_path)
