"""Our arithmetic of ranks and layers against megatron-core's own, over grids of layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron_rl.errors import LayoutError
from megatron_rl.model.spec import ModelSpec, MoeSpec
from megatron_rl.model.splits import is_partition, split_problems
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform import device

DENSE = ModelSpec(
    family="qwen3", num_layers=8, hidden_size=8, ffn_size=16, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=7,
    max_positions=16, rope_theta=1e4, norm_eps=1e-6, tied=False, qkv_bias=False, qk_norm=True,
)  # fmt: skip
MOE = replace(
    DENSE,
    family="qwen3_moe",
    moe=MoeSpec(num_experts=6, experts_per_token=2, expert_ffn_size=8, normalise_top_k=True),
)


def pipelines() -> Iterator[tuple[int, ParallelLayout]]:
    """Layers and pipeline of every combination of small numbers, most of which do not fit."""
    for num_layers, pp, vpp in itertools.product((2, 4, 6, 7, 8, 12), (2, 3, 4), (1, 2, 3)):
        for first, last in itertools.product((None, 1, 2, 3, 4, 6), repeat=2):
            yield num_layers, ParallelLayout(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)


def megatron_chunks(num_layers: int, layout: ParallelLayout) -> dict[tuple[int, int], range] | None:
    """(pp rank, chunk) -> layers by megatron-core, from the settings we give it; None where it refuses."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megatron_rl.model.build import transformer_config

    chunks = {}
    try:
        config = transformer_config(
            replace(DENSE, num_layers=num_layers), layout, dtype=torch.float32, kind="local"
        )
        for pp_rank, chunk in itertools.product(range(layout.pp), range(layout.vpp)):
            stage = chunk if layout.vpp > 1 else None
            first = get_transformer_layer_offset(config, vp_stage=stage, pp_rank=pp_rank)
            count = get_num_layers_to_build(config, vp_stage=stage, pp_rank=pp_rank)
            chunks[pp_rank, chunk] = range(first, first + count)
    except (ValueError, AssertionError, ZeroDivisionError):
        return None
    return chunks


def test_layers_of_every_pipeline_we_accept_are_those_megatron_builds() -> None:
    """And what we refuse, megatron-core refuses too, or leaves layers out, or a chunk empty.

    Of two stages we give it the first alone: whether the second adds up is for us to see.
    """
    device.activate()
    accepted = 0
    for num_layers, layout in pipelines():
        theirs = megatron_chunks(num_layers, layout)
        in_order = [theirs[p, c] for c in range(layout.vpp) for p in range(layout.pp)] if theirs else []
        is_whole = all(in_order) and [i for chunk in in_order for i in chunk] == list(range(num_layers))
        ours = {
            (pp_rank, chunk): layout.chunk_layers(num_layers, pp_rank=pp_rank, chunk=chunk)
            for pp_rank, chunk in itertools.product(range(layout.pp), range(layout.vpp))
        }
        if layout.pp == 2 and layout.first_stage_layers is not None and layout.last_stage_layers is not None:
            is_whole &= layout.first_stage_layers + layout.last_stage_layers == num_layers
        is_accepted = not list(split_problems(replace(DENSE, num_layers=num_layers), layout))
        assert is_accepted == is_whole == is_partition(num_layers, layout), (num_layers, layout, theirs)
        if is_accepted:
            accepted += 1
            assert ours == theirs, (num_layers, layout)
            assert sum(layout.stage_layers(num_layers)) == num_layers
    assert accepted > 150


