"""Command-line options and their values, shared by the commands and the tools."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """Names every value that is none of its option, and what is missing, where argparse stops at the first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wrong: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found = super().parse_known_args(args, namespace)
        if self._wrong:
            unknown = [text for text in found[1] if text.startswith("-")]
            self._wrong += [f"unrecognized arguments: {' '.join(unknown)}"] if unknown else []
            self.error(self._wrong.pop())
        return found

    def error(self, message: str) -> NoReturn:
        problems, self._wrong = [*self._wrong, message], []
        if len(problems) > 1:
            message = "\n  ".join([f"{len(problems)} problems", *problems])
        super().error(message)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self._wrong.append(str(error))
            return None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # None: told of already
        if value is None:
            return
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            # without the command nothing else can be read
            if isinstance(action, argparse._SubParsersAction):
                raise
            self._wrong.append(str(error))


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


def write_problem(path: Path) -> str | None:
    """Why no file can be written there, asked before what is to be in it is computed. Directories are made."""
    if path.is_dir():
        return "is a directory; give the path of a file"
    there = next(place for place in path.absolute().parents if place.exists())
    if not there.is_dir():
        return f"{there} is no directory; choose another place"
    if not os.access(there, os.W_OK):
        return f"nothing can be written in {there}; choose another place"
    return None


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """A recipe and overrides of it."""
    parser.add_argument(
        "recipe", metavar="RECIPE", help="YAML file; paths inside it start at the current directory"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="path=value", help="such as stages.1.optimizer.lr=1e-6"
    )
