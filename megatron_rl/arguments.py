"""Command-line options and their values, shared by the commands and the tools."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """A whole number of at least 1, for argparse's `type`."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number of at least 1")
    return value


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """A recipe and overrides of it."""
    parser.add_argument(
        "recipe", metavar="RECIPE", help="YAML file; paths inside it start at the current directory"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="path=value", help="such as stages.1.optimizer.lr=1e-6"
    )
