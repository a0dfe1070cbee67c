"""The Adam of the CPU platform: the mathematics of AdamW, the bookkeeping of Apex."""

from __future__ import annotations

import copy

import pytest
import torch

from megatron_rl.platform.adam import FusedAdam

SHAPES = ((33, 7), (5,), (1,), (64, 64))


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_are_those_of_torch_adamw(weight_decay: float) -> None:
    ours, theirs = parameters(), parameters()
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    optimizers = [(ours, FusedAdam(ours, **options)), (theirs, torch.optim.AdamW(theirs, **options))]
    for step in range(5):
        for params, optimizer in optimizers:
            set_gradients(params, step)
            optimizer.step()
    for got, want in zip(ours, theirs, strict=True):
        # a few float32 roundings in another order
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_step_is_counted_in_the_group_and_not_per_parameter() -> None:
    params = parameters()
    optimizer = FusedAdam(params, lr=1e-2)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [3]
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


def test_a_group_without_gradients_does_not_count() -> None:
    params = parameters()
    optimizer = FusedAdam([{"params": params[:2]}, {"params": params[2:]}], lr=1e-2)
    set_gradients(params[:2], 0)
    before = [param.detach().clone() for param in params[2:]]
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert "step" not in optimizer.param_groups[1]
    assert all(torch.equal(old, new) for old, new in zip(before, params[2:], strict=True))


def test_a_restored_state_continues_bit_by_bit() -> None:
    params = parameters()
    optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1)
    set_gradients(params, 0)
    optimizer.step()
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    restored = FusedAdam(twins, lr=1.0)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, stepper in ((params, optimizer), (twins, restored)):
        set_gradients(each, 1)
        stepper.step()
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


def test_weight_decay_inside_the_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="adam_w_mode"):
        FusedAdam(parameters(), adam_w_mode=False)
