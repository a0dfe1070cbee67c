"""Rollouts that are made while the trainer works on those before: order, staleness, losses, errors, checkpoints."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from megatron_rl.data.curriculum import CurriculumSampler
from megatron_rl.data.prompts import PromptSet
from megatron_rl.data.types import Completion, Finish, Prompt, RolloutGroup, Verdict
from megatron_rl.errors import CheckpointError, EngineError, LostEngineError, RewardError
from megatron_rl.recipe.algorithm import CorrectionConfig
from megatron_rl.recipe.batch import DynamicSamplingConfig, StragglersConfig
from megatron_rl.recipe.overlap_checks import overlap_problems
from megatron_rl.recipe.stages import AlgorithmConfig, EngineConfig, OptimizerConfig, RlStage, SamplingConfig
from megatron_rl.reshard.placement import Placement
from megatron_rl.rollout.collect import Span
from megatron_rl.rollout.open_groups import OpenGroup
from megatron_rl.train.ahead import RolloutSource, check_separate
from megatron_rl.train.batch_work import BatchWork, Place
from megatron_rl.train.groups import Collected
from megatron_rl.train.kept_rollouts import Kept, rollouts_from_bytes, rollouts_to_bytes
from megatron_rl.train.metrics import Meter
from megatron_rl.train.rl_data import RlData
from tests.helpers.rollouts import group

T = TypeVar("T")
C, W = Verdict.CORRECT, Verdict.WRONG
PATIENCE_S = 20.0
STAGE = RlStage(
    kind="rl", prompts="p.jsonl", rewards={"math_answer": 1.0}, iterations=9, prompts_per_iteration=2, group_size=2,
    tokens_per_microbatch=64, sampling=SamplingConfig(max_prompt_tokens=8, max_response_tokens=10),
    optimizer=OptimizerConfig(lr=1e-3), overlap="one_step",
)  # fmt: skip


class Machine:
    """Engines in this process, and a session's view of them: `sample` answers at once, by the version at hand."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.restarts = 0
        self.asked: list[tuple[int, list[str], int]] = []  # iteration, prompts, version
        self.faults: list[Exception | None] = []  # of the next calls, one each
        self.gate = threading.Event()  # nobody is answered before it is set
        self.gate.set()
        self.verdicts: Callable[[str], Sequence[Verdict]] = lambda name: [C, W]

    def push(self) -> dict[str, float]:
        self.versions.append(len(self.versions) * 2)
        return {"sync/bytes": 1.0}

    def ask(self, work: Callable[[], T] | None) -> T:
        assert work is not None
        return work()

    def restart(self, error: Exception) -> None:
        self.restarts += 1

    def num_fresh(self, tally: Counter[str]) -> int:
        return STAGE.prompts_per_iteration

    def sample(
        self, prompts: Sequence[Prompt], iteration: int, span: Span, tally: Counter[str]
    ) -> list[RolloutGroup]:
        with span("generate"):
            assert self.gate.wait(PATIENCE_S)
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        self.asked.append((iteration, [prompt.id for prompt in prompts], self.versions[-1]))
        return [self._group(prompt) for prompt in prompts]

    def _group(self, prompt: Prompt) -> RolloutGroup:
        made = group(prompt.id, self.verdicts(prompt.id))
        rollouts = [
            replace(
                r,
                prompt=prompt,
                prompt_token_ids=(1, 2),
                completion=replace(r.completion, weight_version=self.versions[-1]),
            )
            for r in made.rollouts
        ]
        return RolloutGroup(prompt=prompt, rollouts=rollouts)


def data(num_prompts: int = 40) -> RlData:
    prompts = [Prompt(id=f"p{i}", messages=[], answer="1", meta={"i": i}) for i in range(num_prompts)]
    ids = {prompt.id: (1, 2) for prompt in prompts}
    return RlData(
        prompts=PromptSet(prompts=prompts, token_ids=ids, dropped={}),
        eval_sets={},
        sampler=CurriculumSampler(prompts, (), 1),
    )


def source(
    machine: Machine, held: RlData, *, stage: RlStage = STAGE, kept: Kept | None = None
) -> RolloutSource:
    def new_work(place: Place, kept: Kept | None) -> BatchWork:
        return BatchWork(place, stage, held, machine, rounds=() if kept is None else kept.rounds)

    return RolloutSource(machine, new_work, is_ahead=stage.overlap == "one_step", group=None, kept=kept)


def at(iteration: int, skipped: int = 0) -> Place:
    return Place(iteration=iteration, planned=iteration + skipped)


def run(
    machine: Machine, rollouts: RolloutSource, iterations: range, *, last: int
) -> list[tuple[Collected, dict[str, float]]]:
    """Iterations as the loop makes them, without training; a transfer after each."""
    seen = []
    for iteration in iterations:
        meter = Meter()
        following = at(iteration + 1) if iteration + 1 < last else None
        collected = rollouts.take(at(iteration), following=following, meter=meter)
        metrics = rollouts.settle(meter, machine.push)
        machine.push()
        seen.append((collected, metrics | meter.metrics()))
    return seen


