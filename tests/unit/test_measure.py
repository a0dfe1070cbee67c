"""Pass rates are measured once per problem, whatever interrupts the measurement."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.data.types import Completion, Finish, Prompt
from megatron_rl.errors import DataError, EngineError
from megatron_rl.rewards.math_answer import MathAnswer
from megatron_rl.rollout import measure as module
from megatron_rl.rollout.measure import Sampling, measure_pass_rates
from tests.helpers.tokenizers import CHATML, write_hf_tokenizer

SAMPLING = Sampling(
    model="m", samples=4, temperature=1.0, top_p=1.0, max_tokens=16, max_prompt_tokens=60, seed=1
)
PROMPTS = [
    Prompt(id=f"p{i}", messages=[{"role": "user", "content": f"{i}+0"}], answer=str(i)) for i in range(6)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_hf_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=CHATML))


@pytest.fixture
def grader():
    reward = MathAnswer(workers=1, timeout_s=5.0)
    yield reward
    reward.close()


class Solver:
    """An engine whose policy solves `i+0` in i of 4 samples, told apart by their seeds; dies at call `dies_at`."""

    def __init__(self, tokenizer, *, dies_at=None):
        self.tokenizer, self.dies_at, self.calls, self.requests = tokenizer, dies_at, 0, []

    def generate(self, requests):
        self.calls += 1
        if self.calls == self.dies_at:
            raise EngineError("gone")
        self.requests += requests
        return [self._completion(request) for request in requests]

    def _completion(self, request):
        number = int(self.tokenizer.decode(request.prompt_token_ids).split("user\n")[1].split("+")[0])
        seeds = sorted(
            module.derive_seed(SAMPLING.seed, "measure", f"p{number}", i) for i in range(SAMPLING.samples)
        )
        is_right = seeds.index(request.seed) < number
        text = f"\\boxed{{{number if is_right else 99}}}<|im_end|>"
        ids = self.tokenizer.encode(text)
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), finish=Finish.STOP, weight_version=-1)


def _measure(tmp_path, tokenizer, grader, engine, prompts=PROMPTS, sampling=SAMPLING):
    return measure_pass_rates(
        prompts,
        engine=engine,
        grader=grader,
        tokenizer=tokenizer,
        sampling=sampling,
        file=tmp_path / "measured.jsonl",
        say=lambda text: None,
    )


WANTED = {"p0": 0.0, "p1": 0.25, "p2": 0.5, "p3": 0.75, "p4": 1.0, "p5": 1.0}


def test_a_pass_rate_is_the_share_of_samples_that_the_grader_calls_right(tmp_path, tokenizer, grader):
    assert _measure(tmp_path, tokenizer, grader, Solver(tokenizer)) == WANTED


def test_an_interrupted_measurement_goes_on_and_ends_as_one_that_was_not(
    tmp_path, tokenizer, grader, monkeypatch
):
    monkeypatch.setattr(module, "PROMPTS_AT_ONCE", 2)
    with pytest.raises(EngineError):
        _measure(tmp_path, tokenizer, grader, Solver(tokenizer, dies_at=3))
    file = tmp_path / "measured.jsonl"
    # a kill in the middle of a write
    file.write_bytes(file.read_bytes() + b'{"id": "p4", "ri')
    engine = Solver(tokenizer)
    assert _measure(tmp_path, tokenizer, grader, engine) == WANTED
    assert (engine.calls, len(engine.requests)) == (1, 8)
    assert [json.loads(line).get("id") for line in file.read_text().splitlines()] == [None, *WANTED]


def test_problems_too_long_for_the_policy_have_no_pass_rate(tmp_path, tokenizer, grader):
    long = replace(PROMPTS[0], id="long", messages=[{"role": "user", "content": "1" * 60}])
    engine = Solver(tokenizer)
    assert _measure(tmp_path, tokenizer, grader, engine, [long, PROMPTS[1]]) == {"p1": 0.25}
    assert len(engine.requests) == 4


def test_measurements_of_another_sampling_are_refused(tmp_path, tokenizer, grader):
    _measure(tmp_path, tokenizer, grader, Solver(tokenizer))
    with pytest.raises(DataError, match=r"measured with temperature 1\.0 instead of 0\.5; delete it"):
        _measure(tmp_path, tokenizer, grader, Solver(tokenizer), sampling=replace(SAMPLING, temperature=0.5))


def test_a_file_that_holds_something_else_is_refused(tmp_path, tokenizer, grader):
    (tmp_path / "measured.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match="is no file of measurements"):
        _measure(tmp_path, tokenizer, grader, Solver(tokenizer))
