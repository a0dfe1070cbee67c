"""Warnings of the libraries below us that no user of this project can act on, silenced one by one."""

from __future__ import annotations

import warnings

# (beginning of the message as a regular expression, why it says nothing here)
_SILENCED = (
    ("Transformer Engine and Apex are not installed", "layer implementations are chosen by model.spec"),
    ("Apex is not installed", "norms are our own"),
    ("full scope is deprecated", "megatron-core about its own default for CUDA graphs"),
    (
        "When using (async grad allreduce|sequence parallelism) it is recommended to set the environment variable",
        "CUDA_DEVICE_MAX_CONNECTIONS, which launch/torchrun.sh sets; without a GPU it means nothing",
    ),
    ("The .grad attribute of a Tensor that is not a leaf", "megatron-core probes every shard for a gradient"),
    ("`load_state_dict` is deprecated", "how megatron-core reads a checkpoint"),
    ("Please use DTensor instead", "torch about the tensors that megatron-core reads a checkpoint with"),
    (r"`torch\.distributed\.\w+` is deprecated", "megatron-core's collectives"),
)


def silence_library_warnings() -> None:
    """Call before the libraries are imported: some of them warn while they load."""
    for message, _ in _SILENCED:
        warnings.filterwarnings("ignore", message=message)
