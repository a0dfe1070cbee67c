"""Where the curriculum windows of a run begin: by its recipe, and by the windows that its records say ended early."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.recipe.read_resolved import Setting
from megatron_rl.train.progress import stage_labels

_KEY = re.compile(r"stages\.(\d+)\.(?:kind|curriculum\.(\d+)\.(iterations|difficulty|pass_rate))$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """`end` is the first planned iteration (from 0) behind it; `text` its number and what it draws."""

    end: int
    text: str


def window_starts(
    settings: Sequence[Setting], lines: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[float, str]]:
    """(step, text) of the first iteration of each window but the first of its stage, and but those that follow an
    early end, which has a mark of its own. `lines` are those of metrics.jsonl, by step."""
    for label, windows in _windows(settings).items():
        skipped, current, is_told = 0, 0, True
        for line in lines:
            iteration = line.get("iteration")
            if line["stage"] != label or not isinstance(iteration, int):
                continue
            planned = iteration - 1 + skipped
            number = sum(window.end <= planned for window in windows)
            if current < number < len(windows) and not is_told:
                yield float(line["step"]), windows[number].text
            current, is_told = number, False
            if line.get("curriculum/promoted") == 1 and number < len(windows):
                skipped += windows[number].end - 1 - planned
                is_told = True


def _windows(settings: Sequence[Setting]) -> dict[str, list[Window]]:
    """Windows of each RL stage by the name that its records have."""
    kinds: dict[int, str] = {}
    keys: dict[int, dict[int, dict[str, str]]] = {}
    for setting in settings:
        found = _KEY.match(setting.path)
        if found and found[2] is None:
            kinds[int(found[1])] = setting.value
        elif found:
            keys.setdefault(int(found[1]), {}).setdefault(int(found[2]), {})[found[3]] = setting.value
    numbers = sorted(kinds)
    labels = stage_labels([kinds[number] for number in numbers])
    return {
        label: _planned(keys[number]) for label, number in zip(labels, numbers, strict=True) if number in keys
    }


def _planned(curriculum: Mapping[int, Mapping[str, str]]) -> list[Window]:
    windows: list[Window] = []
    for number, window in sorted(curriculum.items()):
        length = window.get("iterations", "")
        if not length.isdecimal():
            return []  # another program's
        begin = windows[-1].end if windows else 0
        drawn = [
            f"{key.replace('_', ' ')} {window[key]}" for key in ("difficulty", "pass_rate") if key in window
        ]
        what = ", ".join(text for text in drawn if not text.endswith("null")) or "all prompts"
        windows.append(Window(end=begin + int(length), text=f"window {number + 1}: {what}"))
    return windows
