"""Deterministic mode: when it is on, and what it switches on."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.platform.determinism import GPU_SETTINGS, is_deterministic, make_deterministic


@pytest.fixture
def restored():
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]


def test_it_is_on_without_an_accelerator_unless_the_recipe_says_otherwise():
    assert is_deterministic(None, accelerator=False) and not is_deterministic(None, accelerator=True)
    for accelerator in (False, True):
        assert is_deterministic(True, accelerator=accelerator)
        assert not is_deterministic(False, accelerator=accelerator)


def test_an_operation_without_a_deterministic_form_raises_and_libraries_are_told(restored):
    environment = {"NCCL_ALGO": "Ring"}
    make_deterministic(environment)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() is False
    assert torch.backends.cudnn.benchmark is False
    # what the environment says already is kept
    assert environment == GPU_SETTINGS | {"NCCL_ALGO": "Ring"}
