"""What each engine worker reads: intervals of Hugging Face tensors, the target side of the reshard plan.

The source side is `model.hf_tables.source_pieces`; both speak HF coordinates, so fused, interleaved and
padded layouts are only interval lists. Rules as of vLLM 0.32: its loaders narrow every tensor by the worker's
rank, kv heads are replicated when there are fewer than workers, vocabulary rows are padded before they are
split. Of a mixture-of-experts model a worker reads its columns of every expert (engines run with tensor
parallelism alone, without vLLM's expert parallelism) and the whole router.
"""

from __future__ import annotations

from megatron_rl.errors import LayoutError, ModelError
from megatron_rl.model.hf_tables import EMBEDDING, HEAD, hf_tensors
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.degrees import divisors, nearest

ENGINE_VOCAB_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of this, whatever its tensor parallelism

Need = tuple[int | None, int, int]  # (dim, start, length); dim None: the whole tensor, start and length 0


def check_served(spec: ModelSpec) -> None:
    """Raises ModelError when vLLM would load the model without a word and compute another one."""
    if spec.family == "qwen2" and spec.num_heads * spec.head_dim != spec.hidden_size:
        raise ModelError(
            f"model.hf_path: head_dim = {spec.head_dim} with hidden_size = {spec.hidden_size} and {spec.num_heads} "
            f"attention heads cannot be served: vLLM takes hidden_size / heads for head_dim of a Qwen2 model and "
            f"drops the other rows of q, k and v; use a model with head_dim = {spec.hidden_size / spec.num_heads:g}"
        )


def check_target(spec: ModelSpec, *, tp: int) -> None:
    """Raises LayoutError, naming the nearest degrees that work, when `tp` workers cannot hold the model."""
    problem = _target_problem(spec, tp)
    if problem is not None:
        allowed = [n for n in divisors(spec.num_heads) if _target_problem(spec, n) is None]
        raise LayoutError(f"engine.tp: got {tp}, {problem}; use {nearest(tp, allowed)}")


def _target_problem(spec: ModelSpec, tp: int) -> str | None:
    padded = -(-spec.vocab_size // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE
    ffn = (
        ("ffn columns", spec.ffn_size)
        if spec.moe is None
        else ("columns of an expert", spec.moe.expert_ffn_size)
    )
    for name, size in (("attention heads", spec.num_heads), ffn, ("padded vocabulary rows", padded)):
        if size % tp:
            return f"which does not divide the model's {size} {name}"
    if spec.moe is not None and tp > spec.moe.num_experts:
        return f"but vLLM wants no more workers than the model's {spec.moe.num_experts} experts"
    kv = spec.num_kv_heads
    if kv % tp and tp % kv:
        return f"which must divide the model's {kv} kv heads or be a multiple of them"
    return None


def target_needs(spec: ModelSpec, *, tp: int, rank: int) -> dict[str, Need]:
    """The interval of every HF tensor that engine worker `rank` of `tp` reads, in checkpoint order.

    A length of 0 with a dim: the worker's share of the vocabulary is all padding.
    """
    check_target(spec, tp=tp)
    return {name: _need(spec, name, shape, tp=tp, rank=rank) for name, shape in hf_tensors(spec).items()}


def _need(spec: ModelSpec, name: str, shape: tuple[int, ...], *, tp: int, rank: int) -> Need:
    if name in (EMBEDDING, HEAD):
        rows = -(-spec.vocab_size // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE // tp
        start = min(spec.vocab_size, rank * rows)
        return 0, start, min(spec.vocab_size, start + rows) - start
    module = name.rsplit(".", 2)[-2]
    if module in ("k_proj", "v_proj") and spec.num_kv_heads < tp:
        return 0, rank // (tp // spec.num_kv_heads) * spec.head_dim, spec.head_dim
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        rows = shape[0] // tp
        return 0, rank * rows, rows
    if module in ("o_proj", "down_proj"):
        columns = shape[1] // tp
        return 1, rank * columns, columns
    return None, 0, 0  # norms and routers are replicated
