"""AdamW with the semantics of Apex's fused one: `step` is kept in the param group, not per parameter.

megatron-core's distributed optimizer saves and reshards optimizer state only for an Adam of this kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101) and bias correction.

    State per parameter: `exp_avg` and `exp_avg_sq`, of the parameter's dtype. The keyword names are those
    megatron-core passes; `adam_w_mode=False` (L2 inside the gradient) is refused, nothing here uses it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("adam_w_mode: got False, only decoupled weight decay is offered")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    # torch wraps these for its compiler to pass them over, and the first call loads the compiler to tell it so
    add_param_group, zero_grad, state_dict, load_state_dict = (
        inspect.unwrap(method)
        for method in (
            torch.optim.Optimizer.add_param_group,
            torch.optim.Optimizer.zero_grad,
            torch.optim.Optimizer.state_dict,
            torch.optim.Optimizer.load_state_dict,
        )
    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "megatron-core never passes a closure"
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            group["step"] = group.get("step", 0) + 1
            self._update(params, group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            state = self.state[param]
            if not state:
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        # the kernel reads a step per parameter; one shared tensor says the same
        step = torch.tensor(float(group["step"]))
        torch._fused_adamw_(
            params,
            [param.grad for param in params if param.grad is not None],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