@pytest.mark.parametrize(
    ("num_layers", "layout", "said"),
    [
        # megatron-core's own functions give 3 layers to each stage and drop two
        (8, ParallelLayout(pp=2, first_stage_layers=3, last_stage_layers=3),
         r"layout\.first_stage_layers: got first_stage_layers = 3 and last_stage_layers = 3 with pp = 2, vpp = 1, "
         r"which does not split the model's 8 layers .*; use first_stage_layers = 3 and last_stage_layers = 5 or "
         r"first_stage_layers = 4 and last_stage_layers = 4"),
        (8, ParallelLayout(pp=4, first_stage_layers=3), "; use first_stage_layers = 2 or first_stage_layers = 5"),
        (8, ParallelLayout(pp=2, vpp=2, last_stage_layers=3),
         r"last_stage_layers: .*; use last_stage_layers = 2 or last_stage_layers = 4"),
        (8, ParallelLayout(pp=3, first_stage_layers=8), "; use first_stage_layers = 6 or first_stage_layers = 4"),
        (4, ParallelLayout(pp=4, vpp=2, first_stage_layers=1),
         r"no sizes do: choose pp and vpp so that pp\*vpp is at most 4"),
    ],
    ids=str,
)  # fmt: skip
def test_end_stages_that_drop_layers_are_refused_with_sizes_that_do_not(
    num_layers: int, layout: ParallelLayout, said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        replace(DENSE, num_layers=num_layers).check_layout(layout)


@pytest.mark.parametrize(("tp", "dp", "pp"), [(1, 4, 1), (2, 2, 2), (4, 3, 2), (2, 6, 1), (8, 4, 3)])
def test_ranks_of_experts_are_those_of_megatron(tp: int, dp: int, pp: int) -> None:
    device.activate()
    from megatron.core.parallel_state import RankGenerator

    stage, seen = tp * dp, 0
    for etp, ep in itertools.product(range(1, stage + 1), repeat=2):
        if stage % (etp * ep):
            with pytest.raises(LayoutError):
                ParallelLayout(tp=tp, dp=dp, pp=pp, ep=ep, etp=etp)
            continue
        layout = ParallelLayout(tp=tp, dp=dp, pp=pp, ep=ep, etp=etp)
        theirs = RankGenerator(
            tp=etp, ep=ep, dp=stage // (etp * ep), pp=pp, cp=1, order="tp-cp-ep-dp-pp", rank_offset=0
        )
        for axis, position in (("tp", 0), ("ep", 1), ("dp", 2)):
            for ranks in theirs.get_ranks(axis):
                assert [layout.expert_coord(rank)[position] for rank in ranks] == list(range(len(ranks)))
                # ranks of one group differ along this axis alone
                assert (
                    len(
                        {
                            layout.expert_coord(r)[:position] + layout.expert_coord(r)[position + 1 :]
                            for r in ranks
                        }
                    )
                    == 1
                )
        seen += 1
    assert seen >= 6


def test_a_rank_and_its_coordinate_are_one() -> None:
    layout = ParallelLayout(tp=2, dp=3, pp=4)
    for rank in range(layout.world_size):
        tp_rank, dp_rank, pp_rank = layout.coord(rank)
        assert layout.rank(tp=tp_rank, dp=dp_rank, pp=pp_rank) == rank


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"ep": 0}, r"layout\.ep: got 0, must be at least 1"),
        ({"pp": 1, "first_stage_layers": 2}, r"layout\.first_stage_layers: got 2 with pp=1"),
        ({"pp": 1, "last_stage_layers": 2}, r"layout\.last_stage_layers: got 2 with pp=1"),
        ({"tp": 2, "dp": 3, "ep": 2}, r"layout\.ep: got 2 with etp = 2, .* tp\*dp = 2\*3 = 6 .*; use 1 or 3"),
        ({"tp": 2, "dp": 2, "etp": 3}, r"layout\.etp: got 3, .* tp\*dp = 2\*2 = 4 ranks .*; use 2 or 4"),
    ],
    ids=str,
)
def test_degrees_that_contradict_each_other_are_refused(degrees: dict[str, int], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        ParallelLayout(**degrees)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "layout", "said"),
    [
        (DENSE, ParallelLayout(dp=2, ep=2), r"layout\.ep: got 2, but the model has no experts; set it to 1"),
        (DENSE, ParallelLayout(etp=1), r"layout\.etp: got 1, but the model has no experts; set it to null"),
        (MOE, ParallelLayout(dp=4, ep=4), r"layout\.ep: got 4, .* model's 6 experts; use 3 or 6"),
        (
            MOE,
            ParallelLayout(dp=6, ep=2, etp=3),
            r"layout\.etp: got 3, .* 8 columns of an expert; use 2 or 4",
        ),
        (
            MOE,
            ParallelLayout(tp=2, dp=1, sp=True, etp=1),
            r"layout\.etp: got 1 with ep = 1 and tp = 2; .* null",
        ),
        (MOE, ParallelLayout(dp=2, etp=2), r"layout\.etp: got 2 with ep = 1 and tp = 1"),
        (MOE, ParallelLayout(tp=2), r"layout\.sp: got false with tp = 2; .* set layout\.sp to true"),
        # the columns of the dense MLP that this model does not have put no bound on tp
        (replace(MOE, ffn_size=7), ParallelLayout(tp=2, sp=True), None),
        (MOE, ParallelLayout(tp=4, dp=3, sp=True, ep=6, etp=2), None),
    ],
    ids=str,
)
def test_experts_are_split_as_megatron_can_train_them(
    spec: ModelSpec, layout: ParallelLayout, said: str | None
) -> None:
    if said is None:
        return spec.check_layout(layout)
    with pytest.raises(LayoutError, match=said):
        spec.check_layout(layout)
    return None