def names(collected: Collected) -> list[str]:
    return [one.prompt.id for one in collected.groups]


def versions(collected: Collected) -> set[int]:
    return {r.completion.weight_version for one in collected.groups for r in one.rollouts}


def started() -> Machine:
    machine = Machine()
    machine.push()
    return machine


def test_every_batch_but_the_first_is_one_transfer_old_and_none_is_made_beyond_the_last() -> None:
    machine = started()
    seen = run(machine, source(machine, data()), range(4), last=4)
    assert [versions(collected) for collected, _ in seen] == [{0}, {0}, {2}, {4}]
    assert [collected.metrics["rollout/staleness_mean"] for collected, _ in seen] == [0, 1, 1, 1]
    assert [collected.metrics["rollout/staleness_max"] for collected, _ in seen] == [0, 1, 1, 1]
    assert [iteration for iteration, _, _ in machine.asked] == [0, 1, 2, 3]


def test_both_ways_draw_the_same_prompts_for_the_same_iterations() -> None:
    machine, other = started(), started()
    ahead = run(machine, source(machine, data()), range(4), last=4)
    on_the_spot = run(other, source(other, data(), stage=replace(STAGE, overlap="none")), range(4), last=4)
    assert [names(c) for c, _ in ahead] == [names(c) for c, _ in on_the_spot]
    assert [versions(c) for c, _ in on_the_spot] == [{0}, {2}, {4}, {6}]
    assert [c.metrics["rollout/staleness_max"] for c, _ in on_the_spot] == [0, 0, 0, 0]
    assert not any("time/wait_s" in metrics for _, metrics in on_the_spot)


def test_the_trainer_works_while_the_next_batch_is_made() -> None:
    """The engines answer only once training began: would one wait for the other, neither would go on."""
    machine = started()
    rollouts = source(machine, data())
    run(machine, rollouts, range(1), last=9)
    machine.gate.clear()
    meter = Meter()
    collected = rollouts.take(at(1), following=at(2), meter=meter)
    assert len(collected.kept) == 2 and rollouts.ready is None
    with meter.span("train"):
        assert [iteration for iteration, _, _ in machine.asked] == [0, 1]
        machine.gate.set()
    metrics = rollouts.settle(meter, machine.push)
    assert [iteration for iteration, _, _ in machine.asked] == [0, 1, 2] and rollouts.ready is not None
    assert metrics["overlap/hidden_s"] > 0 and metrics["overlap/generate_s"] > 0


def test_a_loss_costs_the_round_at_hand_which_is_made_with_the_new_weights() -> None:
    machine = started()
    refill = DynamicSamplingConfig(kind="refill", generate_prompts=2, max_rounds=3)
    rollouts = source(machine, data(), stage=replace(STAGE, dynamic_sampling=refill))
    # the first round of the second batch teaches nothing, and its second is lost
    machine.verdicts = lambda name: [C, C] if len(machine.asked) == 2 else [C, W]
    machine.faults = [None, None, LostEngineError("engine replica 0: died")]
    (_, metrics), (collected, _) = run(machine, rollouts, range(2), last=2)
    assert machine.restarts == 1 and metrics["sync/bytes"] == 1.0
    assert [(iteration, version) for iteration, _, version in machine.asked] == [(0, 0), (1, 0), (1, 2)]
    assert versions(collected) == {0, 2}
    # this loop transfers once more than after the loss: versions 0, 2 and 4
    assert collected.metrics["rollout/staleness_max"] == 2 and collected.metrics["sampling/rounds"] == 2
    assert len(set(names(collected))) == 4


@pytest.mark.parametrize(
    "error", [RewardError("grader: cannot start"), EngineError("engine: stale"), ValueError("bug")]
)
def test_what_ends_the_thread_is_raised_once_where_it_is_waited_for(error: Exception) -> None:
    machine = started()
    rollouts = source(machine, data())
    machine.faults = [None, error]
    rollouts.take(at(0), following=at(1), meter=Meter())
    with pytest.raises(type(error), match=str(error)):
        rollouts.settle(Meter(), machine.push)
    rollouts.close()


def test_a_batch_of_a_window_that_ended_meanwhile_is_dropped_counted_and_drawn_again() -> None:
    machine = started()
    rollouts = source(machine, data())
    run(machine, rollouts, range(1), last=9)
    # a rule skipped the rest of the window: iteration 1 is number 4 of the plan
    collected = rollouts.take(at(1, skipped=3), following=None, meter=Meter())
    assert collected.counts["dropped_ahead"] == 2
    assert versions(collected) == {2} and collected.metrics["rollout/staleness_max"] == 0
    assert set(names(collected)).isdisjoint(machine.asked[1][1])


