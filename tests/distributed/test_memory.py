"""Predicted peaks of live tensors are within 10 % of measured ones, on CPU, in every phase and on every rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_rl.parallel.groups import build_model_groups, destroy_model_groups, init_process_groups
from megatron_rl.parallel.layout import ParallelLayout
from tests.helpers.distributed import run_distributed
from tests.helpers.models import make_tiny_hf
from tests.helpers.source import ROOT

MIB = 1 << 20
BOUND = 0.1
# sizes at which weights, activations and the head all count; 2000 rows are padded
SIZES: dict[str, Any] = {"num_layers": 4, "hidden": 128, "heads": 8, "ffn": 384, "vocab": 2000}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2", "kv_heads": 2, "head_dim": 16},
    "qwen3": {"family": "qwen3", "kv_heads": 4, "head_dim": 32, "tied": True},
    "moe": {"family": "qwen3_moe", "kv_heads": 4, "head_dim": 32, "experts": 8, "expert_ffn": 96},
}
PLAIN = {"dtype": "float32", "recompute": "none", "tokens": 1024, "sequence": 128, "microbatches": 2}
# (model, layout, what differs from PLAIN), by number of ranks
CASES: dict[int, list[tuple[str, ParallelLayout, dict[str, Any]]]] = {
    1: [
        ("qwen2", ParallelLayout(), {}),
        ("qwen3", ParallelLayout(), {"recompute": "full"}),
        ("qwen3", ParallelLayout(), {"dtype": "bfloat16"}),
    ],
    2: [
        ("qwen2", ParallelLayout(tp=2), {}),
        ("qwen3", ParallelLayout(tp=2, sp=True), {}),
        ("qwen2", ParallelLayout(pp=2), {"microbatches": 4}),
        ("qwen3", ParallelLayout(pp=2), {"recompute": "full"}),
        ("qwen3", ParallelLayout(pp=2, vpp=2), {"microbatches": 4}),
        ("qwen2", ParallelLayout(dp=2), {"dtype": "bfloat16"}),
        ("moe", ParallelLayout(dp=2, ep=2), {}),
    ],
    4: [("qwen3", ParallelLayout(tp=2, pp=2), {})],
}


def _tool() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    import measure_memory_rank

    return measure_memory_rank


def _known_tensors(rank: int, world_size: int, counter: Path) -> list[tuple[int, int]]:
    """Bytes that are live at the end of a phase, and at most in it, above those before it."""
    live = _tool().LiveBytes(counter)
    grown: list[tuple[int, int]] = []

    def phase(kept: list[torch.Tensor], steps: Any) -> None:
        before = live.now
        with live.phase("one"):
            kept.append(steps())
        grown.append((live.now - before, live.peaks.pop("one") - before))

    kept: list[torch.Tensor] = []
    phase(kept, lambda: torch.empty(MIB, dtype=torch.float32))
    # a temporary that nobody holds any more, and a view
    phase(kept, lambda: torch.zeros(2 * MIB, dtype=torch.int8).neg()[:1].clone())
    phase(kept, lambda: kept[0].view(-1))
    leaf = torch.ones(MIB // 4, requires_grad=True)
    phase(kept, leaf.exp().sum)
    phase(kept, lambda: kept.pop().backward())
    before = live.now
    leaf.grad = None
    kept.clear()
    grown.append((live.now - before, 0))
    return grown


def test_the_counter_sees_tensors_come_and_go(tmp_path: Path) -> None:
    counter = _tool().build_counter(tmp_path)
    (grown,) = run_distributed(_known_tensors, 1, counter)
    kept, temporary, view, graph, backward, freed = grown
    assert kept == (4 * MIB, 4 * MIB)
    assert temporary == (1, 4 * MIB)
    assert view == (0, 0)
    # what exp keeps for backward was made before the phase, the sum is 4 bytes
    assert graph == (4, 4)
    # in place of the graph there is a gradient
    assert backward[0] == -4 and 0 < backward[1] <= 2 * MIB + 8
    # the first tensor, the byte of the second, and the gradient
    assert freed == (-5 * MIB - 1, 0)


def _measured(
    rank: int, world_size: int, counter: Path, cases: list[tuple[str, ParallelLayout, dict[str, Any]]]
) -> list[list[tuple[int, str, int, int]]]:
    tool = _tool()
    live = tool.LiveBytes(counter)
    found = []
    for number, (hf_path, layout, options) in enumerate(cases):
        if number:
            destroy_model_groups()
            build_model_groups(layout, timeout_s=60)
        else:
            init_process_groups(
                layout,
                rank=rank,
                world_size=world_size,
                master_addr="127.0.0.1",
                master_port=int(os.environ["MASTER_PORT"]),
                timeout_s=60,
            )
        setting = tool.Setting(hf_path=hf_path, layout=layout, **PLAIN | options)
        every = tool.measure(setting, rank=rank, live=live)
        found.append([(one.pp_rank, one.phase, one.predicted, one.measured) for one in every])
    return found


@pytest.mark.parametrize("world_size", CASES, ids="{}_ranks".format)
def test_predicted_peaks_are_measured(tmp_path: Path, world_size: int) -> None:
    tool, cases = _tool(), CASES[world_size]
    counter = tool.build_counter(tmp_path)
    paths = {
        name: str(make_tiny_hf(tmp_path / name, **SIZES | MODELS[name]))
        for name in dict.fromkeys(name for name, _, _ in cases)
    }
    of_ranks = run_distributed(
        _measured, world_size, counter, [(paths[name], layout, options) for name, layout, options in cases]
    )
    phases = {"load", "sft train", "sft step", "rl logprob", "rl train", "rl step"}
    wrong = []
    for rank, of_cases in enumerate(of_ranks):
        for (name, layout, options), found in zip(cases, of_cases, strict=True):
            assert {phase for _, phase, _, _ in found} == phases
            for pp_rank, phase, predicted, measured in found:
                line = (
                    f"{name} {layout} {options} rank {rank} pp {pp_rank} {phase}: {predicted} for {measured}"
                )
                print(f"{line} {predicted / measured - 1:+.1%}")
                if abs(predicted / measured - 1) > BOUND:
                    wrong.append(line)
    assert wrong == []
