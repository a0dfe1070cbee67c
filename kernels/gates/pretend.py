"""A machine that is not there: ops run as on a CUDA device, their launches are compiled for it and kept, not run.

Tensors are fake ones on `cuda` (shapes and addresses, no memory), so ops take the very path, sizes and alignments of
production. Triton compiles each launch as its just-in-time compiler would, for the architecture that is asked for.
Everything that a device would be asked has its answer here. For a process of its own: it replaces parts of torch and
Triton and does not put them back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import jit
from triton.runtime.driver import driver

WARP_SIZE, NUM_SMS = 32, {90: 132, 100: 148}
# what CUDA's allocator gives: every storage starts at a multiple of it
ALIGNMENT = 512
# torch's list of who sets the current device of each kind: places of two kinds in it
GUARDS, CUDA, META, NUM_KINDS = "_ZN3c104impl26device_guard_impl_registryE", 1, 14, 21


class Driver:
    """What Triton asks the driver of the active device before it launches."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, WARP_SIZE)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


class Addresses:
    """An address for every storage, so that alignment and overlap are those of real memory."""

    def __init__(self) -> None:
        self._next = 1 << 32
        # storages are kept, or another one would get the key of one that is gone
        self._known: dict[int, tuple[Any, int]] = {}

    def of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage, self._next
            self._next += -(-max(1, storage.nbytes()) // ALIGNMENT) * ALIGNMENT
        return self._known[key][1] + int(tensor.storage_offset()) * tensor.element_size()


class Answers(TorchDispatchMode):
    """Answers what depends on values that are not there: every mask is True, every number 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default:
            (mask,) = args
            return torch.empty((mask.numel(), mask.ndim), dtype=torch.int64, device=mask.device)
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))


class Context:
    """What a `torch.autograd.Function` keeps between its forward and its backward."""

    def __init__(self, num_inputs: int) -> None:
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.needs_input_grad = (True,) * num_inputs

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_dirty(self, *tensors: Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class Tape:
    """Calls of autograd functions, whose backward is then called by hand: autograd wants a device that is there."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Context, Any]] = []

    def apply(self, function: Any, *args: Any) -> Any:
        context = Context(len(args))
        with torch.no_grad():
            out = function.forward(context, *args)
        self._calls.append((function, context, out))
        return out

    def clear(self) -> None:
        self._calls.clear()

    def play_back(self) -> None:
        while self._calls:
            function, context, out = self._calls.pop()
            outputs = out if isinstance(out, tuple) else (out,)
            # a gradient for every floating output, as all of them had been used
            given = [
                torch.empty_like(one) if isinstance(one, Tensor) and one.is_floating_point() else None
                for one in outputs
            ]
            with torch.no_grad():
                function.backward(context, *given)


def _let_cuda_be_current() -> None:
    """Give a torch without CUDA the guard of `meta` tensors, which does nothing, for fake tensors on `cuda`."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * NUM_KINDS).in_dll(library, GUARDS)
    guards[CUDA] = guards[CUDA] or guards[META]


@contextmanager
def pretended(capability: int, keep: Callable[[Any], None]) -> Iterator[Tape]:
    """Inside: CUDA tensors are fake, `keep` gets each launch's compiled kernel, the tape plays backward."""
    _let_cuda_be_current()
    driver.set_active(Driver(capability))
    run = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        keep(kernel)
        return kernel

    tape, addresses = Tape(), Addresses()
    properties = SimpleNamespace(multi_processor_count=NUM_SMS[capability], major=capability // 10, minor=0)
    _replace(jit.JITFunction, run=compile_only)
    _replace(torch.autograd.Function, apply=classmethod(lambda cls, *args: tape.apply(cls, *args)))
    _replace(FakeTensor, data_ptr=lambda self: addresses.of(self))
    _replace(
        torch.cuda,
        get_device_capability=lambda device=None: divmod(capability, 10),
        get_device_properties=lambda device=None: properties,
        current_device=lambda: 0,
        # what `with torch.cuda.device(...)` calls
        _exchange_device=lambda device: 0,
        _maybe_exchange_device=lambda device: 0,
    )
    triton.set_allocator(lambda size, alignment, stream: None)
    with FakeTensorMode(), Answers():
        yield tape


def _replace(owner: Any, **parts: Any) -> None:
    for name, part in parts.items():
        setattr(owner, name, part)
