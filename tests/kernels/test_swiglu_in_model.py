"""The dense and the expert MLPs of the local spec run the swiglu op on both halves of their first layer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.train.launcher import free_port
from megatron_rl_kernels.swiglu import swiglu
from tests.helpers.models import make_tiny_hf


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    init_process_groups(
        ParallelLayout(),
        rank=0,
        world_size=1,
        master_addr="127.0.0.1",
        master_port=free_port(),
        timeout_s=30.0,
    )
    yield
    destroy_process_groups()


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_mlp_of_the_local_spec_runs_the_op(family, dtype, tmp_path):
    from megatron_rl.model.build import build_model
    from megatron_rl.model.layers import Swiglu

    path = make_tiny_hf(tmp_path, family=family, num_layers=1)
    (chunk,) = build_model(ModelSpec.from_hf(path), ParallelLayout(), dtype=dtype, spec_kind="local")
    mlp: Any = chunk.decoder.layers[0].mlp
    scale = None
    if family == "qwen3_moe":
        mlp, scale = mlp.experts.local_experts[3], torch.rand(7)
    assert type(mlp.activation_func) is Swiglu and not list(mlp.activation_func.state_dict())
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        torch.nn.init.normal_(layer.weight)
    x = torch.randn(7, 64).to(dtype)
    out, _ = mlp(x, scale) if scale is not None else mlp(x)
    inner = swiglu(x @ mlp.linear_fc1.weight.T)
    if scale is not None:
        inner = (inner * scale[:, None]).to(dtype)
    torch.testing.assert_close(out, inner @ mlp.linear_fc2.weight.T)
