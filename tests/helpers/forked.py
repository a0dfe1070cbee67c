"""Processes that start in milliseconds: forked from one that has imported the heavy libraries and done nothing else."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext


def forkserver() -> ForkServerContext:
    """Its processes have the environment that this process had when it asked for the first of them: see `inherit`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded"])
    return context


def inherit(environment: Mapping[str, str]) -> None:
    """Take over the environment that the process which asked for this one has now; first thing in a process."""
    os.environ.clear()
    os.environ.update(environment)
