"""The task reward for problems with one right answer: extract it, compare it exactly, and never hang.

Cheap exact comparisons happen here; what needs algebra goes to a checking process (`rewards.pool`).
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.types import Verdict
from megatron_rl.rewards.cost import expected_cost, too_costly
from megatron_rl.rewards.extract import MAX_ANSWER_CHARS, THINK_CLOSE, extract_answer
from megatron_rl.rewards.labels import without_label
from megatron_rl.rewards.pool import PoolVerdict, WorkerPool
from megatron_rl.rewards.protocol import Grade, RewardInput
from megatron_rl.rewards.rational import read_number
from megatron_rl.rewards.spelling import spell, tokens

# commands that are no answer without what stands beside them
_SAY_NOTHING = {"\\frac", "\\sqrt", "\\binom", "\\overline", "\\ldots", "\\cdot", "\\pm", "\\quad"}
_PLACEHOLDERS = {"nan", "null", "n/a"}  # what tables write where they have no value
_CACHE_ENTRIES = 100_000
# a right answer anywhere wins; else a grader's failure outranks "wrong", so that it is seen
_PRECEDENCE = (Verdict.CORRECT, Verdict.ERROR, Verdict.TIMEOUT, Verdict.BAD_GOLD, Verdict.WRONG)


class MathAnswer:
    """1 for an answer equal to the gold, else 0; the verdict says why.

    Golds: a string, an int, a float, a list of those (any of them is right), or such a list as JSON text.
    An empty or broken gold is BAD_GOLD and never pays. With `requires_reasoning` a response without `</think>` has no
    answer. README.md of this package has the table of verdicts.
    """

    def __init__(
        self,
        *,
        workers: int,
        timeout_s: float,
        batch_timeout_s: float | None = None,
        memory_gib: float = 2.0,
        requires_reasoning: bool = False,
    ) -> None:
        """`batch_timeout_s` bounds one call of `grade`; None: it ends when every answer had its `timeout_s`."""
        self._pool = WorkerPool(workers=workers, timeout_s=timeout_s, memory_gib=memory_gib)
        self._batch_timeout_s = batch_timeout_s
        self._requires_reasoning = requires_reasoning
        self._cache: OrderedDict[tuple[str, str], PoolVerdict] = OrderedDict()
        self._lock = threading.Lock()

    def grade(self, inputs: Sequence[RewardInput]) -> list[Grade]:
        """One grade per input, in order. Raises RewardError only if no checking process can be started."""
        drafts = [_draft(item, requires_reasoning=self._requires_reasoning) for item in inputs]
        open_pairs = list(dict.fromkeys(pair for draft in drafts for pair in draft.open_pairs))
        verdicts = self._check(open_pairs)
        return [_finish(draft, verdicts) for draft in drafts]

    @property
    def num_restarts(self) -> int:
        return self._pool.num_restarts

    def close(self) -> None:
        self._pool.close()

    def _check(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], PoolVerdict]:
        with self._lock:
            known = {pair: self._cache[pair] for pair in pairs if pair in self._cache}
        # cheap ones first: what takes for ever must not use up the time of a batch before the rest is judged
        unknown = sorted((p for p in pairs if p not in known), key=lambda pair: expected_cost(pair[1]))
        fresh = dict(
            zip(unknown, self._pool.check_many(unknown, within_s=self._batch_timeout_s), strict=True)
        )
        with self._lock:
            for pair, verdict in fresh.items():
                # a grader's own failure may not repeat; everything else would
                if verdict.verdict is not Verdict.ERROR:
                    self._cache[pair] = verdict
            while len(self._cache) > _CACHE_ENTRIES:
                self._cache.popitem(last=False)
        return known | fresh


@dataclass(frozen=True, slots=True)
class _Draft:
    """A grade that is settled, or the pairs whose verdicts it still needs."""

    settled: Grade | None = None
    open_pairs: tuple[tuple[str, str], ...] = ()


def _draft(item: RewardInput, *, requires_reasoning: bool) -> _Draft:
    golds = gold_strings(item.answer)
    if not golds:
        shown = repr(item.answer)[:80]
        return _Draft(settled=Grade(score=0.0, verdict=Verdict.BAD_GOLD, reason=f"gold {shown} is no answer"))
    is_missing_reasoning = requires_reasoning and THINK_CLOSE not in item.text
    answer = None if is_missing_reasoning else extract_answer(item.text)
    if answer is None or not answer.strip():
        verdict = Verdict.TRUNCATED if item.finish.is_truncated() else Verdict.NO_ANSWER
        reason = f"no {THINK_CLOSE}" if is_missing_reasoning else "no closed box after the reasoning"
        return _Draft(settled=Grade(score=0.0, verdict=verdict, reason=reason))
    quick = [quick_verdict(gold, answer) for gold in golds]
    if Verdict.CORRECT in quick:
        return _Draft(settled=Grade(score=1.0, verdict=Verdict.CORRECT))
    open_pairs = tuple((gold, answer) for gold, verdict in zip(golds, quick, strict=True) if verdict is None)
    if open_pairs:
        if costly := too_costly(tokens(answer)):
            return _Draft(settled=Grade(score=0.0, verdict=Verdict.TIMEOUT, reason=f"not tried: {costly}"))
        return _Draft(open_pairs=open_pairs)
    return _Draft(settled=Grade(score=0.0, verdict=Verdict.WRONG, reason="not equal"))


def _finish(draft: _Draft, verdicts: dict[tuple[str, str], PoolVerdict]) -> Grade:
    if draft.settled is not None:
        return draft.settled
    found = min((verdicts[pair] for pair in draft.open_pairs), key=lambda one: _PRECEDENCE.index(one.verdict))
    score = 1.0 if found.verdict is Verdict.CORRECT else 0.0
    seconds = sum(verdicts[pair].seconds for pair in draft.open_pairs)
    return Grade(score=score, verdict=found.verdict, reason=found.reason, seconds=seconds)


def gold_strings(answer: Any) -> list[str]:
    """The alternatives that a gold holds, as strings; empty if it, or any of them, is no answer."""
    if isinstance(answer, str):
        decoded = _decode_json(answer)
        if decoded is not None:
            return gold_strings(decoded)
        boxed = extract_answer(answer) if "\\boxed" in answer or "\\fbox" in answer else answer
        return [boxed] if boxed is not None and _is_answer(boxed) else []
    if isinstance(answer, bool):
        return []
    if isinstance(answer, int):
        return [str(answer)] if answer.bit_length() < 4 * MAX_ANSWER_CHARS else []
    if isinstance(answer, float):
        return [repr(answer)] if math.isfinite(answer) else []
    if isinstance(answer, (list, tuple)):
        parts = [[] if isinstance(part, (list, tuple)) else gold_strings(part) for part in answer]
        return [one for part in parts for one in part] if all(parts) else []
    return []


def _decode_json(text: str) -> Any:
    """A JSON list of strings, or a JSON string; None for all else: `[1, 2]` is an interval, not two golds."""
    stripped = text.strip()
    if not (stripped.startswith('["') or stripped.startswith('[ "') or stripped.startswith('"')):
        return None
    try:
        decoded = json.loads(stripped)
    except (ValueError, RecursionError):
        return None
    if isinstance(decoded, str):
        return None if decoded.startswith('"') else decoded
    return decoded if isinstance(decoded, list) and all(isinstance(part, str) for part in decoded) else None


def _is_answer(gold: str) -> bool:
    """Something is written there, and its braces close."""
    depth = 0
    for index, char in enumerate(gold):
        if char in "{}" and (index == 0 or gold[index - 1] != "\\"):
            depth += 1 if char == "{" else -1
            if depth < 0:
                return False
    if depth != 0 or gold.strip().casefold() in _PLACEHOLDERS:
        return False
    return len(gold) > MAX_ANSWER_CHARS or any(_says_something(token) for token in tokens(gold))


def _says_something(token: str) -> bool:
    return token not in _SAY_NOTHING and (token.startswith("\\") or any(char.isalnum() for char in token))


def quick_verdict(gold: str, answer: str) -> Verdict | None:
    """CORRECT or WRONG where spelling or exact rational arithmetic settles it in microseconds; else None."""
    if gold.strip() == answer.strip():
        return Verdict.CORRECT
    if max(len(gold), len(answer)) > MAX_ANSWER_CHARS:
        return Verdict.WRONG
    of_gold, of_answer = without_label(tokens(gold), tokens(answer))
    if not of_answer:
        return Verdict.WRONG
    if spell(of_gold) == spell(of_answer):
        return Verdict.CORRECT
    gold_number, answer_number = read_number(of_gold), read_number(of_answer)
    if gold_number is not None and answer_number is not None:
        return Verdict.CORRECT if gold_number == answer_number else Verdict.WRONG
    return None
