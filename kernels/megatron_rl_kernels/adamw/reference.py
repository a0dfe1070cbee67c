"""The definition of `adamw_`: AdamW with bias correction (arXiv 1711.05101), whole tensors, any float dtype."""

from __future__ import annotations

from torch import Tensor

from megatron_rl_kernels.adamw.update import Update


def adamw_reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    update: Update,
    grad_scale: Tensor | float,
) -> None:
    """Computes in the dtype of `master`; all flat. See `adamw.update.Update` for the formulas."""
    scaled = grad.to(master.dtype) * grad_scale
    exp_avg.copy_(exp_avg + (scaled - exp_avg) * update.gain1)
    exp_avg_sq.copy_(exp_avg_sq * update.beta2 + scaled * scaled * update.gain2)
    denominator = exp_avg_sq.sqrt() * update.root + update.eps
    master.copy_(master * update.decay - update.step_size * exp_avg / denominator)
    if weight is not None:
        weight.copy_(master)
