"""linear_policy_loss with its head sharded over real gloo processes, against the unsharded head."""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_rl_kernels.linear_policy_loss import linear_policy_loss
from tests.helpers.distributed import run_distributed
from tests.helpers.policy_batch import CONFIGS, make_batch, relative_error, run

NUM_TOKENS, VOCAB = 36, 23
# rank i holds head rows starts[i] to starts[i + 1], of which those below VOCAB are real
LAYOUTS = {
    "tp2": [0, 12, 24],
    "tp3": [0, 8, 16, 24],
    "tp3 uneven": [0, 1, 19, 30],
    "tp3 with a shard of padding": [0, 12, 24, 36],
}
LOSSES = ["gppo", "clip, entropy bonus", "gspo"]


def _batch(rows):
    batch = make_batch(NUM_TOKENS, VOCAB)
    # rows beyond the vocabulary would win every softmax if they took part
    padded = torch.cat([batch.weight, torch.full((rows - VOCAB, batch.weight.shape[1]), 50.0)])
    return replace(batch, weight=padded)


def _worker(rank, world_size):
    # read when Triton is imported, which its implementation does when it runs first
    os.environ["TRITON_INTERPRET"] = "1"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    pair = dist.new_group([0, 1])
    results = {}
    for layout, starts in LAYOUTS.items():
        num_ranks = len(starts) - 1
        if rank >= num_ranks:
            continue
        whole = _batch(starts[-1])
        batch = replace(whole, weight=whole.weight[starts[rank] : starts[rank + 1]])
        own = slice(rank * NUM_TOKENS // num_ranks, (rank + 1) * NUM_TOKENS // num_ranks)
        part = replace(batch, hidden=batch.hidden[own])
        options = {
            "vocab_start": starts[rank],
            "valid_vocab": VOCAB,
            "group": pair if num_ranks == 2 else dist.group.WORLD,
            "chunk_tokens": 11,
        }
        for name in LOSSES:
            config = CONFIGS[name]
            results[layout, name] = run(batch, config, **options)
            results[layout, name, "sequence parallel"] = run(part, config, sequence_parallel=True, **options)
        for name in ("gppo", "clip, entropy bonus"):
            results[layout, name, "triton"] = run(batch, CONFIGS[name], impl="triton", **options)
        main_grad = torch.ones_like(batch.weight)
        run(batch, CONFIGS["gppo"], main_grad=main_grad, **options)
        results[layout, "main_grad"] = main_grad
        nothing = replace(batch.inputs.map(lambda one: one[:0]), cu_seqlens=None)
        empty = linear_policy_loss(
            batch.hidden[:0], batch.weight, batch.target[:0], nothing, CONFIGS["gppo"], **options
        )
        results[layout, "empty"] = empty.loss
    return results


@pytest.fixture(scope="module")
def ranks():
    """What each of three processes got, by layout and loss: one launch for all tests."""
    return run_distributed(_worker, 3)


def _shards(ranks, *key):
    return [rank[key] for rank in ranks if key in rank]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_head_gives_the_values_and_gradients_of_one_head(layout, name, ranks):
    want = run(_batch(LAYOUTS[layout][-1]), CONFIGS[name], valid_vocab=VOCAB)
    shards = _shards(ranks, layout, name)
    assert len(shards) == len(LAYOUTS[layout]) - 1
    for shard in shards:
        # identical bits: a ratio that differs between ranks would split their clip decisions
        for value in ("loss", "logprob", "entropy", "metrics", "grad_hidden"):
            assert torch.equal(getattr(shard, value), getattr(shards[0], value)), value
    torch.testing.assert_close(shards[0].loss, want.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(shards[0].logprob, want.logprob, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(shards[0].entropy, want.entropy, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(shards[0].metrics, want.metrics, rtol=1e-5, atol=1e-5)
    assert relative_error(shards[0].grad_hidden, want.grad_hidden) < 1e-5
    grad_weight = torch.cat([shard.grad_weight for shard in shards])
    assert relative_error(grad_weight, want.grad_weight) < 1e-5
    assert grad_weight[VOCAB:].abs().sum() == 0


@pytest.mark.parametrize("name", ["gppo", "clip, entropy bonus"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_head_in_triton_gives_what_the_portable_one_does(layout, name, ranks):
    shards, wanted = _shards(ranks, layout, name, "triton"), _shards(ranks, layout, name)
    for got, want in zip(shards, wanted, strict=True):
        for value in ("loss", "logprob", "entropy", "metrics", "grad_hidden"):
            assert torch.equal(getattr(got, value), getattr(shards[0], value)), value
        torch.testing.assert_close(got.logprob, want.logprob, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(got.entropy, want.entropy, rtol=1e-6, atol=2e-6)
        assert relative_error(got.grad_hidden, want.grad_hidden) < 1e-5
        # a shard of padding alone wants exact zeros
        torch.testing.assert_close(got.grad_weight, want.grad_weight, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequence_parallel_gives_each_rank_the_gradient_of_its_tokens(layout, name, ranks):
    full = _shards(ranks, layout, name)
    parts = _shards(ranks, layout, name, "sequence parallel")
    for part, shard in zip(parts, full, strict=True):
        assert torch.equal(part.logprob, shard.logprob) and torch.equal(part.loss, shard.loss)
        assert torch.equal(part.grad_weight, shard.grad_weight)
    # summed over the ranks exactly once, in whatever order
    gathered = torch.cat([part.grad_hidden for part in parts])
    assert relative_error(gathered, full[0].grad_hidden) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_main_grad_of_each_shard_gets_its_rows(layout, ranks):
    for main_grad, shard in zip(
        _shards(ranks, layout, "main_grad"), _shards(ranks, layout, "gppo"), strict=True
    ):
        # a sum with 1 in float32
        torch.testing.assert_close(main_grad - 1, shard.grad_weight, rtol=0, atol=3e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tokens_need_no_exchange(layout, ranks):
    assert all(loss == 0 for loss in _shards(ranks, layout, "empty"))
