"""The task reward for programming problems: the share of tests that the program of a response passes.

Programs run in sandboxes (`rewards.sandbox`); every comparison with an expected output happens here, outside.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.types import Verdict
from megatron_rl.recipe.sandbox import SandboxConfig
from megatron_rl.rewards.code_compare import read_record, same_json, same_output
from megatron_rl.rewards.code_gold import BadGold, CodeGold, CodeTest, choose_tests, read_gold
from megatron_rl.rewards.code_program import extract_program
from megatron_rl.rewards.protocol import Grade, RewardInput
from megatron_rl.rewards.sandbox.client import Sandbox, Settings
from megatron_rl.rewards.sandbox.jobs import Job, JobKind, Limits, Outcome, Status
from megatron_rl.rewards.sandbox.selftest import check_isolation


class TestVerdict(enum.Enum):
    """Of one program on one test."""

    __test__ = False  # pytest would collect it by its name

    PASSED = "passed"
    WRONG = "wrong"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    NO_PROGRAM = "no_program"
    SANDBOX_ERROR = "sandbox_error"  # ours, after retries: says nothing about the program
    BROKEN_TEST = "broken_test"  # the data set's


@dataclass(frozen=True, kw_only=True, slots=True)
class TestResult:
    __test__ = False

    verdict: TestVerdict
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Work:
    """A program and its tests."""

    program: str
    tests: tuple[CodeTest, ...]
    limits: Limits

    def key(self) -> tuple[object, ...]:
        """Equal for the same program on the very same tests of a batch, which run once."""
        return (self.program, self.limits, *map(id, self.tests))


class CodeTests:
    """passed / tests, with CORRECT only where all pass; `answer` as `code_gold.read_gold` takes it.

    BAD_GOLD for tests that cannot be run or prove nothing, ERROR where the sandbox itself failed three times.
    """

    def __init__(self, config: SandboxConfig) -> None:
        """Starts the sandbox and tries it. Raises RewardError where programs would not be confined."""
        self._max_tests = config.max_tests
        self._limits = Limits(
            wall_s=config.wall_s,
            cpu_s=config.cpu_s or config.wall_s,
            memory_mib=config.memory_mib,
            output_mib=config.output_mib,
            tmp_mib=config.tmp_mib,
            processes=config.processes,
        )
        self._sandbox = Sandbox(
            Settings(
                slots=config.slots,
                first_uid=config.first_uid,
                python=config.python,
                allow_weak=config.allow_weak,
            )
        )
        try:
            self.notice = check_isolation(self._sandbox, allow_weak=config.allow_weak)
        except BaseException:
            self._sandbox.close()
            raise

    def grade(self, inputs: Sequence[RewardInput]) -> list[Grade]:
        """One grade per input, in order. Raises RewardError only if the sandbox cannot be started again."""
        golds: dict[int, CodeGold | BadGold] = {}
        drafts: list[_Work | Grade] = []
        for item in inputs:
            # the responses of a group share one object
            if id(item.answer) not in golds:
                golds[id(item.answer)] = _gold_or_fault(item.answer)
            drafts.append(self._draft(item, golds[id(item.answer)]))
        work = {draft.key(): draft for draft in drafts if isinstance(draft, _Work)}
        results = dict(zip(work, self._run(list(work.values())), strict=True))
        return [draft if isinstance(draft, Grade) else combine(results[draft.key()]) for draft in drafts]

    @property
    def num_restarts(self) -> int:
        return self._sandbox.num_restarts

    def close(self) -> None:
        self._sandbox.close()

    def _draft(self, item: RewardInput, gold: CodeGold | BadGold) -> _Work | Grade:
        if isinstance(gold, BadGold):
            return Grade(score=0.0, verdict=Verdict.BAD_GOLD, reason=str(gold))
        tests = gold.tests
        if not item.every_test:
            tests = choose_tests(gold, prompt_id=item.prompt_id, max_tests=self._max_tests)
        program = extract_program(item.text)
        if program is None:
            reason = f"{TestVerdict.NO_PROGRAM.value}: passed 0 of {len(tests)}"
            verdict = Verdict.TRUNCATED if item.finish.is_truncated() else Verdict.NO_ANSWER
            return Grade(score=0.0, verdict=verdict, reason=reason)
        return _Work(program, tuple(tests), gold.limits_over(self._limits))

    def _run(self, work: Sequence[_Work]) -> list[list[TestResult]]:
        jobs = [
            Job(
                id=0,
                kind=test.kind,
                program=one.program.encode("utf-8", "surrogatepass"),
                payload=test.payload,
                limits=one.limits,
            )
            for one in work
            for test in one.tests
        ]
        outcomes = iter(self._sandbox.run(jobs))
        return [[judge(test, next(outcomes)) for test in one.tests] for one in work]


def judge(test: CodeTest, outcome: Outcome) -> TestResult:
    """What one run says about one test."""
    verdict, detail = _judge(test, outcome)
    return TestResult(verdict=verdict, detail=detail, seconds=outcome.seconds)


def combine(results: Sequence[TestResult]) -> Grade:
    """k / N with both in the reason. A test that nobody could run makes no score: the prompt says nothing then."""
    counts = Counter(result.verdict for result in results)
    passed, total = counts[TestVerdict.PASSED], len(results)
    failed = [(verdict, counts[verdict]) for verdict in TestVerdict if verdict is not TestVerdict.PASSED]
    parts = [f"{verdict.value} {count}" for verdict, count in failed if count]
    first = next((r.detail for r in results if r.verdict is not TestVerdict.PASSED and r.detail), "")
    reason = f"passed {passed} of {total}" + (f": {', '.join(parts)}" if parts else "")
    reason += f" (first: {first[:200]})" if first else ""
    seconds = sum(result.seconds for result in results)
    for verdict, whole in (
        (TestVerdict.BROKEN_TEST, Verdict.BAD_GOLD),
        (TestVerdict.SANDBOX_ERROR, Verdict.ERROR),
    ):
        if counts[verdict]:
            return Grade(score=0.0, verdict=whole, reason=reason, seconds=seconds)
    return Grade(
        score=passed / total,
        verdict=Verdict.CORRECT if passed == total else Verdict.WRONG,
        reason=reason,
        seconds=seconds,
    )


_BY_STATUS = {
    Status.RUNTIME_ERROR: TestVerdict.RUNTIME_ERROR,
    Status.TIMEOUT: TestVerdict.TIMEOUT,
    Status.MEMORY: TestVerdict.MEMORY,
    Status.OUTPUT_LIMIT: TestVerdict.OUTPUT_LIMIT,
    Status.SANDBOX_ERROR: TestVerdict.SANDBOX_ERROR,
}


def _judge(test: CodeTest, outcome: Outcome) -> tuple[TestVerdict, str]:
    if outcome.status in _BY_STATUS:
        return _BY_STATUS[outcome.status], outcome.detail
    if test.kind is JobKind.STDIN:
        is_same = same_output(outcome.output, test.expected)
        return (TestVerdict.PASSED, "") if is_same else (TestVerdict.WRONG, "")
    if test.kind is JobKind.ASSERT:
        return _judge_assertion(outcome.output)
    found, value = read_record(outcome.output)
    if found == "raised":
        return TestVerdict.RUNTIME_ERROR, value
    if found == "none":
        return TestVerdict.WRONG, value
    return (TestVerdict.PASSED, "") if same_json(value, test.expected) else (TestVerdict.WRONG, "")


def _judge_assertion(record: bytes) -> tuple[TestVerdict, str]:
    """The record comes from the checker's sandbox, which the candidate cannot reach."""
    try:
        said = json.loads(record)
    except ValueError:
        return TestVerdict.WRONG, "the checker said nothing"
    if said == {"passed": True}:
        return TestVerdict.PASSED, ""
    if "broken" in said:
        return TestVerdict.BROKEN_TEST, f"the test needs what is not supported: {said['broken']}"
    return TestVerdict.WRONG, str(said.get("failed"))


def _gold_or_fault(answer: Any) -> CodeGold | BadGold:
    try:
        return read_gold(answer)
    except BadGold as fault:
        return fault
