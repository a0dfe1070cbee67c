"""Other people's implementations of the same ops, where they are installed. None is required, none is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from bench_kernels_cases import Contender, Outputs, Tensors
from torch.nn import functional

# tokens that torch's own is best at; its default follows the shape and can be a handful
TORCH_CHUNK = 1024


def available(
    peers: Mapping[str, Callable[[], Contender]], device: torch.device
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Contenders that can be imported, and why the others cannot."""
    found, missing = {}, {}
    for name, build in peers.items():
        try:
            found[name] = build()
        except (ImportError, AttributeError) as error:
            missing[name] = f"not installed ({error})"
        else:
            if name in ONLY_CUDA and device.type != "cuda":
                missing[name] = f"needs CUDA, this is {device.type}"
                del found[name]
    return found, missing


def torch_linear_cross_entropy(chunk: int | None = None) -> Contender:
    """Its output has the dtype of its inputs. `chunk`: tokens at a time, None: its own choice."""
    call, options = functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions

    def run(t: Tensors) -> Outputs:
        chosen = options() if chunk is None else options(batch_chunk_size=chunk)
        loss = call(t["hidden"], t["weight"], t["target"], reduction="none", options=chosen)
        return {"logprob": -loss.float()}

    return Contender(run=run, gemms=(1, 3))


def liger_linear_cross_entropy() -> Contender:
    """Makes gradients in forward, for a sum: its upstream gradient is one number."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # type: ignore[import-not-found]

    def run(t: Tensors) -> Outputs:
        loss = liger_fused_linear_cross_entropy(t["hidden"], t["weight"], t["target"], reduction="sum")
        return {"logprob": -loss[0] if isinstance(loss, tuple) else -loss}

    return Contender(run=run, gemms=(3, 0), only_time=True)


def cut_cross_entropy() -> Contender:
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

    def run(t: Tensors) -> Outputs:
        loss = linear_cross_entropy(t["hidden"], t["weight"], t["target"], reduction="none")
        return {"logprob": -loss.float()}

    return Contender(run=run, gemms=(1, 3))


def trl_after_linear() -> Contender:
    from trl.trainer.utils import selective_log_softmax  # type: ignore[import-not-found]

    def run(t: Tensors) -> Outputs:
        logits = functional.linear(t["hidden"], t["weight"])
        return {"logprob": selective_log_softmax(logits[None], t["target"][None])[0].float()}

    return Contender(run=run, gemms=(1, 2))


def trl_from_logits() -> Contender:
    from trl.trainer.utils import selective_log_softmax

    def run(t: Tensors) -> Outputs:
        return {"logprob": selective_log_softmax(t["logits"][None], t["target"][None])[0].float()}

    return Contender(run=run)


def liger_rms_norm() -> Contender:
    from liger_kernel.transformers.functional import liger_rms_norm as call

    def run(t: Tensors) -> Outputs:
        return {"out": call(t["x"], t["weight"], 1e-6)}

    return Contender(run=run)


def liger_swiglu() -> Contender:
    from liger_kernel.transformers.functional import liger_swiglu as call

    def run(t: Tensors) -> Outputs:
        return {"out": call(*t["x"].chunk(2, dim=-1))}

    return Contender(run=run)


HEAD_PEERS = {
    "torch linear_cross_entropy": torch_linear_cross_entropy,
    f"torch linear_cross_entropy, {TORCH_CHUNK} tokens": partial(torch_linear_cross_entropy, TORCH_CHUNK),
    "Liger-Kernel": liger_linear_cross_entropy,
    "cut-cross-entropy": cut_cross_entropy,
    "linear + TRL selective_log_softmax": trl_after_linear,
}
LOGIT_PEERS = {"TRL selective_log_softmax": trl_from_logits}
NORM_PEERS = {"Liger-Kernel": liger_rms_norm}
ACTIVATION_PEERS = {"Liger-Kernel": liger_swiglu}
ONLY_CUDA = {"Liger-Kernel", "cut-cross-entropy"}
