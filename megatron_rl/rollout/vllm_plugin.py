"""Tells vLLM about our weight receiver; it calls `register` in each process (`vllm.general_plugins`)."""

from __future__ import annotations

BACKEND = "megatron_rl"


def register() -> None:
    """Register the backend name; safe to call twice. vLLM imports the receiver when it needs it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # the registry refuses a second registration and offers no public question
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "megatron_rl.rollout.weight_receiver", "WeightReceiver"
        )
