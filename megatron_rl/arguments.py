"""Command-line options and their values, shared by the commands and the tools."""

from __future__ import annotations

import argparse
import math


def positive_int(text: str) -> int:
    """A whole number of at least 1, for argparse's `type`."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number of at least 1")
    return value


def whole_number(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else positive_int(text)


def seed(text: str) -> int:
    """A seed as `run.seed`: what numpy takes, and with it vLLM."""
    if not text.isdecimal() or int(text[:11]) >= 2**32:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number from 0 to 4,294,967,295")
    return int(text)


def seconds(text: str) -> float:
    """Seconds to wait for, as many as operating systems take."""
    return number_above_0(text, most=1e6)


def number_above_0(text: str, *, most: float = math.inf) -> float:
    """A finite number above 0, and at most `most`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most or math.isinf(value):
        limit = "" if math.isinf(most) else f" and at most {most:,.0f}"
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a number above 0{limit}")
    return value


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """A recipe and overrides of it."""
    parser.add_argument(
        "recipe", metavar="RECIPE", help="YAML file; paths inside it start at the current directory"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="path=value", help="such as stages.1.optimizer.lr=1e-6"
    )
