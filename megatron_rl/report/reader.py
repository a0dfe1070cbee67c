"""Which rollouts a report holds, and how much of each: a page has to stay one that a browser opens at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.report.heat import read_some, rollout_files
from megatron_rl.report.series import rounded, spread
from megatron_rl.report.source import Source
from megatron_rl.train.files import is_finite
from megatron_rl.train.records import TOKENS_PREFIX

MAX_ROLLOUTS = 400  # of all runs together
MAX_ITERATIONS = 16  # of each run
MAX_TEXT_CHARS = 24_000  # of a prompt, of a completion, of a gold; the middle is left out
MAX_TOKENS = 120_000  # shown one by one, of all runs together
_MAX_BYTES = 16 * 2**20  # read of one file
_MAX_REASON_CHARS = 2_000
_COLUMNS = ("rollout_logprobs", "old_logprobs", "logprobs", "clipped")
_BOUND = f"a page holds at most {MAX_ROLLOUTS:,} rollouts and {MAX_TOKENS:,} of their tokens one by one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The rollouts of a report as plain JSON values, and in words how many that is of what was written."""

    rollouts: list[dict[str, Any]]
    note: str
    faults: list[str]  # lines that could not be read and are left out


def choose_rollouts(sources: Sequence[Source], *, most: int = MAX_ROLLOUTS) -> Reading:
    """Evenly spread iterations, the latest among them; in each first those with tokens, then a spread of the rest."""
    found: list[dict[str, Any]] = []
    faults: list[str] = []
    notes = []
    for number, source in enumerate(sources):
        folder = source.run.run_dir / "rollouts"
        files = rollout_files(folder)
        iterations = min(MAX_ITERATIONS, max(1, most // len(sources)))
        chosen = [files[index] for index in spread(len(files), iterations)]
        share = max(1, most // len(sources) // max(1, len(chosen)))
        of_run = [
            _rollout(line, tokens, number, iteration)
            for iteration, path in chosen
            for line, tokens in _of_iteration(path, folder, iteration, share, faults)
        ]
        found += of_run
        where = f"{source.name}: " if len(sources) > 1 else ""
        notes.append(f"{where}{len(of_run)} rollouts of {len(chosen)} of {len(files)} iterations")
    _drop_tokens_beyond(found, MAX_TOKENS)
    return Reading(rollouts=found, note=f"{'; '.join(notes)}, evenly spread; {_BOUND}", faults=faults)


def _of_iteration(
    path: Path, folder: Path, iteration: int, share: int, faults: list[str]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    of_tokens, broken = read_some(folder / f"{TOKENS_PREFIX}{iteration:06d}.jsonl", _MAX_BYTES)
    tokens = {_key(line): line for line in of_tokens}
    lines, also_broken = read_some(path, _MAX_BYTES)
    faults += broken + also_broken
    # a prompt that was drawn twice in an iteration has its tokens at the first
    detailed = {
        key: index for index, line in reversed(list(enumerate(lines))) if (key := _key(line)) in tokens
    }
    with_tokens = sorted(detailed.values())
    with_tokens = [with_tokens[index] for index in spread(len(with_tokens), share)]
    rest = [index for index in range(len(lines)) if index not in set(detailed.values())]
    left = share - len(with_tokens)
    others = [rest[index] for index in spread(len(rest), left)] if left else []
    for index in sorted([*with_tokens, *others]):
        yield lines[index], tokens[_key(lines[index])] if index in with_tokens else None


def _key(line: Mapping[str, Any]) -> tuple[str, int | None]:
    return str(line.get("prompt_id")), _count(line.get("sample_index"))


def _rollout(
    line: Mapping[str, Any], tokens: Mapping[str, Any] | None, run: int, iteration: int
) -> dict[str, Any]:
    """Short names: there are many. What an older run did not write is null."""
    parts = line.get("parts")
    return {
        "run": run,
        "iteration": iteration,
        "id": _text(line.get("prompt_id", "")),
        "sample": _count(line.get("sample_index")),
        "prompt": _text(line.get("prompt", "")),
        "text": _text(line.get("completion", "")),
        "gold": _text(line["gold"]) if line.get("gold") is not None else None,
        "reward": _number(line.get("reward")),
        "verdict": str(line.get("verdict", "")),
        "reason": _text(line.get("reason", ""), _MAX_REASON_CHARS),
        "parts": {str(name): _number(value) for name, value in parts.items()}
        if isinstance(parts, dict)
        else {},
        "finish": str(line.get("finish", "")),
        "versions": _versions(line),
        "difficulty": _number(line.get("difficulty")),
        "length": _count(line.get("num_tokens")),
        "tokens": None if tokens is None else _tokens(tokens),
    }


def _tokens(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """As the run wrote them: texts, log-probs and clips of the tokens kept, aligned to each other."""
    pieces, gap = line.get("tokens"), line.get("left_out")
    if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
        return None
    found = {name: _column(line.get(name), len(pieces)) for name in _COLUMNS}
    is_gap = isinstance(gap, list) and len(gap) == 2 and None not in map(_count, gap)
    return {
        "tokens": pieces,
        **found,
        "left_out": gap if is_gap else None,
        "advantage": _number(line.get("advantage")),
    }


def _column(values: Any, length: int) -> list[float | None] | None:
    """A number for each token, null where it was not finite; None for what is not aligned to them."""
    if not isinstance(values, list) or len(values) != length:
        return None
    return [value if is_finite(value) else None for value in values]


def _drop_tokens_beyond(rollouts: Sequence[dict[str, Any]], most: int) -> None:
    """Leave the tokens of the earliest rollouts out where there are too many."""
    left = most
    for rollout in sorted(rollouts, key=lambda rollout: -int(rollout["iteration"])):
        if rollout["tokens"] is not None:
            left -= len(rollout["tokens"]["tokens"])
            if left < 0:
                rollout["tokens"] = None


def _versions(line: Mapping[str, Any]) -> list[list[int | None]]:
    """Tokens and weight version of each part of a response, tokens of a single part null; empty where not known."""
    runs = line.get("version_runs") or [[None, line.get("weight_version")]]
    if not isinstance(runs, list) or not all(isinstance(run, list) and len(run) == 2 for run in runs):
        return []
    found = [[_count(tokens), _count(version)] for tokens, version in runs]
    return [] if any(version is None for _, version in found) else found


def _count(value: Any) -> int | None:
    return int(value) if is_finite(value) and value == int(value) else None


def _number(value: Any) -> float | None:
    return rounded(float(value)) if is_finite(value) else None


def _text(value: Any, most: int = MAX_TEXT_CHARS) -> str:
    """Cut in the middle where a page would drown in it; the end holds the answer."""
    text = str(value)
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
