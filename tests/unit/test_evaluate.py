"""One evaluation: its seeds, its fixed denominator, what is recorded of each problem, and what becomes of it."""

from __future__ import annotations

import json
import math

import pytest

from megatron_rl.data.prompts import PromptSet
from megatron_rl.data.types import Completion, Finish, Prompt, Rollout, RolloutGroup
from megatron_rl.errors import EngineError, LostEngineError
from megatron_rl.evaluation.engines import LastingEngine
from megatron_rl.evaluation.evaluate import EvalPlan, evaluate, problems_per_call
from megatron_rl.evaluation.result import EvalProblem, EvalResult
from megatron_rl.evaluation.samples_file import SamplesFile
from megatron_rl.evaluation.stamp import file_digest, weights_digest
from megatron_rl.evaluation.table import results_text
from megatron_rl.rewards.combine import RewardModel
from megatron_rl.rewards.protocol import RewardInput

TEXTS = ("\\boxed{4}", "\\boxed{04}", "\\boxed{5}", "none")


def problem_set(count):
    prompts = tuple(
        Prompt(id=f"p{i}", messages=[{"role": "user", "content": f"2+2 ({i})"}], answer="4", difficulty=i % 2)
        for i in range(count)
    )
    return PromptSet(
        prompts=prompts, token_ids={prompt.id: (1, i) for i, prompt in enumerate(prompts)}, dropped={}
    )


def plan(**changes):
    values = {
        "samples": 4, "run_seed": 7, "max_tokens": 16, "temperature": 1.0, "pass_at": (1, 2),
        "problems_per_call": 2, **changes,
    }  # fmt: skip
    return EvalPlan(**values)


def sampled(prompt, draw, grader, *, finish=Finish.STOP, samples=None):
    """A group as a collector gives it; every problem gets the same texts."""
    texts = TEXTS[: draw.samples if samples is None else samples]
    rewards = grader.grade([RewardInput(answer=prompt.answer, text=text) for text in texts])
    return RolloutGroup(
        prompt=prompt,
        rollouts=[
            Rollout(
                prompt=prompt,
                prompt_token_ids=[1],
                sample_index=i,
                text=text,
                reward=reward,
                completion=Completion(
                    token_ids=[1] * (i + 1), logprobs=[0.0] * (i + 1), finish=finish, weight_version=-1
                ),
            )
            for i, (text, reward) in enumerate(zip(texts, rewards, strict=True))
        ],
    )


@pytest.fixture(scope="module")
def grader():
    with RewardModel({"math_answer": 1.0}, workers=1, timeout_s=20.0) as model:
        yield model


def test_an_evaluation_records_every_problem_and_its_numbers_follow(grader):
    calls, arrived = [], []

    def collect(prompts, token_ids, draw):
        calls.append([prompt.id for prompt in prompts])
        return [sampled(prompt, draw, grader) for prompt in prompts]

    result = evaluate(
        "s", problem_set(3), plan(), collect=collect, grader=grader, weight_version=3, arrived=arrived.extend
    )
    assert calls == [["p0", "p1"], ["p2"]]
    assert [group.prompt.id for group in arrived] == ["p0", "p1", "p2"]
    assert result.problems[1] == EvalProblem(
        id="p1",
        difficulty=1,
        num_correct=2,
        num_samples=4,
        verdicts={"correct": 2, "wrong": 1, "no_answer": 1},
        answer_classes=(2, 1),
        consensus=1.0,
        response_tokens=(1, 2, 3, 4),
    )
    metrics = result.metrics()
    assert metrics == {
        "eval/s/avg_at_k": 0.5,
        "eval/s/stderr": 0.0,
        "eval/s/pass_at_1": pytest.approx(0.5),
        "eval/s/pass_at_2": pytest.approx(5 / 6),
        "eval/s/cons_at_k": 1.0,
        "eval/s/truncated_frac": 0.0,
        "eval/s/no_answer_frac": 0.25,
        "eval/s/ungraded_frac": 0.0,
        "eval/s/response_tokens_mean": 2.5,
        "eval/s/response_tokens_p50": 2.0,
        "eval/s/response_tokens_p95": 4.0,
    }
    assert EvalResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_seeds_depend_on_run_set_problem_and_sample_alone():
    seed = plan().draw("s").seed
    assert plan(samples=2, temperature=0.5, max_tokens=99).draw("s").seed("p1", 0) == seed("p1", 0)
    others = [
        seed("p1", 1),
        seed("p2", 0),
        plan().draw("t").seed("p1", 0),
        plan(run_seed=8).draw("s").seed("p1", 0),
    ]
    assert len({seed("p1", 0), *others}) == 5


