"""The one patch of the project: what megatron-core 0.16.1 needs to run on CPU with gloo, and to start soon.

megatron-core takes a CUDA device for granted in many places; `PATCHED` lists each name that is replaced, with
the reason. `apply` replaces them all and can be called again. Only `platform.device.activate` calls it, and
only where there is no accelerator.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.platform.adam import FusedAdam

_CPU = torch.device("cpu")
_tensor_type = torch.Tensor.type


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced name: `owner` is a module path, or "module:Class" for a method."""

    owner: str
    name: str
    replacement: Any
    reason: str

    def target(self) -> Any:
        """The module or class that holds the name."""
        module, _, cls = self.owner.partition(":")
        found = importlib.import_module(module)
        return getattr(found, cls) if cls else found


def import_uncompiled() -> None:
    """Import megatron-core with its small fused functions as they are written.

    It wraps them in torch.compile at import, which loads the compiler: 40 % of what a start takes. On CPU it
    would not pay for itself either: each function is translated to C++ when it is first called.
    """
    compiler = torch.compile
    torch.compile = _leave_as_it_is  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core.jit")
    finally:
        torch.compile = compiler


def _leave_as_it_is(function: Any) -> Any:
    """In the place of `torch.compile`, which megatron-core uses without options."""
    return function


def apply() -> None:
    """Replace every name of `PATCHED`; a name that is already replaced stays as it is."""
    with warnings.catch_warnings():
        # said at import by module after module; without an accelerator it is no news
        warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
        importlib.import_module("megatron.core.models.gpt.gpt_model")
        for patch in PATCHED:
            setattr(patch.target(), patch.name, patch.replacement)


def _current_device() -> torch.device:
    return _CPU


def _synchronize(device: Any = None) -> None:
    """Nothing to wait for: CPU work is done when it returns."""


def _get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def _tensor_cuda(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return self


def _tensor_type_for_megatron(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type`, except that megatron-core's optimizers are told that a CPU tensor is a CUDA one."""
    answer = _tensor_type(self, *args, **kwargs)
    if args or kwargs or not sys._getframe(1).f_globals["__name__"].startswith("megatron.core.optimizer"):
        return answer
    return answer.replace("torch.", "torch.cuda.", 1)


def _factory_on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return factory(*args, device=_CPU if device == "cuda" else device, **kwargs)

    return make


def _gather_along_first_dim(
    input_: Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> Tensor:
    """megatron-core's gather; shards of different lengths, which gloo refuses, travel padded to the longest."""
    if group.size() == 1:
        return input_
    sizes = [input_.size(0)] * group.size() if output_split_sizes is None else list(output_split_sizes)
    longest = max(sizes)
    mine = input_.contiguous()
    if mine.size(0) < longest:
        mine = torch.cat([mine, mine.new_zeros(longest - mine.size(0), *mine.shape[1:])])
    whole = mine.new_empty(longest * group.size(), *mine.shape[1:])
    shards = list(whole.split(longest))
    torch.distributed.all_gather(shards, mine, group=group)
    if min(sizes) == longest:
        return whole
    return torch.cat([shard[:size] for shard, size in zip(shards, sizes, strict=True)])


def _splits_on_host(self: Any, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
    """Where tensors of a device would be copied to the host: here they only become the arrays gloo is given."""
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(splits := getattr(self, name), Tensor):
                setattr(self, name, splits.numpy())
    return tokens_per_expert


class _TorchOnCpu(types.ModuleType):
    """A copy of the torch namespace whose factories read `device="cuda"` as the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.__dict__.update(torch.__dict__)
        for name in ("empty", "empty_like", "full", "ones", "tensor", "zeros"):
            self.__dict__[name] = _factory_on_cpu(getattr(torch, name))

    def __getattr__(self, name: str) -> Any:
        # torch loads some submodules on first use, after the copy was taken
        return getattr(torch, name)


_torch_on_cpu = _TorchOnCpu()

# modules on the path of training and checkpointing that spell `device="cuda"` in a tensor factory
_LITERAL_CUDA = {
    "megatron.core.pipeline_parallel.schedules": "counter of trained tokens",
    "megatron.core.optimizer.clip_grads": "gradient norm and overflow buffer",
    "megatron.core.utils": "L2 norm and scaling without Apex",
    "megatron.core.optimizer.optimizer": "found-inf flag and loss scale of bf16 training",
    "megatron.core.optimizer.grad_scaler": "loss scale of fp16 training",
    "megatron.core.dist_checkpointing.exchange_utils": "buffers of parallel checkpoint loading",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver": "agreement flag of checkpoint saving",
}

_DEVICE = "a device for tensor factories; raises without CUDA"
_WAIT = "waits for the device; raises without CUDA"
_RNG = "the RNG tracker keeps one generator state per role; on CPU that is the CPU generator"
_RNG_TORCH = "the RNG tracker seeds and reads the device generator; raises or is queued for ever without CUDA"
_DISPATCH = "tokens on their way to experts are counted on a side stream; there are no streams without CUDA"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_ADAM = "without Apex it falls back to torch's Adam, whose per-parameter step cannot be resharded"

PATCHED: tuple[Patch, ...] = (
    Patch("torch.cuda", "current_device", _current_device, _DEVICE),
    Patch("torch.cuda", "synchronize", _synchronize, _WAIT),
    Patch("torch.cuda", "get_rng_state", _get_rng_state, _RNG_TORCH),
    Patch("torch.cuda", "set_rng_state", _set_rng_state, _RNG_TORCH),
    Patch("torch.cuda", "manual_seed", _manual_seed, _RNG_TORCH),
    Patch("torch:Tensor", "cuda", _tensor_cuda, "moves to the device; raises without CUDA"),
    Patch("torch:Tensor", "type", _tensor_type_for_megatron, "optimizers ask for torch.cuda.FloatTensor"),
    Patch("megatron.core.tensor_parallel.random", "_get_cuda_rng_state", _get_rng_state, _RNG),
    Patch("megatron.core.tensor_parallel.random", "_set_cuda_rng_state", _set_rng_state, _RNG),
    # anything but None: the stream is made where there is none yet
    Patch(_DISPATCHER, "cuda_dtoh_stream", "no stream", _DISPATCH),
    Patch(_DISPATCHER, "_maybe_dtoh_and_synchronize", _splits_on_host, _DISPATCH),
    Patch(
        "megatron.core.tensor_parallel.mappings",
        "_gather_along_first_dim",
        _gather_along_first_dim,
        "gathers shards of different lengths where experts are split; gloo takes equal ones only",
    ),
    Patch("megatron.core.optimizer", "Adam", FusedAdam, _ADAM),
    Patch("megatron.core.optimizer", "USING_PYTORCH_OPTIMIZER", False, _ADAM),
    Patch("megatron.core.optimizer.distrib_optimizer", "Adam", FusedAdam, _ADAM),
    Patch("megatron.core.optimizer.distrib_optimizer", "HAVE_APEX_OR_TE", True, _ADAM),
    Patch("megatron.core.optimizer.distrib_optimizer", "USING_APEX_OPTIMIZER", True, _ADAM),
    *(
        Patch(module, "torch", _torch_on_cpu, f'device="cuda" spelled out: {what}')
        for module, what in _LITERAL_CUDA.items()
    ),
)
