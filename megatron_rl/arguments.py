"""Values of command-line options, shared by the command and the tools."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """A whole number of at least 1, for argparse's `type`."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number of at least 1")
    return value