@pytest.mark.parametrize("fault", [{"finish": Finish.ABORT}, {"samples": 3}], ids=["aborted", "missing"])
def test_a_missing_sample_is_asked_for_again_and_then_an_error_never_a_smaller_n(grader, fault):
    calls = []

    def collect_late(prompts, token_ids, draw):
        calls.append(len(prompts))
        return [sampled(prompt, draw, grader, **(fault if len(calls) == 1 else {})) for prompt in prompts]

    result = evaluate("s", problem_set(2), plan(), collect=collect_late, grader=grader)
    assert (calls, result.num_samples) == ([2, 2], 8)

    def collect_never(prompts, token_ids, draw):
        return [sampled(prompt, draw, grader, **fault) for prompt in prompts]

    with pytest.raises(
        EngineError, match=r"eval s: samples of 2 problems did not arrive \(the first is .*'p0'\)"
    ):
        evaluate("s", problem_set(2), plan(), collect=collect_never, grader=grader)


class TwoReplicas:
    """As much of an engine as a restart asks for: replica 1 is lost, and `failures` restarts of it do not succeed."""

    def __init__(self, failures=0):
        self.failures, self.is_lost, self.restarted = failures, False, []

    def generate(self, requests):
        if self.is_lost:
            raise LostEngineError("engine replica 1: died (signal SIGKILL) while generate; log x")
        return [request * 10 for request in requests]

    def find_lost(self):
        return {1: "engine replica 1: died (signal SIGKILL) while generate; log x"} if self.is_lost else {}

    def restart(self, replicas):
        self.restarted.append(list(replicas))
        if self.failures:
            self.failures -= 1
            raise EngineError("engine replica 1: did not start")
        self.is_lost = False


def test_a_lost_engine_is_started_again_and_asked_again():
    engine, said = TwoReplicas(failures=1), []
    lasting = LastingEngine(engine, restarts=2, say=said.append)
    assert lasting.ask(lambda: engine.generate([1])) == [10]
    engine.is_lost = True
    assert lasting.ask(lambda: engine.generate([1, 2])) == [10, 20]
    assert (engine.restarted, lasting.num_restarts) == ([[1], [1]], 2)
    assert said[0].startswith("engine replica 1: died (signal SIGKILL) while generate: started again in")
    engine.is_lost = True
    with pytest.raises(LostEngineError, match=r"replica 1: died .*\n--restarts: 2 of 2 were used"):
        lasting.ask(lambda: engine.generate([1]))


def test_an_error_that_no_restart_mends_is_passed_on():
    def refuse():
        raise EngineError("request 3 does not fit")

    with pytest.raises(EngineError, match="request 3 does not fit"):
        LastingEngine(TwoReplicas(), restarts=2, say=print).ask(refuse)


def test_a_call_fills_the_engines_a_few_times_and_holds_at_least_one_problem():
    assert problems_per_call(samples=4, max_concurrent=256, replicas=1) == 256
    assert problems_per_call(samples=64, max_concurrent=256, replicas=8) == 128
    assert problems_per_call(samples=5000, max_concurrent=256, replicas=1) == 1


