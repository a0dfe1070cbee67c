"""The norms of a CPU engine: those of vLLM's own definition, and its definition itself where the kernels do not fit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# vLLM changes the process that imports it
PROGRAM = """
import json, sys
import torch
from vllm import ir
from vllm.platforms import current_platform
from megatron_rl.rollout import vllm_norms

current_platform.import_kernels()
vllm_norms.register()
vllm_norms.register()
generator = torch.Generator().manual_seed(1)

def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator).to(dtype)

def compare(op, *args):
    native = op.impls["native"].impl_fn(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
    with op.set_priority([*vllm_norms.PRIORITY[op.name], "native"]):
        chosen = op.dispatch(*args).provider
        got = op(*args)
    pairs = zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, native)))
    return chosen, max((a.double() - b.double()).abs().max().item() for a, b in pairs)

w, add, norm = torch.ones, ir.ops.fused_add_rms_norm, ir.ops.rms_norm
half = torch.bfloat16
found = {
    "norm": compare(norm, random(5, 128), random(128), 1e-6),
    "norm of heads": compare(norm, random(5, 4, 24), random(24), 1e-6),
    "norm without weight": compare(norm, random(5, 128), None, 1e-6),
    "added": compare(add, random(5, 128), random(5, 128), random(128), 1e-5),
    "rows within a vector": compare(norm, random(5, 12), random(12), 1e-6),
    "heads of a projection": compare(norm, random(5, 8, 32)[:, :4], random(32), 1e-6),
    "bfloat16": compare(norm, random(5, 128, dtype=half), random(128, dtype=half), 1e-6),
    "bfloat16 added": compare(add, random(5, 128, dtype=half), random(5, 128, dtype=half), random(128, dtype=half), 1e-6),
    "part of a row": compare(norm, random(5, 128), random(128), 1e-6, 64),
}
json.dump(found, sys.stdout)
"""  # noqa: E501


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[str, float]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, tuple[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("case", ["norm", "norm of heads", "norm without weight", "added"])
def test_rows_of_float32_are_normed_by_the_kernels_as_vllm_defines_it(
    found: dict[str, tuple[str, float]], case: str
) -> None:
    chosen, gap = found[case]
    assert chosen == "megatron_rl"
    assert gap < 4e-6  # float32 values of up to some ten, sums in another order


@pytest.mark.parametrize(
    "case", ["rows within a vector", "heads of a projection", "bfloat16", "bfloat16 added", "part of a row"]
)
def test_what_the_kernels_refuse_or_round_otherwise_is_left_to_vllms_definition(
    found: dict[str, tuple[str, float]], case: str
) -> None:
    assert found[case] == ["native", 0.0]
