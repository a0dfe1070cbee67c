"""Every random number of a run starts here: seeds are functions of what is drawn, never of who draws it."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) from `parts`, e.g. (run seed, stage, iteration, prompt id, sample index).

    Independent of layout, replica and process; stable across Python versions (BLAKE2, not `hash`).
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % 2**31
