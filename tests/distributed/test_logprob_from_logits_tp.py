"""logprob_from_logits with its columns sharded over real gloo processes, against whole rows."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_rl_kernels.logprob_from_logits import logprob_from_logits, logprob_from_logits_reference
from tests.helpers.distributed import run_distributed

NUM_TOKENS, VOCAB = 12, 23
# rank i holds columns starts[i] to starts[i + 1], of which those below VOCAB are real
LAYOUTS = {
    "tp1": [0, 23],
    "tp2": [0, 12, 24],
    "tp3 uneven": [0, 1, 19, 30],
    "tp3 with a shard of padding": [0, 12, 24, 36],
}
IMPLS = ["portable", "triton"]


def _inputs(width):
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(NUM_TOKENS, VOCAB, generator=draw).mul(3)
    target = torch.randint(VOCAB, (NUM_TOKENS,), generator=draw)
    # both sides of the boundaries, and the last token
    target[:6] = torch.tensor([0, 1, 11, 12, 18, 22])
    upstream = torch.randn(2, NUM_TOKENS, generator=draw)
    # nothing possible on the first shard of any layout, on all but that, and anywhere; a possible target each
    logits[6, :12], target[6] = float("-inf"), 15
    logits[7, 1:], target[7] = float("-inf"), 0
    logits[8] = float("-inf")
    upstream[0, 8] = 0
    # what all logits share must not cost digits, on any shard
    logits[9] -= 300
    # columns beyond the vocabulary would win every softmax if they took part
    padded = torch.cat([logits, torch.full((NUM_TOKENS, max(width - VOCAB, 0)), 1e4)], dim=1)
    temperature = torch.linspace(0.5, 1.5, NUM_TOKENS)
    return padded, target, upstream, temperature


def _run(op, logits, target, upstream, temperature, **options):
    logits = logits.clone().requires_grad_()
    out = op(logits, target, temperature=temperature, valid_vocab=VOCAB, **options)
    (grad,) = torch.autograd.grad((out.logprob, out.entropy), logits, tuple(upstream.to(out.logprob.dtype)))
    return out.logprob.detach(), out.entropy.detach(), out.lse, grad


def _worker(rank, world_size):
    # before anything in this process imports Triton
    os.environ["TRITON_INTERPRET"] = "1"
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)}
    results = {}
    for name, starts in LAYOUTS.items():
        if rank >= len(starts) - 1:
            continue
        logits, target, upstream, temperature = _inputs(starts[-1])
        shard = logits[:, starts[rank] : starts[rank + 1]]
        options = {"vocab_start": starts[rank], "group": groups[len(starts) - 1]}
        for impl in IMPLS:
            empty = logprob_from_logits(shard[:0], target[:0], valid_vocab=VOCAB, impl=impl, **options)
            assert empty.logprob.shape == (0,)
            results[name, impl] = _run(
                logprob_from_logits, shard, target, upstream, temperature, impl=impl, **options
            )
    return results


@pytest.fixture(scope="module")
def ranks():
    """What each of three processes got, by layout and implementation: one launch for all tests."""
    return run_distributed(_worker, 3)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_give_the_values_of_whole_rows_with_identical_bits_and_their_part_of_the_gradient(
    name, impl, ranks
):
    shards = [rank[name, impl] for rank in ranks if (name, impl) in rank]
    assert len(shards) == len(LAYOUTS[name]) - 1
    for shard in shards:
        # a ratio that differs between ranks would split their clip decisions
        assert all(torch.equal(*pair) for pair in zip(shard[:3], shards[0][:3], strict=True))
    logits, target, upstream, temperature = _inputs(VOCAB)
    want = _run(logprob_from_logits_reference, logits.double(), target, upstream, temperature.double())
    for got, expected in zip(shards[0][:3], want[:3], strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=2e-6)
    grad = torch.cat([shard[3] for shard in shards], dim=1)
    torch.testing.assert_close(grad[:, :VOCAB].double(), want[3], rtol=1e-5, atol=1e-6)
    assert not grad[:, VOCAB:].any()