def test_lines_of_runs_from_before_there_were_votes_can_be_read():
    problem = {"id": "a", "difficulty": 2.0, "num_correct": 1, "num_samples": 4, "num_truncated": 1}
    line = {
        "set": "s",
        "iteration": 3,
        "k": 4,
        "avg_at_k": 0.25,
        "weight_version": 9,
        "problems": [problem] * 2,
    }
    result = EvalResult.from_json(line)
    assert result.avg_at_k == 0.25
    assert set(result.metrics()) == {"eval/s/avg_at_k", "eval/s/stderr", "eval/s/truncated_frac"}


def problem(name, num_correct, *, difficulty=None, consensus=None):
    return EvalProblem(
        id=name, num_correct=num_correct, num_samples=4, difficulty=difficulty, consensus=consensus
    )


def test_a_vote_that_some_problems_lack_is_no_number():
    problems = (problem("a", 1, consensus=1.0), problem("b", 1))
    result = EvalResult(name="s", iteration=0, samples=4, problems=problems)
    assert list(result.estimates()) == ["avg_at_k"]


def test_the_table_names_each_number_with_its_error_and_parts_difficulties():
    problems = (problem("a", 4, difficulty=1, consensus=1.0), problem("b", 1, difficulty=2, consensus=0.0))
    hard = EvalResult(name="hard", iteration=0, samples=4, pass_at=(2,), problems=problems)
    single = EvalResult(name="single", iteration=0, samples=4, problems=(problem("a", 2),))
    rows = [line.split() for line in results_text([hard, single]).splitlines()]
    assert ["hard", "single"] in rows
    assert ["avg@4", "62.5", "±", "37.5", "%", "50.0", "%"] in rows
    assert ["pass@2", "75.0", "±", "25.0", "%", "-"] in rows
    assert ["cons@4", "50.0", "±", "50.0", "%", "-"] in rows
    title = rows.index(["hard:", "by", "difficulty", "problems", "avg@4"])
    assert rows[title - 1] == []
    assert ["1", "1", "100.0", "%"] in rows
    assert not any(row[:2] == ["single:", "by"] for row in rows)


def test_samples_are_published_when_complete_and_gone_after_an_error(tmp_path, grader):
    groups = [sampled(prompt, plan().draw("s"), grader) for prompt in problem_set(2).prompts]
    seed = plan().draw("s").seed
    with SamplesFile(tmp_path / "samples.jsonl") as file:
        file.write("s", groups, seed)
        assert not (tmp_path / "samples.jsonl").exists()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["id"], line["sample"]) for line in lines] == [
        (f"p{i}", j) for i in range(2) for j in range(4)
    ]
    assert (lines[5]["seed"], lines[5]["verdict"], lines[5]["response"]) == (
        seed("p1", 1),
        "correct",
        TEXTS[1],
    )
    with pytest.raises(KeyboardInterrupt), SamplesFile(tmp_path / "other.jsonl") as file:
        file.write("s", groups, seed)
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_digest_of_weights_sees_every_byte_and_name_and_nothing_else(tmp_path):
    def write(name, **files):
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file.replace("__", ".")).write_bytes(content)
        return weights_digest(tmp_path / name)

    one = write("a", a__safetensors=b"12", b__safetensors=b"3")
    assert write("b", a__safetensors=b"12", b__safetensors=b"3", config__json=b"{}") == one
    assert write("c", a__safetensors=b"1", b__safetensors=b"23") != one
    assert write("d", a__safetensors=b"12", c__safetensors=b"3") != one
    # echo -n 12 | sha256sum
    assert file_digest(tmp_path / "a" / "a.safetensors").startswith("6b51d431df5d7f141cbececcf79edf3d")


def test_one_problem_has_no_error_in_the_table_nor_in_the_metrics():
    result = EvalResult(name="s", iteration=0, samples=4, problems=(problem("a", 1),))
    assert "eval/s/stderr" not in result.metrics()
    assert math.isnan(result.overall().stderr)
    assert "±" not in results_text([result])
