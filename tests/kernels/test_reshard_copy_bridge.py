"""reshard_pack makes the payload that the weight transfer makes, from one table per message of a real plan."""

import pytest
import torch

from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.execute import _local_piece, pack
from megatron_rl.reshard.parcels import merge
from megatron_rl.reshard.plan import plan_reshard
from megatron_rl_kernels.reshard_copy import CopyTable, Slice, reshard_pack
from tests.helpers.engine import rank_params
from tests.helpers.transfer import weights

SPEC = ModelSpec(
    family="qwen2",
    num_layers=2,
    hidden_size=16,
    ffn_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=96,
    max_positions=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
    qkv_bias=True,
    qk_norm=False,
)


def _table(parcel, params, dtype):
    slices, offset = [], 0
    for transfer in parcel.transfers:
        slices.append(
            Slice.along(
                params[transfer.chunk][transfer.param],
                dim=transfer.param_dim,
                start=transfer.param_start,
                length=transfer.length,
                offset=offset,
                name=transfer.hf_name,
            )
        )
        offset += transfer.bytes // dtype.itemsize
    return CopyTable(slices, flat_size=parcel.payload_bytes // dtype.itemsize, flat_dtype=dtype)


@pytest.mark.parametrize("impl", ["reference", "portable", "triton"])
def test_a_parcel_of_a_plan_is_one_table_and_the_same_bytes(impl):
    layout, dtype = ParallelLayout(tp=2, pp=2), torch.bfloat16
    plan = plan_reshard(
        SPEC, layout, target_tp=4, replicas=1, element_bytes=dtype.itemsize, bucket_bytes=4096
    )
    seen = 0
    for rank in range(layout.world_size):
        params = rank_params(SPEC, layout, rank, weights(SPEC, 1))
        for parcel in merge(plan, plan.messages_from(rank)):
            pieces = [
                _local_piece(transfer, shape, params, rank)
                for transfer, shape in zip(parcel.transfers, parcel.shapes, strict=True)
            ]
            want = torch.zeros(parcel.sealed_bytes, dtype=torch.uint8)
            pack(parcel, want, pieces, dtype=dtype, version=1)
            got = torch.zeros(parcel.payload_bytes // dtype.itemsize, dtype=dtype)
            reshard_pack(_table(parcel, params, dtype), got, impl=impl)
            assert torch.equal(got.view(torch.uint8), want[: parcel.payload_bytes])
            seen += len(pieces)
    assert seen > 50
