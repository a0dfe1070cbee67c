"""Random generators of one rank: Python's, numpy's, torch's, the device's and megatron-core's, as plain JSON.

Training draws from none of them: there is no dropout, and the order of the data and every sampling seed are
functions of the run's seed and of its progress. They are stored so that this stays true of what a user adds.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_rl.data.seeds import derive_seed
from megatron_rl.platform import device


def generator_states() -> dict[str, Any]:
    """The state of every generator; `set_generator_states` is the inverse."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
        "megatron_core": {name: _text(state) for name, state in get_cuda_rng_tracker().get_states().items()},
    }
    if device.has_accelerator():
        states["cuda"] = _text(torch.cuda.get_rng_state())
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    """Continue every generator from `states`. Raises KeyError or ValueError for what is no such state."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(states["torch"]))
    get_cuda_rng_tracker().set_states({name: _tensor(s) for name, s in states["megatron_core"].items()})
    if device.has_accelerator():
        torch.cuda.set_rng_state(_tensor(states["cuda"]))


def seed_generators(seed: int, *, rank: int) -> None:
    """Start every generator anew: megatron-core's by its own rule, Python's and numpy's apart on each rank."""
    random.seed(derive_seed(seed, "python", rank))
    np.random.seed(derive_seed(seed, "numpy", rank))
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
