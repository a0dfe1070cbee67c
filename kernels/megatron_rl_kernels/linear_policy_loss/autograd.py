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
        main_grad = call.main_grad if want_weight else None
        ctx.ready = _ReadyGradients(gradients, dtype=hidden.dtype, main_grad=main_grad, scale=call.loss_scale)
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

    `main_grad` was given the head's gradient times `scale` in forward; None: it was not touched.
    """

    def __init__(
        self,
        gradients: Gradients,
        *,
        dtype: torch.dtype,
        main_grad: Tensor | None,
        scale: float | Tensor,
    ) -> None:
        self._gradients: Gradients | None = gradients
        self._dtype = dtype
        self._main_grad = main_grad
        self._scale = scale

    def hand_over(self, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(hidden's, weight's), times `upstream` and rounded once; written in place, hence only once."""
        if self._gradients is None:
            raise RuntimeError(
                "linear_policy_loss: backward ran a second time through the same loss (retain_graph); its gradients "
                "were handed over by the first; call linear_policy_loss again for another backward"
            )
        gradients, self._gradients = self._gradients, None
        hidden, weight = gradients.hidden, gradients.weight
        if self._main_grad is not None:
            # the scale is in these gradients already
            self._check_scale(upstream, hidden, self._main_grad)
        elif upstream.device.type != "cpu" or upstream.item() != 1:
            hidden, weight = (None if one is None else one.mul_(upstream) for one in (hidden, weight))
        return self._rounded(hidden), self._rounded(weight)

    def _rounded(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.to(self._dtype)

    def _check_scale(self, upstream: Tensor, hidden: Tensor | None, main_grad: Tensor) -> None:
        expected = torch.as_tensor(self._scale, dtype=upstream.dtype, device=upstream.device)
        if upstream.device.type == "cpu" and upstream.item() != expected.item():
            raise RuntimeError(
                f"linear_policy_loss: backward got the upstream gradient {upstream.item():g}, but main_grad was given "
                f"the head's gradient times loss_scale = {expected.item():g}; pass loss_scale = {upstream.item():g} "
                "and zero main_grad, which holds the wrong one now"
            )
        spoil_unless(upstream == expected, main_grad[:1], hidden)

    def __del__(self) -> None:
        if self._gradients is not None and self._main_grad is not None:
            warnings.warn(
                "linear_policy_loss: main_grad holds the gradient of a loss whose backward never ran; zero it, "
                "and call under torch.no_grad() where no gradient is wanted",
                RuntimeWarning,
                stacklevel=2,
            )


def spoil_unless(fits: Tensor, *grads: Tensor | None) -> None:
    """Fill `grads` with NaN if `fits` (0-dim bool) is False, without waiting for the device to know.

    A gradient of the wrong scale must not look like one: the finite check of the step finds this.
    """
    for grad in grads:
        if grad is not None:
            grad.masked_fill_(~fits, float("nan"))
