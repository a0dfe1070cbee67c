"""Megatron-style 3D-parallel post-training of reasoning models: SFT and RL on megatron-core with vLLM rollouts."""

__version__ = "0.1.0"
