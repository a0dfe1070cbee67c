"""Write a tiny Qwen2 model with random weights and a character tokenizer, as a Hugging Face directory.

It is small enough to be trained and sampled on a laptop's CPU, and loads wherever Hugging Face models do. A
problem is rendered in as few tokens as possible: `<user>4+7-1<assistant>`, answered by text and `<eos>`.
"""

from __future__ import annotations

import argparse
import shutil
import string
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from megatron_rl.arguments import positive_int
from megatron_rl.errors import ModelError

SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>")
# Not special: they are part of what the model says, so every decoder keeps them.
THINK = ("<think>", "</think>")
# 64 tokens in all, so that the vocabulary divides by every small tensor-parallel degree.
CHARACTERS = string.digits + string.ascii_lowercase + " \n" + "+-*/=,.\\{}()<>:?^_$"
# How byte-level tokenizers write a space and a newline.
_BYTE_LEVEL = {" ": "Ġ", "\n": "Ċ"}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<eos>"
    "{% else %}{{ raise_exception('the roles are user and assistant, got ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer(*, all_bytes: bool = False) -> PreTrainedTokenizerFast:
    """One token per character of `CHARACTERS`, or per byte, and the markers; what is neither becomes `<unk>`.

    Byte-level BPE without merges: for `model_type` qwen2 transformers' AutoTokenizer puts Qwen2's own
    byte-level steps in place of those of tokenizer.json, and these must give the same ids.
    """
    characters = [_BYTE_LEVEL.get(character, character) for character in CHARACTERS]
    written = sorted(pre_tokenizers.ByteLevel.alphabet()) if all_bytes else characters
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *THINK, *written])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in THINK])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    """Raises ModelError for sizes that do not make a model."""
    if args.heads % args.kv_heads:
        raise ModelError(f"--kv-heads: got {args.kv_heads}, must divide --heads {args.heads}")
    if args.head_dim % 2:
        raise ModelError(f"--head-dim: got {args.head_dim}, must be even for rotary positions")
    # Qwen2 has no head_dim of its own in many readers: they take hidden / heads.
    if args.heads * args.head_dim != args.hidden:
        raise ModelError(
            f"--heads {args.heads} * --head-dim {args.head_dim} = {args.heads * args.head_dim}, must equal "
            f"--hidden {args.hidden}"
        )
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.positions,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        tie_word_embeddings=args.tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def write_model(out: Path, config: Qwen2Config, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> int:
    """Write the directory as a whole, or leave `out` as it was. Returns the number of parameters.

    Raises ModelError if `out` exists and is no model directory: nothing of the user's is replaced.
    """
    if out.exists() and not (out / "config.json").is_file():
        raise ModelError(f"--out: {out} exists and holds no config.json; give a new directory")
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        temporary = Path(scratch) / "model"
        logging.disable_progress_bar()
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if out.exists():
            shutil.move(out, Path(scratch) / "previous")
        temporary.replace(out)
    return sum(parameter.numel() for parameter in model.parameters())


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  make_tiny_model.py --out models/tiny",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to write; an earlier model is replaced"
    )
    parser.add_argument("--family", choices=["qwen2"], default="qwen2", help="architecture (default: qwen2)")
    for name, default, meaning in (
        ("layers", 4, "transformer layers"),
        ("hidden", 128, "hidden size, must be heads * head-dim"),
        ("heads", 4, "attention heads"),
        ("kv-heads", 2, "key/value heads, a divisor of heads"),
        ("head-dim", 32, "size of a head"),
        ("ffn", 352, "feed-forward size"),
        ("positions", 512, "longest sequence, in tokens"),
    ):
        parser.add_argument(
            f"--{name}", type=positive_int, default=default, help=f"{meaning} (default: {default})"
        )
    parser.add_argument(
        "--alphabet",
        choices=["sums", "bytes"],
        default="sums",
        help="sums: the 57 characters of the quickstart; bytes: any text, 263 tokens in all (default: sums)",
    )
    parser.add_argument("--tied", action="store_true", help="let the head share the embedding's weight")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same weights (default: 1)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        tokenizer = build_tokenizer(all_bytes=args.alphabet == "bytes")
        num_parameters = write_model(args.out, build_config(args, tokenizer), tokenizer, seed=args.seed)
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}: {args.family}, {num_parameters:,} parameters, {len(tokenizer)} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
