"""What a conversation becomes, and which of its tokens are trained on."""

from __future__ import annotations

import pytest

from megatron_rl.data.chat import render_conversation, render_prompt, stop_token_ids
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import DataError
from tests.helpers.tokenizers import (
    CHATML,
    LLAMA3,
    STRIPS_THINKING,
    write_hf_tokenizer,
    write_sentencepiece,
)

SINGLE = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "is 3"}]
DOUBLE = [*SINGLE, {"role": "user", "content": "+4"}, {"role": "assistant", "content": "is 7"}]


def _load(tmp_path, template, **options):
    return load_tokenizer(write_hf_tokenizer(tmp_path, template=template, **options))


def _trained(tokenizer, messages):
    token_ids, loss_mask = render_conversation(tokenizer, messages)
    assert len(token_ids) == len(loss_mask)
    return tokenizer.decode([i for i, trained in zip(token_ids, loss_mask, strict=True) if trained])


def test_chatml_trains_on_content_and_end_token_but_not_on_the_newline_behind(tmp_path):
    tokenizer = _load(tmp_path, CHATML)
    assert _trained(tokenizer, DOUBLE) == "is 3<|im_end|>is 7<|im_end|>"


def test_llama_trains_on_content_and_end_token(tmp_path):
    assert _trained(_load(tmp_path, LLAMA3), DOUBLE) == "is 3<|eot_id|>is 7<|eot_id|>"


def test_bare_sentencepiece_trains_on_content_and_eos(tmp_path):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path))
    assert _trained(tokenizer, SINGLE).strip() == "is 3</s>"


@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["chatml", "llama3"])
def test_conversation_ids_are_those_of_the_whole_text(tmp_path, template):
    tokenizer = _load(tmp_path, template)
    text = tokenizer.chat_text(DOUBLE, add_generation_prompt=False)
    assert render_conversation(tokenizer, DOUBLE)[0] == tokenizer.encode(text)


def test_llama_template_gives_exactly_one_bos(tmp_path):
    tokenizer = _load(tmp_path, LLAMA3)
    bos = tokenizer.encode("<bos>")[0]
    assert render_prompt(tokenizer, SINGLE[:1]).count(bos) == 1
    assert render_conversation(tokenizer, DOUBLE)[0].count(bos) == 1


def test_chatml_template_gives_no_bos(tmp_path):
    tokenizer = _load(tmp_path, CHATML)
    assert tokenizer.encode("<bos>")[0] not in render_conversation(tokenizer, DOUBLE)[0]


def test_sentencepiece_gives_exactly_one_bos(tmp_path):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path))
    ids = render_conversation(tokenizer, DOUBLE)[0]
    assert ids.count(1) == 1
    assert ids[0] == 1


def test_sentencepiece_uses_the_template_beside_it(tmp_path):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path, template="[{{ messages[0]['content'] }}]"))
    assert tokenizer.decode(render_prompt(tokenizer, SINGLE[:1])) == "[1+2]"


def _sentencepiece(tmp_path):
    return load_tokenizer(write_sentencepiece(tmp_path))


@pytest.mark.parametrize(
    "load",
    [
        lambda p: _load(p, CHATML),
        lambda p: _load(p, LLAMA3),
        lambda p: _load(p, CHATML, merge_newlines=True),
        _sentencepiece,
    ],
    ids=["chatml", "llama3", "merging", "sentencepiece"],
)
def test_what_the_engine_is_given_opens_what_is_trained_on(tmp_path, load):
    tokenizer = load(tmp_path)
    answer = {"role": "assistant", "content": "\n\nis 3"}
    prompt = render_prompt(tokenizer, SINGLE[:1])
    token_ids, loss_mask = render_conversation(tokenizer, [SINGLE[0], answer])
    assert token_ids[: len(prompt)] == prompt
    assert not any(loss_mask[: len(prompt)])
    assert loss_mask[len(prompt)]


def test_conversation_that_ends_with_the_user_trains_on_nothing_of_it(tmp_path):
    tokenizer = _load(tmp_path, CHATML)
    assert _trained(tokenizer, DOUBLE[:3]) == "is 3<|im_end|>"
    assert _trained(tokenizer, DOUBLE[:1]) == ""


def test_template_that_rewrites_earlier_turns_is_an_error_that_shows_the_change(tmp_path):
    tokenizer = _load(tmp_path, STRIPS_THINKING)
    thinking = [
        {"role": "assistant", "content": "<think>a</think>is 3"} if m is DOUBLE[1] else m for m in DOUBLE
    ]
    with pytest.raises(DataError, match=r"adding turn 3 re-writes the text before it: '<think>a"):
        render_conversation(tokenizer, thinking)
    assert _trained(tokenizer, thinking[:2]) == "<think>a</think>is 3<|im_end|>"


def test_template_without_end_token_is_an_error(tmp_path):
    tokenizer = _load(tmp_path, "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    with pytest.raises(DataError, match="without a special token"):
        render_conversation(tokenizer, SINGLE)


def test_special_token_inside_the_content_is_not_taken_for_the_end_token(tmp_path):
    tokenizer = _load(tmp_path, "{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    with pytest.raises(DataError, match="without a special token"):
        render_conversation(tokenizer, [SINGLE[0], {"role": "assistant", "content": "a<|eot_id|>b"}])


def test_template_that_refuses_a_role_is_an_error_that_names_the_turns(tmp_path):
    tokenizer = _load(tmp_path, "{{ raise_exception('no system turns') }}")
    with pytest.raises(DataError, match=r"refuses the turns \[user\]: no system turns"):
        render_prompt(tokenizer, SINGLE[:1])


def test_tokenizer_without_template_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no chat template"):
        render_prompt(_load(tmp_path, None), SINGLE[:1])


def test_stop_tokens_hold_the_templates_end_token_as_well_as_eos(tmp_path):
    tokenizer = _load(tmp_path, CHATML)
    assert stop_token_ids(tokenizer) == (tokenizer.encode("<eos>")[0], tokenizer.encode("<|im_end|>")[0])
