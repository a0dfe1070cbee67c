"""A tiny model of SmolLM2's shape as a GGUF file, written from a Hugging Face directory by GGUF's own definitions."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.helpers.models import make_tiny_hf

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 32
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<filename>")
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = [
    "the sea and the moon in 1969, the sea in 2 + 3 lines;  what is   the capital of the moon?\n\n",
    "a vast and mysterious realm, teeming with life, reaching from shore to distant shore",
] * 3
VOCAB_SIZE = 301  # not a multiple of 3, so that three ranks hold padding
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def smollm_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with SmolLM2's splitting rules."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in CONTROL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the text is too short"
    return tokenizer


def make_source(directory: Path, *, seed: int = 0) -> Path:
    """The Hugging Face model that the GGUF file is written from; it has no tokenizer."""
    return make_tiny_hf(
        directory, family="llama", tied=True, num_layers=4, hidden=HEADS * HEAD_DIM, heads=HEADS,
        kv_heads=KV_HEADS, head_dim=HEAD_DIM, ffn=192, vocab=VOCAB_SIZE, seed=seed,
    )  # fmt: skip


def write_gguf(
    path: Path, source: Path, *, quantised: bool = False, without: str = "", **changed: str
) -> Path:
    """`quantised`: matrices as Q4_1. `without` leaves out a tensor; `changed` are `architecture`, `pre`."""
    writer = gguf.GGUFWriter(path, changed.get("architecture", "llama"))
    _add_metadata(writer, pre=changed.get("pre", "smollm"))
    for name, tensor in load_file(source / "model.safetensors").items():
        theirs = gguf_name(name)
        if theirs == without:
            continue
        if theirs.endswith(("attn_q.weight", "attn_k.weight")):
            tensor = paired(tensor, HEADS if "attn_q" in theirs else KV_HEADS)
        if quantised and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(theirs, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, *, pre: str) -> None:
    tokenizer = smollm_tokenizer()
    tokens = [tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size())]
    writer.add_block_count(4)
    writer.add_context_length(512)
    writer.add_embedding_length(HEADS * HEAD_DIM)
    writer.add_feed_forward_length(192)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if token in CONTROL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in merges_of(tokenizer)])
    for add, token in (
        (writer.add_bos_token_id, "<|im_start|>"),
        (writer.add_eos_token_id, "<|im_end|>"),
        (writer.add_pad_token_id, "<|im_end|>"),
        (writer.add_unk_token_id, "<|endoftext|>"),
    ):
        add(tokens.index(token))
    writer.add_chat_template(TEMPLATE)


def merges_of(tokenizer: Tokenizer) -> list[list[str]]:
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return merges


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` to `blk.3.ffn_up.weight`."""
    if name in ("model.embed_tokens.weight", "model.norm.weight"):
        return "token_embd.weight" if "embed" in name else "output_norm.weight"
    layer, kind = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_NAMES[kind]}.weight"


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours: row 2i of a head is Hugging Face's row i, row 2i + 1 its row i + D / 2."""
    size = len(rows) // heads
    order = [
        head * size + i + half * (size // 2)
        for head in range(heads)
        for i in range(size // 2)
        for half in (0, 1)
    ]
    return rows[order]
