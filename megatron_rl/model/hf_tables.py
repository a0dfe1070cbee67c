"""One description of every layout: which interval of which Hugging Face tensor stands where.

`hf_tensors` lists what a checkpoint of the family holds. `source_pieces` says which intervals of those
tensors one Megatron rank holds, and where in its parameters they stand. Import, export and the reshard plan
all read these two functions; no other place in the project knows a fused or padded layout. `hf_experts` holds
the part of mixture-of-experts models. Pure Python.

Layout facts (megatron-core 0.16.1): `linear_qkv` rows run, per kv group, its q heads, then k, then v, and
tensor parallelism cuts them by raw rows; `linear_fc1` holds [gate rows of this rank; up rows of this rank];
embedding and head rows are padded to a multiple of `VOCAB_MULTIPLE * tp`; with tied weights and pp > 1 the
last stage holds a second copy of the embedding as its head.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.model.hf_experts import expert_pieces, expert_tensors, mlp_pieces
from megatron_rl.model.pieces import Piece, whole
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout

__all__ = [
    "EMBEDDING",
    "EMBEDDING_PARAM",
    "FINAL_NORM",
    "HEAD",
    "HEAD_PARAM",
    "VOCAB_MULTIPLE",
    "Piece",
    "hf_tensors",
    "padded_vocab",
    "source_pieces",
]

VOCAB_MULTIPLE = 16  # rows of a tp shard of the embedding are a multiple of this

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

EMBEDDING_PARAM = "embedding.word_embeddings.weight"
HEAD_PARAM = "output_layer.weight"


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding over all tp ranks: `vocab_size` up to a multiple of VOCAB_MULTIPLE * tp."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def hf_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint, in layer order. A tied head is not listed."""
    hidden, head_dim = spec.hidden_size, spec.head_dim
    q_rows, kv_rows = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    table: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden)}
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}."
        table[layer + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            table[layer + f"self_attn.{name}_proj.weight"] = (rows, hidden)
            if spec.qkv_bias:
                table[layer + f"self_attn.{name}_proj.bias"] = (rows,)
        if spec.qk_norm:
            table[layer + "self_attn.q_norm.weight"] = (head_dim,)
            table[layer + "self_attn.k_norm.weight"] = (head_dim,)
        table[layer + "self_attn.o_proj.weight"] = (hidden, q_rows)
        table[layer + "post_attention_layernorm.weight"] = (hidden,)
        if spec.moe is not None:
            table.update(expert_tensors(spec, layer))
            continue
        table[layer + "mlp.gate_proj.weight"] = (spec.ffn_size, hidden)
        table[layer + "mlp.up_proj.weight"] = (spec.ffn_size, hidden)
        table[layer + "mlp.down_proj.weight"] = (hidden, spec.ffn_size)
    table[FINAL_NORM] = (hidden,)
    if not spec.tied:
        table[HEAD] = (spec.vocab_size, hidden)
    return table


def source_pieces(spec: ModelSpec, layout: ParallelLayout, *, rank: int) -> list[Piece]:
    """Every interval that one Megatron rank holds, over all its model chunks."""
    tp_rank, _, pp_rank = layout.coord(rank)
    pieces: list[Piece] = []
    for chunk in range(layout.vpp):
        if layout.has_embedding(pp_rank=pp_rank, chunk=chunk):
            pieces += _vocab_rows(spec, layout.tp, tp_rank, chunk, EMBEDDING, EMBEDDING_PARAM)
        layers = layout.chunk_layers(spec.num_layers, pp_rank=pp_rank, chunk=chunk)
        for local, layer in enumerate(layers):
            hf, prefix = f"model.layers.{layer}.", f"decoder.layers.{local}."
            pieces += _attention_pieces(spec, layout.tp, tp_rank, chunk, hf, prefix)
            if spec.moe is not None:
                pieces += expert_pieces(spec, layout, rank=rank, chunk=chunk, hf=hf, local=prefix)
            else:
                ffn = spec.ffn_size // layout.tp
                pieces += mlp_pieces(hf + "mlp.", prefix + "mlp.", chunk=chunk, ffn=ffn, tp_rank=tp_rank)
        if layout.has_head(pp_rank=pp_rank, chunk=chunk):
            pieces.append(whole(FINAL_NORM, chunk, "decoder.final_layernorm.weight"))
            # a tied model on one stage has no head parameter: the embedding serves both ends
            if not spec.tied:
                pieces += _vocab_rows(spec, layout.tp, tp_rank, chunk, HEAD, HEAD_PARAM)
            elif layout.pp > 1:
                pieces += _vocab_rows(spec, layout.tp, tp_rank, chunk, EMBEDDING, HEAD_PARAM)
    return pieces


def _vocab_rows(
    spec: ModelSpec, tp: int, tp_rank: int, chunk: int, hf_name: str, param: str
) -> Iterator[Piece]:
    rows = padded_vocab(spec.vocab_size, tp) // tp
    start, end = tp_rank * rows, min(spec.vocab_size, (tp_rank + 1) * rows)
    if end > start:
        yield Piece(hf_name, 0, start, end - start, chunk, param, 0, 0)


def _attention_pieces(
    spec: ModelSpec, tp: int, tp_rank: int, chunk: int, hf: str, local: str
) -> Iterator[Piece]:
    """Attention and the two norms of one layer."""
    yield whole(hf + "input_layernorm.weight", chunk, local + "input_layernorm.weight")
    yield whole(hf + "post_attention_layernorm.weight", chunk, local + "pre_mlp_layernorm.weight")
    if spec.qk_norm:
        yield whole(hf + "self_attn.q_norm.weight", chunk, local + "self_attention.q_layernorm.weight")
        yield whole(hf + "self_attn.k_norm.weight", chunk, local + "self_attention.k_layernorm.weight")
    for suffix in ("weight", "bias") if spec.qkv_bias else ("weight",):
        for name, start, length, row in _qkv_rows(spec, tp, tp_rank):
            yield Piece(
                hf + f"self_attn.{name}_proj.{suffix}",
                0,
                start,
                length,
                chunk,
                local + f"self_attention.linear_qkv.{suffix}",
                0,
                row,
            )
    columns = spec.num_heads * spec.head_dim // tp
    yield Piece(
        hf + "self_attn.o_proj.weight",
        1,
        tp_rank * columns,
        columns,
        chunk,
        local + "self_attention.linear_proj.weight",
        1,
        0,
    )


def _qkv_rows(spec: ModelSpec, tp: int, tp_rank: int) -> Iterator[tuple[str, int, int, int]]:
    """(projection, first HF row, rows, first local row) of the fused rows that fall on this tp rank."""
    head_dim, group = spec.head_dim, spec.num_heads // spec.num_kv_heads
    total = (spec.num_heads + 2 * spec.num_kv_heads) * head_dim
    begin, end = tp_rank * total // tp, (tp_rank + 1) * total // tp
    offset = 0
    for kv in range(spec.num_kv_heads):
        segments = (
            ("q", kv * group * head_dim, group * head_dim),
            ("k", kv * head_dim, head_dim),
            ("v", kv * head_dim, head_dim),
        )
        for name, hf_start, rows in segments:
            low, high = max(begin, offset), min(end, offset + rows)
            if high > low:
                yield name, hf_start + low - offset, high - low, low - begin
            offset += rows
