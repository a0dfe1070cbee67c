"""What `compat` stands for: keys of RL stages that are set where the recipe does not say otherwise.

A key that the file or an override writes down wins, null included: the resolved recipe shows it with its own origin,
and those that were set here with the origin `compat`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

Path = tuple[str, ...]

# Klear's released trainer and graders (Kwai-Klear/KlearReasoner, `perf_run_dapo_ours_*.sh`, `math_dapo.py`,
# `code_r1_compute.py`) where they differ from the paper (arXiv 2508.07629). Keys are those of an RL stage.
_KLEAR_REPO: dict[str, Any] = {
    "algorithm.dual_clip": 10.0,
    "algorithm.advantage_std": "unbiased",
    # token means of micro-batches, for the surrogate and for the positives
    "algorithm.normaliser": "micro_batch",
    # a group is dropped by whether a response passes all tests, not by the share that it passes
    "algorithm.zero_advantage_by": "all_pass",
    # +1 and -1 instead of 1 and 0; 2p - 1 for a share p of tests
    "grader.scale": [-1.0, 1.0],
    "grader.missing_think_close": -0.5,
    "grader.missing_think_open": -2.0,
}
EXPANSIONS: Mapping[str, Mapping[str, Any]] = {"none": {}, "klear_repo": _KLEAR_REPO}


def expand_compat(data: Any) -> tuple[Any, list[Path]]:
    """The raw recipe with the keys of its `compat` filled in, and their paths. What is malformed stays as it is."""
    compat = data.get("compat") if isinstance(data, dict) else None
    wanted = EXPANSIONS.get(compat, {}) if isinstance(compat, str) else {}
    stages = data.get("stages") if isinstance(data, dict) else None
    if not wanted or not isinstance(stages, list):
        return data, []
    data = copy.deepcopy(data)
    filled: list[Path] = []
    for index, stage in enumerate(data["stages"]):
        if isinstance(stage, dict) and stage.get("kind") == "rl":
            paths = (key.split(".") for key, value in wanted.items() if _fill(stage, key, value))
            filled += [("stages", str(index), *path) for path in paths]
    return data, filled


def _fill(stage: dict[str, Any], key: str, value: Any) -> bool:
    """Set a key that is not there; whether it was."""
    section, name = key.split(".")
    below = stage.setdefault(section, {})
    if not isinstance(below, dict) or name in below:
        return False
    below[name] = copy.deepcopy(value)
    return True
