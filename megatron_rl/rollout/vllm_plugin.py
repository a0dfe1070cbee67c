"""Tells vLLM about our weight receiver; the entry point `vllm.general_plugins` calls `register` in its processes."""

from __future__ import annotations

BACKEND = "megatron_rl"


def register() -> None:
    """Register the backend name; safe to call twice. vLLM imports the receiver itself when it is asked for."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # the registry refuses a second registration and offers no public question
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "megatron_rl.rollout.weight_receiver", "WeightReceiver")
