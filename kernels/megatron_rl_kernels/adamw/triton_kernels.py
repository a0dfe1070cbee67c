# mypy: disable-error-code="no-untyped-def"
"""The Triton kernel of `adamw_`: one pass, each element read and written once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    master_ptr,  # [N] f32, read and written
    exp_avg_ptr,  # [N] f32, read and written
    exp_avg_sq_ptr,  # [N] f32, read and written
    grad_ptr,  # [N] f32 or bf16, read only
    weight_ptr,  # [N] bf16, f16 or f32, written; None where WRITE_WEIGHT is False
    scale_ptr,  # [1] f32, read only: multiplies the gradient
    size,  # N
    gain1,  # f32, as all below: see adamw.update.Update
    beta2,
    gain2,
    decay,
    step_size,
    root,
    eps,
    WRITE_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    exp_avg = tl.load(exp_avg_ptr + at, mask=inside, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0)
    master = tl.load(master_ptr + at, mask=inside, other=0.0)
    exp_avg += (grad - exp_avg) * gain1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * gain2
    # rounded to nearest: the pass waits for memory, not for the slower division
    denominator = tl.sqrt_rn(exp_avg_sq) * root + eps
    master = master * decay - step_size * tl.div_rn(exp_avg, denominator)
    tl.store(exp_avg_ptr + at, exp_avg, mask=inside)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq, mask=inside)
    tl.store(master_ptr + at, master, mask=inside)
    if WRITE_WEIGHT:
        tl.store(weight_ptr + at, master.to(weight_ptr.dtype.element_ty), mask=inside)
