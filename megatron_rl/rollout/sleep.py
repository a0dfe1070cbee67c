"""An engine that gives its memory back while the trainer works: weights and KV cache go, and come back empty.

On GPUs vLLM's own sleep mode of level 2 does it, by the same virtual addresses. On CPU vLLM has none, so the storages
are emptied here. Either way a parameter is marked when it comes back, and the mark is looked for after the transfer:
what did not arrive is named, however plausible the numbers are that memory happens to hold.

vLLM saves the buffers of modules over level 2 (vllm-project/vllm PR 16889), but not tensors that a module keeps as
plain attributes, which issue 16564 and PR 20735 there are about; those are saved here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from megatron_rl.errors import EngineError, ReshardError

# no computation makes these: signalling bits, and a payload of our own; by bytes of an element
_MARKS = {2: (torch.int16, 0x7FD5), 4: (torch.int32, 0x7FC5D5E5), 8: (torch.int64, 0x7FF8D5E5C5B5A595)}


class Memory(Enum):
    """What an engine holds. Only awake it may compute: a step on a KV cache that is not there ends a GPU process
    (vllm-project/vllm issue 44395)."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS = "weights"  # there is room for them, and perhaps they are there; no KV cache


class Sleeper:
    """Puts the engine `llm` to sleep and wakes it in two steps. `has_sleep_mode`: vLLM's own, on GPUs."""

    def __init__(self, llm: Any, *, has_sleep_mode: bool) -> None:
        self._llm, self._has_sleep_mode = llm, has_sleep_mode
        self.memory = Memory.AWAKE

    def sleep(self) -> None:
        """Nothing may run. Safe to call twice."""
        if self.memory is Memory.ASLEEP:
            return
        if self.memory is Memory.WEIGHTS:
            # a transfer failed; vLLM goes to sleep as a whole alone
            self.wake_kv_cache()
        self._llm.collective_rpc(_save_plain_tensors)
        if self._has_sleep_mode:
            self._llm.sleep(level=2)
        else:
            self._llm.collective_rpc(_empty)
        self.memory = Memory.ASLEEP

    def wake_weights(self) -> None:
        """Room for the weights, each marked as not arrived; nothing where there is room already."""
        if self.memory is not Memory.ASLEEP:
            return
        if self._has_sleep_mode:
            self._llm.wake_up(tags=["weights"])
        else:
            self._llm.collective_rpc(partial(_fill, what="weights"))
        self._llm.collective_rpc(_restore_plain_tensors)
        self._llm.collective_rpc(_mark_all)
        self.memory = Memory.WEIGHTS

    def check_arrived(self) -> None:
        """Raises ReshardError naming parameters that slept and did not come with the transfer."""
        if self.memory is Memory.WEIGHTS:
            missing = sorted({name for names in self._llm.collective_rpc(_unarrived) for name in names})
            if missing:
                more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
                raise ReshardError(
                    f"weight transfer: {missing[0]}{more} was given back while the engine slept, and did not arrive"
                )

    def wake_kv_cache(self) -> None:
        """The rest, empty; then it may compute. Nothing for an engine that is awake."""
        if self.memory is Memory.AWAKE:
            return
        if self._has_sleep_mode:
            self._llm.wake_up(tags=["kv_cache"])
        else:
            self._llm.collective_rpc(partial(_fill, what="kv_cache"))
        self.memory = Memory.AWAKE

    def check_awake(self) -> None:
        """Raises EngineError unless everything is there."""
        if self.memory is not Memory.AWAKE:
            raise EngineError(f"engine sleeps (memory: {self.memory.value}); transfer weights to wake it")


def mark(tensor: Tensor) -> None:
    """Fill with what no transfer brings. Whole numbers and types of one byte stay what they are: unknown."""
    if (found := _bits(tensor)) is not None:
        bits, pattern = found
        bits.fill_(pattern)


def is_marked(tensor: Tensor) -> bool:
    """Whether any element still is what `mark` made it."""
    found = _bits(tensor)
    return found is not None and bool((found[0] == found[1]).any())


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules keep beside parameters and buffers, alone or in a list or mapping, by a name for each."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for place, tensor in _inside(value):
                yield f"{prefix}.{name}{place}", tensor


def _inside(value: Any) -> Iterable[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [("", value)]
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    return [(f".{key}", each) for key, each in entries if isinstance(each, Tensor)]


def _bits(tensor: Tensor) -> tuple[Tensor, int] | None:
    if not tensor.is_floating_point() or tensor.element_size() not in _MARKS or not tensor.numel():
        return None
    kind, pattern = _MARKS[tensor.element_size()]
    return tensor.detach().view(kind), pattern


# What follows runs in vLLM's workers.


def _save_plain_tensors(worker: Any) -> None:
    runner = worker.model_runner
    # views of what arrives, or of what starts empty
    others = [*runner.model.parameters(), *runner.kv_caches]
    known = {tensor.untyped_storage()._cdata for tensor in others}
    worker.megatron_rl_saved = [
        (tensor, tensor.detach().to("cpu", copy=True))
        for _, tensor in plain_tensors(runner.model)
        if tensor.untyped_storage()._cdata not in known and not tensor.is_meta
    ]


def _restore_plain_tensors(worker: Any) -> None:
    with torch.no_grad():
        for tensor, saved in worker.megatron_rl_saved:
            tensor.copy_(saved)
    worker.megatron_rl_saved = []


def _mark_all(worker: Any) -> None:
    with torch.no_grad():
        for param in worker.model_runner.model.parameters():
            mark(param)


def _unarrived(worker: Any) -> list[str]:
    model = worker.model_runner.model
    names = [name for name, param in model.named_parameters() if is_marked(param)]
    # a packed copy that nothing made anew
    names += [f"{name}.weight" for name, each in model.named_modules() if vars(each).get("cpu_linear") is _asleep]
    return names


def _empty(worker: Any) -> None:
    """On CPU: no memory for parameters, packed copies of them, and KV cache."""
    runner = worker.model_runner
    for module in runner.model.modules():
        if "cpu_linear" in vars(module):
            # it alone holds the packed weight
            module.cpu_linear = _asleep
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
    parts = {"weights": list(runner.model.parameters()), "kv_cache": list(runner.kv_caches)}
    worker.megatron_rl_emptied = {}
    for what, tensors in parts.items():
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        worker.megatron_rl_emptied[what] = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage in storages.values():
            storage.resize_(0)
    # small pieces stay with the allocator otherwise; other C libraries have no such call
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _fill(worker: Any, what: str) -> None:
    for storage, size in worker.megatron_rl_emptied.pop(what):
        storage.resize_(size)


def _asleep(*args: Any) -> NoReturn:
    raise EngineError("engine sleeps: this weight was given back, and did not arrive since")
