"""Small tokenizers with the chat templates of real model families, written to a directory."""

from __future__ import annotations

import json
import string
from pathlib import Path

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# As Qwen3 does: the thinking of earlier turns goes once a later user turn exists.
STRIPS_THINKING = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and not loop.last %}"
    "<|im_start|>assistant\n{{ message['content'].split('</think>')[-1] }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKERS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def write_hf_tokenizer(
    path: Path, *, template: str | None, merge_newlines: bool = False, eos: str = "<eos>"
) -> Path:
    """A character tokenizer; `merge_newlines` makes a run of newlines one token, as byte-level BPE does."""
    words = [
        "<bos>",
        "<eos>",
        "<unk>",
        *MARKERS,
        "\n",
        "\n\n",
        "\n\n\n",
        *(c for c in string.printable if c != "\n"),
    ]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"\n+|[\s\S]" if merge_newlines else r"[\s\S]"), "isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token=eos,
        unk_token="<unk>",
        extra_special_tokens=list(MARKERS),
        chat_template=template,
    ).save_pretrained(path)
    return path


def write_sentencepiece(path: Path, *, template: str | None = None) -> Path:
    """A bare tokenizer.model of single characters."""
    path.mkdir(parents=True, exist_ok=True)
    text = path / "text.txt"
    text.write_text("\n".join([string.printable[:95]] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(path / "tokenizer"),
        model_type="char",
        vocab_size=110,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        user_defined_symbols=["\n"],
    )
    text.unlink()
    if template is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


def write_byte_level(path: Path) -> Path:
    """A byte-level tokenizer that merges nothing: a character outside ASCII is two to four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path
