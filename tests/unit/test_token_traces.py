"""Tokens of a few rollouts with what the trainer knew of them: the right numbers, aligned, whatever the layout."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.algo.clipping import clip_flags
from megatron_rl.algo.surrogates import SURROGATES, make_surrogate
from megatron_rl.data.pack import with_old_logprobs
from megatron_rl.data.token_texts import TokenTexts
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.data.types import Verdict
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.stages import AlgorithmConfig, OptimizerConfig, RlStage, SamplingConfig
from megatron_rl.train import token_traces
from megatron_rl.train.token_traces import TokenTraces, choose
from megatron_rl.train.updates import plan_updates
from megatron_rl_kernels.policy_loss import METRICS, policy_loss
from tests.helpers.rollouts import group
from tests.helpers.tokenizers import write_byte_level, write_sentencepiece

C, W = Verdict.CORRECT, Verdict.WRONG
GROUPS = [group(str(i), [C, W, W] if i % 2 else [C, C, W], response_tokens=1 + i) for i in range(4)]
STAGE = RlStage(
    kind="rl", prompts="p.jsonl", rewards={"math_answer": 1.0}, iterations=1, prompts_per_iteration=4,
    group_size=3, updates_per_rollout=2, tokens_per_microbatch=16,
    sampling=SamplingConfig(max_prompt_tokens=4, max_response_tokens=12), optimizer=OptimizerConfig(lr=1e-3),
    algorithm=AlgorithmConfig(),
)  # fmt: skip


def traced(layout, *, count):
    """What the ranks of a layout found together, with log-probs made of sample and position."""
    found = {}
    for rank in range(layout.dp):
        updates = plan_updates(GROUPS, STAGE, layout, dp_rank=rank)
        updates = [
            replace(update, batches=[with_old_logprobs(b, values(update, b, -1.0)) for b in update.batches])
            for update in updates
        ]
        traces = TokenTraces(choose(GROUPS, GROUPS, count))
        for update in updates:
            watch = traces.watch(update)
            for batch in update.batches:
                if watch is not None:
                    watch(batch, values(update, batch, -0.5))
        for name, known in traces.gather(updates, tp_rank=0, pp_rank=0).items():
            assert name not in found, "a rollout is trained on by one rank"
            found[name] = known
        assert traces.gather(updates, tp_rank=1, pp_rank=0) == {}
    return traces, found


def values(update, batch, scale):
    """scale * (100 * sample + position in the sample) at every label of the batch."""
    out = torch.full((batch.num_tokens,), math.nan)
    bounds = batch.cu_seqlens.tolist()
    for number, index in enumerate(batch.sample_index):
        group_number, sample = map(int, update.samples[index].sample_id.split("/"))
        length = bounds[number + 1] - bounds[number]
        out[bounds[number] : bounds[number + 1]] = scale * (
            100 * (3 * group_number + sample) + torch.arange(float(length))
        )
    return out


@pytest.mark.parametrize("dp", [1, 2])
def test_every_token_has_the_logprobs_of_its_own_rollout_on_any_layout(dp):
    traces, found = traced(ParallelLayout(dp=dp), count=12)
    assert set(found) == set(traces.chosen) and len(found) == 12
    for name, rollout in traces.chosen.items():
        number, sample = map(int, name.split("/"))
        num = len(rollout.completion.token_ids)
        first = 100 * (3 * number + sample) + len(rollout.prompt_token_ids) - 1
        positions = [float(first + index) for index in range(num)]
        assert found[name]["logprobs"] == [-0.5 * p for p in positions]
        assert found[name]["old_logprobs"] == [-1.0 * p for p in positions]


def test_few_are_spread_over_all_and_none_are_none():
    assert list(choose(GROUPS, [], 4)) == ["0/0", "1/0", "2/0", "3/0"]
    assert list(choose(GROUPS, GROUPS[2:3], 3)) == ["0/0", "2/0", "2/1"]
    assert choose(GROUPS, GROUPS, 0) == {}
    assert len(choose(GROUPS, GROUPS[:1], 99)) == 12
    twice = [*GROUPS, GROUPS[0]]
    assert not [name for name in choose(twice, twice, 99) if name.startswith("0/")]


def test_lines_hold_aligned_lists_and_say_what_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(token_traces, "KEPT_TOKENS", 2)
    traces, found = traced(ParallelLayout(), count=12)
    del found["3/1"]
    lines = traces.lines(found, TokenTexts(load_tokenizer(write_byte_level(tmp_path))), AlgorithmConfig())
    assert len(lines) == 12
    short, long = lines[0], lines[-1]
    assert short["left_out"] is None and len(short["tokens"]) == 1
    assert long["left_out"] == [1, 2]
    aligned = ("token_ids", "tokens", "rollout_logprobs", "old_logprobs", "logprobs", "clipped")
    assert {len(long[name]) for name in aligned} == {2}
    untrained = lines[10]
    assert untrained["prompt_id"] == "3" and untrained["sample_index"] == 1
    assert [untrained[name] for name in ("advantage", "old_logprobs", "logprobs", "clipped")] == [None] * 4
    assert len(untrained["rollout_logprobs"]) == 2


@pytest.mark.parametrize("surrogate", sorted(SURROGATES))
def test_clip_flags_add_up_to_what_the_kernel_counts(surrogate):
    given = {"tau_positive": 1.0, "tau_negative": 1.05} if surrogate == "sapo" else {}
    given |= {"tau": 0.1} if surrogate == "dro" else {}
    config = make_surrogate(AlgorithmConfig(surrogate=surrogate, **given))
    if config.surrogate == "clip":
        config = replace(config, dual_clip=3.0)
    generator = torch.Generator().manual_seed(7)
    for advantage, scale in itertools.product((1.3, 0.0, -0.8), (0.1, 1.0, 30.0)):
        ratios = scale * torch.randn(40, generator=generator, dtype=torch.float64)
        zeros, ones = torch.zeros(40, dtype=torch.float64), torch.ones(40, dtype=torch.float64)
        counted = policy_loss(
            ratios, zeros, advantage * ones, ones.bool(), config, token_weight=ones / 40,
            ref_logprob=zeros if config.kl != "none" else None,
            cu_seqlens=torch.tensor([0, 40], dtype=torch.int32), impl="reference",
        ).metrics  # fmt: skip
        flags = clip_flags(config, ratios.tolist(), advantage)
        assert flags.count(1) == counted[METRICS.index("clipped_high")]
        assert flags.count(-1) == counted[METRICS.index("clipped_low")]


def test_texts_of_tokens_are_the_text_together_also_of_split_characters(tmp_path):
    tokenizer = load_tokenizer(write_byte_level(tmp_path))
    texts = TokenTexts(tokenizer)
    for text in ("2 + 3", "两数之和 \U0001f9ee!", " a", ""):
        ids = tokenizer.encode(text)
        pieces = texts.of(ids)
        assert len(pieces) == len(ids) and "".join(pieces) == text
    cut = tokenizer.encode("\U0001f9ee")[:2]
    assert texts.of(cut) == ["", "\ufffd"]


def test_a_token_that_begins_a_word_shows_its_space(tmp_path):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path))
    assert "".join(TokenTexts(tokenizer).of(tokenizer.encode("is 2 + 3"))).strip() == "is 2 + 3"