def test_a_batch_from_a_checkpoint_is_the_one_that_was_made_to_the_last_bit() -> None:
    machine, held = started(), data()
    rollouts = source(machine, held)
    run(machine, rollouts, range(2), last=9)
    assert rollouts.ready is not None
    content, state = rollouts_to_bytes(rollouts.ready, machine.versions), held.sampler.state_dict()
    want = rollouts.take(at(2), following=at(3), meter=Meter())
    rollouts.settle(Meter(), machine.push)

    fresh, again = Machine(), data()
    again.sampler.load_state_dict(state)
    by_id = {prompt.id: prompt for prompt in again.prompts.prompts}
    kept = rollouts_from_bytes(content, by_id, again.prompts.token_ids, where=Path("kept.json"))
    fresh.versions = [*kept.versions]
    resumed = source(fresh, again, kept=kept)
    got = resumed.take(at(2), following=at(3), meter=Meter())
    resumed.settle(Meter(), fresh.push)
    assert got == want and fresh.asked == machine.asked[3:]


def test_numbers_and_texts_of_a_kept_batch_survive_as_they_are() -> None:
    machine, held = started(), data()
    work = BatchWork(at(3), STAGE, held, machine)
    work(Meter().span)
    odd = Completion(
        token_ids=[1, 2, 3],
        logprobs=[-0.1 - 0.2, -1e-300, float("-inf")],
        finish=work.rounds[0][0].rollouts[0].completion.finish,
        weight_version=0,
    )
    changed = replace(work.rounds[0][0].rollouts[0], completion=odd, text="\ud800 \u2028 é")
    work.rounds[0] = [RolloutGroup(prompt=changed.prompt, rollouts=[changed]), *work.rounds[0][1:]]
    by_id = {prompt.id: prompt for prompt in held.prompts.prompts}
    first, second = held.prompts.prompts[:2]
    cut = replace(odd, finish=Finish.ABORT, weight_version=0, version_runs=((2, 0), (1, 4)))
    late = [OpenGroup(prompt=p, prompt_token_ids=(1, 2), parts=(cut, None)) for p in (first, second)]
    content = rollouts_to_bytes(work, [0, 4], late)
    kept = rollouts_from_bytes(content, by_id, held.prompts.token_ids, where=Path("k"))
    assert kept == Kept(place=at(3), rounds=work.rounds, tally={}, versions=[0, 4], open_groups=late)


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"rounds": [[{"prompt": "gone", "rollouts": []}]]}'])
def test_what_another_program_or_other_data_wrote_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^kept\.json: does not hold rollouts of this stage's prompts"):
        rollouts_from_bytes(content, {}, {}, where=Path("kept.json"))


def test_a_gpu_that_trainer_and_engine_share_is_refused_by_number_and_none_on_cpus() -> None:
    check_separate(Placement.one_node(2, 2))
    check_separate(Placement.packed(2, 2, per_node=2))
    with pytest.raises(EngineError, match="share GPU 0 of machine 0, 1 of machine 0, and"):
        check_separate(Placement.packed(2, 2, colocated=True))


_BOTH = ["stragglers.groups", "stragglers.max_staleness"]


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        ({}, ["algorithm.correction"]),
        ({"correction": {"kind": "token_tis"}}, []),
        ({"correction": {"old": "rollout"}}, []),
        ({"correction": {"old": "rollout"}, "transport": "shared"}, ["overlap"]),
        ({"overlap": "none", "transport": "shared"}, []),
        ({"overlap": "partial", "correction": {"old": "rollout"}}, ["stragglers"]),
        ({"overlap": "partial", "correction": {"old": "rollout"}, "stragglers": {"groups": 0.5}}, []),
        ({"overlap": "none", "stragglers": {"groups": 1.0, "max_staleness": 2}}, _BOTH),
        ({"overlap": "none", "stragglers": {"groups": 0.0}}, _BOTH[:1]),
        # of four groups all, and one for two updates
        ({"overlap": "none", "stragglers": {"groups": 0.76}}, _BOTH[:1]),
        ({"overlap": "none", "stragglers": {"groups": 0.25}, "updates_per_rollout": 2}, _BOTH[:1]),
        (
            {
                "overlap": "partial",
                "correction": {"kind": "icepop"},
                "stragglers": {"groups": 0.5, "max_staleness": 1},
            },
            _BOTH[1:],
        ),
    ],
    ids=str,
)
def test_check_wants_older_rollouts_accounted_for_and_engines_that_need_not_stop(
    changes: dict[str, Any], paths: list[str]
) -> None:
    algorithm = AlgorithmConfig(correction=CorrectionConfig(**changes.get("correction", {})))
    engine = EngineConfig(transport=changes.get("transport", "auto"))
    late = StragglersConfig(**changes["stragglers"]) if "stragglers" in changes else None
    stage = replace(
        STAGE,
        algorithm=algorithm,
        engine=engine,
        overlap=changes.get("overlap", "one_step"),
        stragglers=late,
        updates_per_rollout=changes.get("updates_per_rollout", 1),
    )
    assert [one.path for one in overlap_problems(stage, "s")] == [f"s.{path}" for path in paths]
