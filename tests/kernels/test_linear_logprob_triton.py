"""linear_logprob's Triton kernels beyond one tile: schedules, splits and their merge, layouts that are refused."""

import pytest
import torch

from megatron_rl_kernels import tables
from megatron_rl_kernels.linear_logprob import linear_logprob, triton_op
from megatron_rl_kernels.linear_logprob.stats import NUM_STATISTICS, merge_parts
from megatron_rl_kernels.tables import MatmulTile
from tests.helpers.linear_logprob import assert_matches, exact, inputs, run, upstream_of

# tokens, columns, states, parts, group: none divides 40 tokens, 150 columns or 24 states
TILES = {
    "whole tile": (32, 64, 16, 1, 2),
    "halves": (32, 64, 16, 2, 2),
    "ungrouped": (16, 64, 64, 2, 1),
    "one group": (16, 128, 32, 1, 8),
}


def _use(monkeypatch, m, n, k, parts, group):
    tile = MatmulTile(m, n, k, parts, group, 4, 1)
    for table in (tables.LINEAR_LOGPROB_FORWARD, tables.LINEAR_LOGPROB_BACKWARD):
        for size in (2, 4):
            monkeypatch.setitem(table, ("interpreter", size), tile)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_every_schedule_gives_the_values_and_gradients_of_float64(name, num_splits, monkeypatch):
    tile = TILES[name]
    _use(monkeypatch, *tile)
    rows = -(-150 // num_splits // tile[1]) * tile[1]
    monkeypatch.setattr(triton_op, "split_size", lambda *_: rows)
    hidden, weight, target = inputs(40, 160, hidden_size=24, scale=0.3)
    weight[150:] = 50.0
    target, upstream = target % 150, upstream_of(40)
    temperature = torch.linspace(0.5, 2.0, 40)
    options = {"temperature": temperature, "valid_vocab": 150, "chunk_tokens": 24, "chunk_vocab": 100}
    got = run(hidden, weight, target, upstream, impl="triton", **options)
    want = exact(hidden, weight[:150], target, upstream, temperature=temperature)
    assert (got[3][150:] == 0).all()
    assert_matches((*got[:3], got[3][:150]), want, value_atol=1e-5, grad_rtol=2e-6)


def test_merged_splits_are_what_torch_merges():
    draw = torch.Generator().manual_seed(0)
    parts = torch.rand((5, NUM_STATISTICS, 1100), generator=draw)
    parts[:, 0] = parts[:, 0] * 40 - 20
    parts[:, 1] += 1
    parts[:, 2:4] *= -5
    # one part of each token holds its target; part 2 is empty, and all parts of the last token are
    parts[:, 4] = 0
    parts[1, 4] = 1
    parts[:, 3] *= parts[:, 4]
    for dead in (parts[2], parts[:, :, -1].T):
        dead[0], dead[1:4] = float("-inf"), 0.0
    # the only column of the last token's target is -inf, too
    parts[1, 3, -1] = float("-inf")
    got = triton_op.merged(parts)
    torch.testing.assert_close(got, merge_parts(parts.double()).float(), rtol=2e-6, atol=2e-6)
    assert got[:, -1].tolist() == [float("-inf"), 0.0, 0.0, float("-inf"), 1.0]
    assert torch.isfinite(got[:, :-1]).all()


@pytest.mark.parametrize("num_rows", [1, 255, 256, 5000, 151936])
@pytest.mark.parametrize("token_blocks", [1, 64, 1000])
def test_splits_are_whole_tiles_that_cover_the_vocabulary(num_rows, token_blocks):
    tile = tables.LINEAR_LOGPROB_FORWARD["sm_90", 2]
    rows = triton_op.split_size(num_rows, token_blocks, tile)
    splits = -(-num_rows // rows)
    assert rows % tile.n == 0 and splits * rows >= num_rows > (splits - 1) * rows
    # both of a device with 132 multiprocessors and of splits that are long enough
    assert splits == 1 or rows >= 8 * tile.n
    # one tile more per split may leave fewer of them than wanted
    if num_rows == 151936 and token_blocks > 1:
        assert splits * token_blocks >= 264


@pytest.mark.parametrize(
    ("hidden", "error", "words"),
    [
        (torch.zeros(4, 12), ValueError, "H to be a multiple of 8"),
        (torch.zeros(4, 32)[:, ::2], ValueError, "last dimension must be contiguous"),
        (torch.zeros(16, 4).T, ValueError, "last dimension must be contiguous"),
        (torch.zeros(4, 18)[:, :16], ValueError, "row stride of 18"),
        (torch.zeros(1, 16).expand(4, 16), ValueError, "row stride of 0"),
        (torch.zeros(66)[2:].view(4, 16), ValueError, "address that is not a multiple of 16"),
        (torch.zeros(4, 16, dtype=torch.float64), TypeError, "takes torch.bfloat16, torch.float16"),
    ],
    ids=["H", "columns apart", "transposed", "row stride", "expanded", "address", "float64"],
)
@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_layouts_that_descriptors_cannot_read_are_refused_by_name(which, hidden, error, words):
    good = torch.zeros(4, hidden.shape[1], dtype=hidden.dtype)
    matrices = {"hidden": good, "weight": good} | {which: hidden}
    if hidden.dtype == torch.float64:
        matrices = {"hidden": hidden, "weight": hidden}
    with pytest.raises(error, match=words) as caught:
        linear_logprob(**matrices, target=torch.zeros(4, dtype=torch.int64), impl="triton")
    if hidden.dtype != torch.float64 and hidden.shape[1] == 16:
        assert f"linear_logprob: {which} " in str(caught.value)


def test_a_single_row_may_have_any_stride():
    hidden, weight, target = inputs(1, 1, hidden_size=16)
    spread = torch.zeros(1, 19)[:, :16]
    spread.copy_(hidden)
    got = run(spread, weight, target, torch.ones(2, 1), impl="triton")
    assert got[0].tolist() == [0.0] and got[2].shape == (1, 16)


def test_every_generation_has_a_tile_of_each_table_for_each_element_size():
    for table in (tables.LINEAR_LOGPROB_FORWARD, tables.LINEAR_LOGPROB_BACKWARD):
        for generation in ("interpreter", "sm_90", "other"):
            for size in (2, 4):
                tile = table[generation, size]
                # a block of operands per stage, in the 227 kB that a program may have
                needed = (tile.m + tile.n) * tile.k * size * tile.num_stages
                assert generation == "interpreter" or needed <= 227 * 1024
    assert tables.generation(torch.device("cpu")) == "interpreter"
