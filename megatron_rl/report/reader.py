"""Which rollouts a report holds, and how much of each: a page has to stay one that a browser opens at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.report.heat import read_some, rollout_files
from megatron_rl.report.series import is_finite, rounded, spread
from megatron_rl.report.source import Source
from megatron_rl.train.records import TOKENS_PREFIX

MAX_ROLLOUTS = 400  # of all runs together
MAX_ITERATIONS = 16  # of each run
MAX_TEXT_CHARS = 24_000  # of a prompt, of a completion, of a gold; the middle is left out
MAX_TOKENS = 120_000  # shown one by one, of all runs together
_MAX_BYTES = 16 * 2**20  # read of one file
_MAX_REASON_CHARS = 2_000
_BOUND = f"a page holds at most {MAX_ROLLOUTS:,} rollouts and {MAX_TOKENS:,} of their tokens one by one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The rollouts of a report as plain JSON values, and in words how many that is of what was written."""

    rollouts: list[dict[str, Any]]
    note: str


def choose_rollouts(sources: Sequence[Source], *, most: int = MAX_ROLLOUTS) -> Reading:
    """Evenly spread iterations, the latest among them; in each first those with tokens, then a spread of the rest."""
    found: list[dict[str, Any]] = []
    notes = []
    for number, source in enumerate(sources):
        folder = source.run.run_dir / "rollouts"
        files = rollout_files(folder)
        chosen = [files[index] for index in spread(len(files), MAX_ITERATIONS)]
        share = max(1, most // len(sources) // max(1, len(chosen)))
        of_run = [
            _rollout(line, tokens, number, iteration)
            for iteration, path in chosen
            for line, tokens in _of_iteration(path, folder, iteration, share)
        ]
        found += of_run
        where = f"{source.name}: " if len(sources) > 1 else ""
        notes.append(f"{where}{len(of_run)} rollouts of {len(chosen)} of {len(files)} iterations")
    _drop_tokens_beyond(found, MAX_TOKENS)
    return Reading(rollouts=found, note=f"{'; '.join(notes)}, evenly spread; {_BOUND}")


def _of_iteration(
    path: Path, folder: Path, iteration: int, share: int
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    tokens = {
        _key(line): line for line in read_some(folder / f"{TOKENS_PREFIX}{iteration:06d}.jsonl", _MAX_BYTES)
    }
    lines = read_some(path, _MAX_BYTES)
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


def _key(line: Mapping[str, Any]) -> tuple[Any, Any]:
    return line.get("prompt_id"), line.get("sample_index")


def _rollout(
    line: Mapping[str, Any], tokens: Mapping[str, Any] | None, run: int, iteration: int
) -> dict[str, Any]:
    """Short names: there are many. What an older run did not write is null."""
    parts = line.get("parts")
    return {
        "run": run,
        "iteration": iteration,
        "id": _text(line.get("prompt_id", "")),
        "sample": line.get("sample_index"),
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
        "version": line.get("weight_version"),
        "difficulty": _number(line.get("difficulty")),
        "length": line.get("num_tokens"),
        "tokens": None if tokens is None else _tokens(tokens),
    }


def _tokens(line: Mapping[str, Any]) -> dict[str, Any]:
    """As the run wrote them: texts, log-probs, ratios and clips of the tokens kept, aligned to each other."""
    found = {
        key: line.get(key) for key in ("tokens", "rollout_logprobs", "old_logprobs", "logprobs", "clipped")
    }
    return {**found, "left_out": line.get("left_out"), "advantage": _number(line.get("advantage"))}


def _drop_tokens_beyond(rollouts: Sequence[dict[str, Any]], most: int) -> None:
    """Leave the tokens of the earliest rollouts out where there are too many."""
    left = most
    for rollout in sorted(rollouts, key=lambda rollout: -int(rollout["iteration"])):
        if rollout["tokens"] is not None:
            left -= len(rollout["tokens"]["tokens"] or ())
            if left < 0:
                rollout["tokens"] = None


def _number(value: Any) -> float | None:
    return rounded(float(value)) if is_finite(value) else None


def _text(value: Any, most: int = MAX_TEXT_CHARS) -> str:
    """Cut in the middle where a page would drown in it; the end holds the answer."""
    text = str(value)
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
