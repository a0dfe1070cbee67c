"""The op as a node of autograd: gradients are ready before backward, which scales them and hands them over, once."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl_kernels.linear_policy_loss.run import Call, Gradients, run


class LinearPolicyLossFunction(torch.autograd.Function):
    """(hidden, weight, target, call) -> (loss, logprob, entropy, metrics); only the loss is differentiable."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        want_hidden, want_weight = (call.records and needed for needed in ctx.needs_input_grad[:2])
        result, gradients = run(
            hidden, weight, target, call, want_hidden=want_hidden, want_weight=want_weight
        )
        scale = call.loss_scale if want_weight and call.main_grad is not None else None
        ctx.ready = _ReadyGradients(gradients, dtype=hidden.dtype, main_grad_scale=scale)
        ctx.mark_non_differentiable(result.logprob, result.entropy, result.metrics)
        ctx.set_materialize_grads(False)
        return result.loss, result.logprob, result.entropy, result.metrics

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, upstream: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        if upstream is None:
            return None, None, None, None
        return *ctx.ready.hand_over(upstream), None, None


class _ReadyGradients:
    """Gradients between forward and the one backward; keeping them for a second would cost a copy of each.

    `main_grad_scale`: the upstream gradient that main_grad was given in forward; None: main_grad was not touched.
    """

    def __init__(
        self, gradients: Gradients, *, dtype: torch.dtype, main_grad_scale: float | Tensor | None
    ) -> None:
        self._gradients: Gradients | None = gradients
        self._dtype = dtype
        self._main_grad_scale = main_grad_scale

    def hand_over(self, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(hidden's, weight's), times `upstream` and rounded once; written in place, hence only once."""
        if self._gradients is None:
            raise RuntimeError(
                "linear_policy_loss: backward ran a second time through the same loss (retain_graph); its gradients "
                "were handed over by the first; call linear_policy_loss again for another backward"
            )
        gradients, self._gradients = self._gradients, None
        hidden, weight = gradients.hidden, gradients.weight
        if self._main_grad_scale is not None:
            return self._checked(hidden, upstream, self._main_grad_scale), None
        if upstream.device.type != "cpu" or upstream.item() != 1:
            hidden, weight = (None if one is None else one.mul_(upstream) for one in (hidden, weight))
        return tuple(None if one is None else one.to(self._dtype) for one in (hidden, weight))  # type: ignore[return-value]

    def _checked(self, hidden: Tensor | None, upstream: Tensor, scale: float | Tensor) -> Tensor | None:
        """hidden's gradient, which has the scale already; what main_grad holds cannot be changed any more."""
        expected = torch.as_tensor(scale, dtype=upstream.dtype, device=upstream.device)
        if upstream.device.type == "cpu" and upstream.item() != expected.item():
            raise RuntimeError(
                f"linear_policy_loss: backward got the upstream gradient {upstream.item():g}, but main_grad was given "
                f"the head's gradient times loss_scale = {expected.item():g}; pass loss_scale = {upstream.item():g} "
                "and zero main_grad, which holds the wrong one now"
            )
        if hidden is None:
            return None
        # without waiting for the device: a scale that does not fit must not look like a gradient
        return hidden.masked_fill_(upstream != expected, float("nan")).to(self._dtype)

    def __del__(self) -> None:
        if self._gradients is not None and self._main_grad_scale is not None:
            warnings.warn(
                "linear_policy_loss: main_grad holds the gradient of a loss whose backward never ran; zero it, "
                "and call under torch.no_grad() where no gradient is wanted",
                RuntimeWarning,
                stacklevel=2,
            )
