"""Experts under each of their names: imported and exported alike, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megatron_rl.errors import ModelError
from megatron_rl.model.hf_experts import table_name
from megatron_rl.model.hf_io import load_hf, save_hf
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.train.launcher import free_port
from tests.helpers.models import make_tiny_hf

LAYOUT = ParallelLayout()


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    init_process_groups(
        LAYOUT, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port(), timeout_s=30.0
    )
    yield
    destroy_process_groups()


def grouped_names(chunk: nn.Module) -> nn.Module:
    """A bare module with the parameters of `chunk`, its experts named as TransformerEngine's grouped linears do."""
    bare = nn.Module()
    for name, param in chunk.named_parameters():
        head, is_expert, tail = name.partition(".local_experts.")
        if is_expert:
            number, linear, _ = tail.split(".")
            name = f"{head}.{linear}.weight{number}"
        *path, last = name.split(".")
        place = bare
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        place.register_parameter(last, nn.Parameter(torch.full_like(param, float("nan"))))
    return bare


@pytest.mark.parametrize("form", ["sequential", "grouped"])
def test_import_and_export_give_back_every_tensor_under_either_name(form: str, tmp_path: Path) -> None:
    from megatron_rl.model.build import build_model

    hf = make_tiny_hf(tmp_path / "hf", family="qwen3_moe", num_layers=2, experts=12, experts_per_token=3)
    spec = ModelSpec.from_hf(hf)
    (chunk,) = build_model(spec, LAYOUT, dtype=torch.float32, spec_kind="local")
    if form == "grouped":
        chunk = grouped_names(chunk)  # type: ignore[assignment]
        assert any(name.endswith("linear_fc2.weight11") for name, _ in chunk.named_parameters())
    load_hf([chunk], spec, LAYOUT, hf_path=hf, rank=0)
    save_hf([chunk], spec, LAYOUT, hf_source=hf, out_dir=tmp_path / "out", dtype=torch.float32)
    before, after = (load_file(path / "model.safetensors") for path in (hf, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_both_names_of_an_expert_are_one_name_in_the_tables() -> None:
    layer = "decoder.layers.3.mlp."
    sequential = layer + "experts.local_experts.11.linear_fc1.weight"
    assert table_name(layer + "experts.linear_fc1.weight11") == table_name(sequential) == sequential
    for other in ("decoder.layers.3.mlp.linear_fc1.weight", layer + "router.weight"):
        assert table_name(other) == other


def test_legacy_grouped_experts_are_refused_by_their_names(tmp_path: Path) -> None:
    """megatron-core 0.16 stores them transposed, all experts of a rank in one tensor."""
    hf = make_tiny_hf(tmp_path, family="qwen3_moe", num_layers=1)
    legacy = nn.ModuleDict({"layer": nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.Module()})})})
    experts = legacy.get_submodule("layer.mlp.experts")
    experts.weight1 = nn.Parameter(torch.zeros(64, 8 * 64))  # type: ignore[assignment]
    with pytest.raises(
        ModelError, match=r"mlp\.experts\.weight1 is of megatron-core's legacy grouped experts"
    ):
        load_hf([legacy], ModelSpec.from_hf(hf), LAYOUT, hf_path=hf, rank=0)


def test_a_model_with_an_expert_too_few_does_not_fit_the_table(tmp_path: Path) -> None:
    from megatron_rl.model.build import build_model

    hf = make_tiny_hf(tmp_path, family="qwen3_moe", num_layers=1)
    spec = ModelSpec.from_hf(hf)
    (chunk,) = build_model(spec, LAYOUT, dtype=torch.float32, spec_kind="local")
    del chunk.decoder.layers[0].mlp.experts.local_experts[7]
    with pytest.raises(
        ModelError, match=r"does not fit decoder\.layers\.0\.mlp\.experts\.local_experts\.7\."
    ):
        load_hf([chunk], spec, LAYOUT, hf_path=hf, rank=0)
