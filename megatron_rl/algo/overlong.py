"""DAPO's soft punishment of responses that come near the length limit (arXiv 2503.14476, equation 13)."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """What is added to the reward of a response of `num_tokens`, from 0 to -1.

    0 up to max_tokens - buffer_tokens, then ((max_tokens - buffer_tokens) - num_tokens) / buffer_tokens, and -1 at
    max_tokens and beyond.
    """
    over = num_tokens - (max_tokens - buffer_tokens)
    return -min(1.0, over / buffer_tokens) if over > 0 else 0.0
