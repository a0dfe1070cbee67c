"""What it takes for two runs to compute the same bits: settings of torch and of the libraries below it."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from megatron_rl.platform import device

# read by libraries when they start; on GPUs only, and not tried there by any test of ours
GPU_SETTINGS = {
    # cuBLAS is deterministic only with a workspace of fixed size, chosen before CUDA starts
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # sums inside the switch come in the order in which packets do; rings and trees have a fixed one
    "NCCL_ALGO": "^NVLS",
    "NCCL_NVLS_ENABLE": "0",
    # TransformerEngine: attention without atomic additions
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def is_deterministic(setting: bool | None, *, accelerator: bool | None = None) -> bool:
    """`run.deterministic` of a recipe on this machine: null means on, unless there is an accelerator."""
    if setting is not None:
        return setting
    return not (device.has_accelerator() if accelerator is None else accelerator)


def make_deterministic(environment: MutableMapping[str, str]) -> None:
    """Only deterministic algorithms in this process; an operation without one raises instead of running.

    Call it before anything touches a GPU. `environment` gets what is not set there yet.
    """
    for name, value in GPU_SETTINGS.items():
        environment.setdefault(name, value)
    if device.has_accelerator():
        torch.use_deterministic_algorithms(True)
    else:
        # the same but for torch's compiler, which is then loaded to be told of it, and which nothing here calls
        torch.set_deterministic_debug_mode("error")
    # torch would write NaN into all memory that is not written yet: 4 % of a training step on a CPU, for a mistake that
    # two runs of a test that compare bits show as well
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
