"""Processes that start in milliseconds: forked from one that has imported the heavy libraries and done nothing else."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forkserver() -> ForkServerContext:
    """Its processes have the environment that this process had when it asked for the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded"])
    return context
