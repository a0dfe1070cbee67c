"""linear_logprob with its head sharded over real gloo processes, against the unsharded head."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import TrainingError
from megatron_rl.parallel.collectives import all_gather_object, broadcast_object
from megatron_rl_kernels.linear_logprob import linear_logprob
from tests.helpers.distributed import run_distributed

NUM_TOKENS, VOCAB, HIDDEN = 37, 23, 8
# rank i holds head rows starts[i] to starts[i + 1], of which those below VOCAB are real
LAYOUTS = {
    "tp2": [0, 12, 24],
    "tp3": [0, 8, 16, 24],
    "tp3 uneven": [0, 15, 19, 30],
    "tp3 with a shard of padding": [0, 12, 24, 36],
}


def _inputs(rows):
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=draw)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw)
    target = torch.randint(VOCAB, (NUM_TOKENS,), generator=draw)
    upstream = torch.randn(2, NUM_TOKENS, generator=draw)
    # rows beyond the vocabulary would win every softmax if they took part
    padded = torch.cat([weight, torch.full((rows - VOCAB, HIDDEN), 50.0)])
    return hidden, padded, target, upstream


def _run(hidden, weight, target, upstream, **options):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = linear_logprob(hidden, weight, target, valid_vocab=VOCAB, chunk_tokens=16, chunk_vocab=5, **options)
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
        options = {"vocab_start": starts[rank], "group": group}
        assert linear_logprob(hidden[:0], shard, target[:0], **options).logprob.shape == (0,)
        results[name] = _run(hidden, shard, target, upstream, **options)
        partial = _run(hidden, shard, target, upstream, **options, reduce_grad_hidden=False)
        results[f"{name}, partial"] = partial
    return results


@pytest.fixture(scope="module")
def ranks():
    """What each of three processes got, by name of the layout: one launch for all tests."""
    return run_distributed(_worker, 3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_sharded_head_gives_the_values_and_gradients_of_one_head(name, ranks):
    want = _run(*_inputs(LAYOUTS[name][-1]))
    shards = [rank[name] for rank in ranks if name in rank]
    for logprob, entropy, grad_hidden, _ in shards:
        # identical bits: a ratio that differs between ranks would split their clip decisions
        assert torch.equal(logprob, shards[0][0]) and torch.equal(entropy, shards[0][1])
        assert torch.equal(grad_hidden, shards[0][2])
    # values of size 10, float32
    torch.testing.assert_close(shards[0][0], want[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shards[0][1], want[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shards[0][2], want[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([shard[3] for shard in shards]), want[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_unreduced_hidden_gradients_are_parts_that_add_up(name, ranks):
    want = _run(*_inputs(LAYOUTS[name][-1]))
    parts = [rank[f"{name}, partial"][2] for rank in ranks if name in rank]
    assert not torch.equal(parts[0], parts[1])
    torch.testing.assert_close(torch.stack(parts).sum(0), want[2], rtol=1e-5, atol=1e-5)


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
