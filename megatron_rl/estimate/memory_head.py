"""The head: what `linear_policy_loss` and `linear_logprob` allocate, and the check of their first batch.

Read off `kernels/megatron_rl_kernels/linear_policy_loss/{run,portable,triton_op}.py`, `linear_logprob/{portable,
triton_op}.py` and `invariants.py`. Logits of all tokens never exist; of a chunk of tokens they do.
"""

from __future__ import annotations

from megatron_rl.estimate.memory_types import Device
from megatron_rl.model.hf_tables import padded_vocab
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout

_FLOAT, _DOUBLE = 4, 8
# linear_policy_loss: portable.WORKSPACE_BYTES and BLOCK_COLUMNS; triton_op.CHUNK_TOKENS and the columns of a tile
_WORKSPACE_BYTES, _BLOCK_COLUMNS = 160 << 20, 4096
_CHUNK_TOKENS, _TILE_COLUMNS = 4096, 128
# linear_logprob: tokens and columns of a block in torch; what a slice of it may take
_BLOCK_TOKENS, _SLICE_BYTES = 2048, 512 << 10
# invariants: rows of the head at once in float64, tokens compared
_CHECKED_ROWS, _CHECKED_TOKENS = 8192, 32
# vectors of one number per token: targets, positions, masks, advantages, statistics, log-probs, entropies
_VECTORS_BYTES = 96
_STATISTICS = 5


def loss_head_bytes(
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    tokens: int,
    trained: int,
    element_bytes: int,
    device: Device,
) -> int:
    """At most beside hidden states, head and its gradient buffer. `trained` of the tokens meet the head."""
    e, hidden, rows = element_bytes, spec.hidden_size, _rows(spec, layout)
    gathered = e * tokens * hidden if layout.sp else 0
    ready = _FLOAT * trained * hidden
    if device == "cpu":
        chunk = min(trained, _chunk_tokens(rows))
        workspace = _FLOAT * chunk * (rows + min(_BLOCK_COLUMNS, rows))
        copies = chunk * hidden * (e + _FLOAT)
        # of bfloat16 the block of the head that is multiplied is widened
        copies += _FLOAT * min(_BLOCK_COLUMNS, rows) * hidden * (e < _FLOAT)
    else:
        chunk = min(trained, _CHUNK_TOKENS)
        tiles = -(-rows // _TILE_COLUMNS)
        workspace = chunk * (e * tiles * _TILE_COLUMNS + _FLOAT * 4 * tiles)
        copies = e * chunk * hidden
    vectors = _VECTORS_BYTES * tokens
    # at the end gradients of trained tokens are spread over all of them, and under sp summed into a part of these
    spread = _FLOAT * tokens * hidden if trained < tokens else 0
    spread += _FLOAT * tokens * hidden // layout.tp if layout.sp else 0
    return gathered + vectors + ready + max(workspace + copies + spread, _check_bytes(spec, layout))


def logprob_head_bytes(
    spec: ModelSpec, layout: ParallelLayout, *, tokens: int, element_bytes: int, device: Device
) -> int:
    """At most beside hidden states and head, without a gradient."""
    e, hidden, rows = element_bytes, spec.hidden_size, _rows(spec, layout)
    gathered = e * tokens * hidden if layout.sp else 0
    if device == "cpu":
        chunk, width = min(tokens, _BLOCK_TOKENS), min(_BLOCK_COLUMNS, rows)
        blocks = -(-rows // width)
        fused = _FLOAT * (chunk * width + blocks * _STATISTICS * tokens) + 2 * _SLICE_BYTES
        fused += _FLOAT * (chunk + width) * hidden * (e < _FLOAT)
    else:
        # splits of the vocabulary, few where there are many tokens
        fused = _FLOAT * _STATISTICS * tokens * 8
    return gathered + _VECTORS_BYTES // 2 * tokens + max(fused, _check_bytes(spec, layout))


def _check_bytes(spec: ModelSpec, layout: ParallelLayout) -> int:
    """The first batch is compared with the definition in float64 (`invariants.difference`)."""
    rows = _rows(spec, layout)
    return _DOUBLE * (min(_CHECKED_ROWS, rows) * spec.hidden_size + 2 * _CHECKED_TOKENS * rows)


def _rows(spec: ModelSpec, layout: ParallelLayout) -> int:
    return padded_vocab(spec.vocab_size, layout.tp) // layout.tp


def _chunk_tokens(rows: int) -> int:
    return max(_WORKSPACE_BYTES // (rows * _FLOAT) // 32 * 32, 64)
