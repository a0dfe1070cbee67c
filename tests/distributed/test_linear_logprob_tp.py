"""linear_logprob with its head sharded over real gloo processes, against the unsharded head."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import TrainingError
from megatron_rl.parallel.collectives import all_gather_object, broadcast_object
from megatron_rl_kernels.linear_logprob import linear_logprob
from tests.helpers.distributed import run_distributed

NUM_TOKENS, VOCAB, HIDDEN = 36, 23, 8
# rank i holds head rows starts[i] to starts[i + 1], of which those below VOCAB are real
LAYOUTS = {
    "tp2": [0, 12, 24],
    "tp3": [0, 8, 16, 24],
    "tp3 uneven": [0, 15, 19, 30],
    "tp3 with a shard of one row": [0, 14, 15, 23],
    "tp3 with a shard of padding": [0, 12, 24, 36],
}
IMPLS = ("reference", "portable", "triton")
TEMPERATURE = 0.8


def _inputs(rows):
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=draw)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw)
    target = torch.randint(VOCAB, (NUM_TOKENS,), generator=draw)
    # both sides of a boundary of shards in every layout, and both ends of the vocabulary
    target[:8] = torch.tensor([0, 7, 8, 11, 12, 14, 15, 22])
    # the last token's logits of the first 12 rows overflow to -inf: the whole first shard in some layouts
    hidden[:, 0] = 0
    hidden[-1, 0] = 1e30
    weight[:, 0] = 0
    weight[:12, 0] = -1e10
    target[-1] = 20
    upstream = torch.randn(2, NUM_TOKENS, generator=draw)
    # rows beyond the vocabulary would win every softmax if they took part
    padded = torch.cat([weight, torch.full((rows - VOCAB, HIDDEN), 50.0)])
    return hidden, padded, target, upstream


def _run(hidden, weight, target, upstream, **options):
    if options["impl"] == "reference":
        hidden, weight, upstream = hidden.double(), weight.double(), upstream.double()
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    options = {"temperature": TEMPERATURE, "chunk_tokens": 16, "chunk_vocab": 5} | options
    out = linear_logprob(hidden, weight, target, valid_vocab=VOCAB, **options)
    (upstream[0] * out.logprob + upstream[1] * out.entropy).sum().backward()
    return out.logprob.detach(), out.entropy.detach(), hidden.grad, weight.grad


def _worker(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    pair = dist.new_group([0, 1])
    results = {}
    for name, starts in LAYOUTS.items():
        if rank >= len(starts) - 1:
            continue
        group = pair if len(starts) == 3 else dist.group.WORLD
        hidden, padded, target, upstream = _inputs(starts[-1])
        shard = padded[starts[rank] : starts[rank + 1]]
        size = NUM_TOKENS // group.size()
        mine = hidden[rank * size : (rank + 1) * size]
        for impl in IMPLS:
            options = {"vocab_start": starts[rank], "group": group, "impl": impl}
            assert linear_logprob(hidden[:0], shard, target[:0], **options).logprob.shape == (0,)
            results[name, impl, "all tokens"] = _run(hidden, shard, target, upstream, **options)
            options["sequence_parallel"] = True
            main_grad = torch.full(shard.shape, 2.0)
            results[name, impl, "own tokens"] = _run(mine, shard, target, upstream, **options)
            results[name, impl, "main grad"] = (
                *_run(mine, shard, target, upstream, **options, main_grad=main_grad),
                main_grad,
            )
    return results


@pytest.fixture(scope="module")
def ranks():
    """What each of three processes got, by layout, implementation and mode: one launch for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return run_distributed(_worker, 3, timeout_s=200)


def _shards(ranks, *key):
    return [rank[key] for rank in ranks if key in rank]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_sharded_head_gives_the_values_and_gradients_of_one_head(name, impl, ranks):
    hidden, padded, target, upstream = _inputs(LAYOUTS[name][-1])
    want = _run(hidden, padded, target, upstream, impl="reference")
    shards = _shards(ranks, name, impl, "all tokens")
    assert len(shards) == len(LAYOUTS[name]) - 1
    for logprob, entropy, grad_hidden, _ in shards:
        # identical bits: a ratio that differs between ranks would split their clip decisions
        assert torch.equal(logprob, shards[0][0]) and torch.equal(entropy, shards[0][1])
        assert torch.equal(grad_hidden, shards[0][2])
    # values of size 10, float32
    torch.testing.assert_close(shards[0][0].double(), want[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(shards[0][1].double(), want[1], rtol=2e-6, atol=2e-6)
    grad_weight = torch.cat([shard[3] for shard in shards])
    for got, expected in ((shards[0][2], want[2]), (grad_weight, want[3])):
        # column by column: the first is many orders of magnitude larger
        errors = (got.double() - expected).norm(dim=0) / expected.norm(dim=0)
        assert errors.max() < 2e-6
    assert (grad_weight[VOCAB:] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_spread_over_the_ranks_get_their_own_gradients_summed_once(name, impl, ranks):
    whole = _shards(ranks, name, impl, "all tokens")
    spread = _shards(ranks, name, impl, "own tokens")
    for (logprob, entropy, _, grad_weight), want in zip(spread, whole, strict=True):
        assert torch.equal(logprob, want[0]) and torch.equal(entropy, want[1])
        assert torch.equal(grad_weight, want[3])
    grad_hidden = torch.cat([shard[2] for shard in spread])
    # the order of the sum over ranks may differ between the two collectives
    torch.testing.assert_close(grad_hidden, whole[0][2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_weight_gradient_of_each_shard_is_added_to_its_main_grad(name, impl, ranks):
    whole = _shards(ranks, name, impl, "all tokens")
    for got, want in zip(_shards(ranks, name, impl, "main grad"), whole, strict=True):
        assert got[3] is None
        torch.testing.assert_close(got[4], (want[3] + 2.0).float(), rtol=1e-6, atol=1e-6)


def _collectives_worker(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return all_gather_object({"rank": rank}), broadcast_object(f"from {rank}", src=1)


def test_collectives_agree_on_all_ranks():
    want = ([{"rank": 0}, {"rank": 1}], "from 1")
    assert run_distributed(_collectives_worker, 2) == [want, want]


def _lonely_worker(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    # rank 1 is alive, but does not take part
    if rank == 0:
        with pytest.raises(TrainingError, match="all_gather_object on rank 0 of 2 failed"):
            all_gather_object(1.0, impatient)
    dist.barrier()


def test_rank_that_does_not_take_part_is_an_error_within_the_time_out():
    run_distributed(_lonely_worker, 2, timeout_s=60)


def test_collectives_of_one_process_return_what_they_were_given():
    assert all_gather_object("alone") == ["alone"]
    assert broadcast_object("alone", src=0) == "alone"
