"""Run-time checks of log-probs and entropies: what they let pass, what they name."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl_kernels.invariants import difference, violation, worst
from megatron_rl_kernels.linear_logprob import linear_logprob

VOCAB = 50


def _found(logprob, entropy=None, positions=None):
    values = torch.tensor(logprob)
    entropies = None if entropy is None else torch.tensor(entropy)
    where = torch.arange(len(logprob)) if positions is None else torch.tensor(positions, dtype=torch.int64)
    return violation("op", worst(values, entropies, where, vocab_size=VOCAB), vocab_size=VOCAB)


def test_bounds_themselves_and_rounding_beyond_them_pass():
    top = math.log(VOCAB)
    assert _found([0.0, -80.0, 1e-6, -1.0], [0.0, top, -1e-6, top + 1e-6]) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.01])
def test_a_log_prob_that_cannot_be_is_named_with_its_position(bad):
    text = _found([-1.0, bad, bad], [1.0, 2.0, 3.0])
    assert text is not None and text.startswith("op: token 1 of a micro-batch (the first of 2) has log-prob ")
    assert f"log-prob {bad:g} and entropy 2;" in text


@pytest.mark.parametrize("bad", [math.nan, -0.01, math.log(VOCAB) + 0.01])
def test_an_entropy_that_cannot_be_is_named_with_its_position(bad):
    text = _found([-1.0, -1.0, -2.0], [1.0, 2.0, bad])
    assert text is not None and text.startswith("op: token 2 of a micro-batch (the first of 1)")


def test_positions_that_are_not_asked_about_may_hold_anything():
    assert _found([math.nan, -1.0], [math.nan, 1.0], positions=[1]) is None
    text = _found([math.nan, -1.0, math.nan], positions=[1, 2])
    assert text is not None and "token 2 of a micro-batch (the first of 1)" in text
    assert _found([math.nan], positions=[]) is None


def _head(dtype=torch.float32, scale=1.0):
    draw = torch.Generator().manual_seed(0)
    hidden = (torch.randn(20, 64, generator=draw) * scale).to(dtype)
    weight = torch.randn(VOCAB + 3, 64, generator=draw).to(dtype)
    return hidden, weight, torch.randint(VOCAB, (20,), generator=draw)


def _difference(hidden, weight, target, *, logprob, entropy, **options):
    return difference(
        "op", hidden, weight, target, logprob=logprob, entropy=entropy, positions=torch.tensor([3, 7, 19]),
        valid_vocab=VOCAB, **options,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_a_right_op_agrees_with_the_definition(dtype, scale):
    hidden, weight, target = _head(dtype, scale)
    out = linear_logprob(hidden, weight, target, temperature=0.7, valid_vocab=VOCAB)
    options = {"logprob": out.logprob, "entropy": out.entropy, "temperature": 0.7}
    assert _difference(hidden, weight, target, **options) is None


def test_logits_rounded_to_bfloat16_are_noticed():
    hidden, weight, target = _head(torch.bfloat16)
    logprobs = (hidden @ weight[:VOCAB].T).float().log_softmax(1)
    logprob = logprobs.gather(1, target[:, None])[:, 0]
    text = _difference(hidden, weight, target, logprob=logprob, entropy=None)
    assert text is not None and text.startswith("op: the log-prob of token 3 of the first micro-batch is -")


def test_a_wrong_entropy_is_noticed_at_positions_compared_alone():
    hidden, weight, target = _head()
    out = linear_logprob(hidden, weight, target, valid_vocab=VOCAB)
    wrong = out.entropy.clone()
    wrong[8] += 1
    assert _difference(hidden, weight, target, logprob=out.logprob, entropy=wrong) is None
    wrong[7] = math.nan
    text = _difference(hidden, weight, target, logprob=out.logprob, entropy=wrong)
    assert (
        text is not None
        and "op: the entropy of token 7 of the first micro-batch is nan, by its definition" in text
    )
