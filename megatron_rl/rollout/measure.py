"""Pass rates of problems under a policy, by the engine and the grader of training; goes on where it was stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.data.chat import render_prompt, stop_token_ids
from megatron_rl.data.seeds import derive_seed
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.types import Completion, Prompt
from megatron_rl.errors import DataError
from megatron_rl.rewards.protocol import Reward, RewardInput
from megatron_rl.rollout.engine import GenerateRequest, RolloutEngine

PROMPTS_AT_ONCE = 64  # measured and written together: what a kill costs


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What a pass rate is a function of, beside the problem; a file of measurements belongs to one of them."""

    model: str
    samples: int
    temperature: float
    top_p: float
    max_tokens: int  # of a response
    max_prompt_tokens: int  # longer problems are not measured
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Verdicts of one problem. `graded` leaves out samples of which the grader itself failed."""

    id: str
    right: int
    graded: int
    truncated: int

    @property
    def pass_rate(self) -> float | None:
        return self.right / self.graded if self.graded else None


def measure_pass_rates(
    prompts: Iterable[Prompt],
    *,
    engine: RolloutEngine,
    grader: Reward,
    tokenizer: Tokenizer,
    sampling: Sampling,
    file: Path,
    say: Callable[[str], None],
) -> dict[str, float]:
    """Pass rate by prompt id; every measurement is appended to `file`, and those already there are not repeated.

    Problems too long for the policy, or that the grader could not grade at all, have none. Raises DataError for a file
    that was measured with another sampling.
    """
    known = _read(file, sampling)
    stops = stop_token_ids(tokenizer)
    rates = dict(_rates(known.values()))
    open_prompts = (prompt for prompt in prompts if prompt.id not in known)
    done = len(known)
    if done:
        say(f"measure: {done} problems were measured before ({file})")
    with file.open("ab") as stream:
        if not stream.tell():
            _append(stream, {"sampling": asdict(sampling)})
        while batch := list(islice(open_prompts, PROMPTS_AT_ONCE)):
            fresh = _measure(batch, engine, grader, tokenizer, sampling, stops)
            for one in fresh:
                _append(stream, asdict(one))
            os.fsync(stream.fileno())
            rates |= _rates(fresh)
            done += len(batch)
            right = sum(rates.values()) / max(1, len(rates))
            say(f"measure: {done} problems, mean pass rate {right:.3f}")
    return rates


def _measure(
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    grader: Reward,
    tokenizer: Tokenizer,
    sampling: Sampling,
    stops: Sequence[int],
) -> list[Measured]:
    rendered = {prompt.id: render_prompt(tokenizer, prompt.messages) for prompt in prompts}
    asked = [prompt for prompt in prompts if len(rendered[prompt.id]) <= sampling.max_prompt_tokens]
    completions = engine.generate(
        [
            GenerateRequest(
                prompt_token_ids=rendered[prompt.id],
                seed=derive_seed(sampling.seed, "measure", prompt.id, index),
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop_token_ids=stops,
            )
            for prompt in asked
            for index in range(sampling.samples)
        ]
    )
    grades = grader.grade(
        [
            RewardInput(
                answer=asked[i // sampling.samples].answer,
                text=_text(completion, tokenizer, stops),
                finish=completion.finish,
            )
            for i, completion in enumerate(completions)
        ]
    )
    measured = {prompt.id: Measured(id=prompt.id, right=0, graded=0, truncated=0) for prompt in prompts}
    for i, prompt in enumerate(asked):
        part = slice(i * sampling.samples, (i + 1) * sampling.samples)
        verdicts = [grade.verdict for grade in grades[part] if grade.verdict is not None]
        measured[prompt.id] = Measured(
            id=prompt.id,
            right=sum(verdict.is_correct() for verdict in verdicts),
            graded=sum(verdict.is_usable() for verdict in verdicts),
            truncated=sum(completion.finish.is_truncated() for completion in completions[part]),
        )
    return [measured[prompt.id] for prompt in prompts]


def _text(completion: Completion, tokenizer: Tokenizer, stops: Sequence[int]) -> str:
    ids = list(completion.token_ids)
    if ids and ids[-1] in stops and not completion.finish.is_truncated():
        ids.pop()
    return tokenizer.decode(ids)


def _rates(measured: Iterable[Measured]) -> Iterator[tuple[str, float]]:
    return ((one.id, one.pass_rate) for one in measured if one.pass_rate is not None)


def _read(file: Path, sampling: Sampling) -> dict[str, Measured]:
    """Measurements of an earlier start. What a kill cut off behind the last whole line is removed."""
    if not file.exists():
        return {}
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(file, len(whole))
    try:
        lines: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        if lines and lines[0]["sampling"] != asdict(sampling):
            raise DataError(
                f"{file}: was measured with {_differences(lines[0]['sampling'], asdict(sampling))}; delete it, or "
                "write to another directory"
            )
        return {line["id"]: Measured(**line) for line in lines[1:]}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: is no file of measurements ({error}); delete it") from error


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {was.get(name)} instead of {now[name]}" for name in now if was.get(name) != now[name]
    )


def _append(stream: Any, data: Mapping[str, Any]) -> None:
    stream.write(json.dumps(data).encode() + b"\n")
    stream.flush()
