"""The CPU platform: what it touches, when, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.platform import cpu, device

ROOT = Path(__file__).resolve().parents[2]
# what the names of the table hold, before and after; by identity
SNAPSHOT = "{(p.owner, p.name): id(getattr(p.target(), p.name)) for p in cpu.PATCHED}"


def run_fresh(code: str) -> str:
    """Run code in a process where nothing is patched yet."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_touched_where_an_accelerator_exists() -> None:
    code = """
        import sys
        from megatron_rl.platform import device
        assert device.activate(accelerator=True) is False
        assert not [name for name in sys.modules if name.startswith("megatron.core")]
        from megatron_rl.platform import cpu
        before = {snapshot}
        assert device.activate(accelerator=True) is False
        assert before == {snapshot}
        print("untouched")
    """
    assert run_fresh(unindent(code).replace("{snapshot}", SNAPSHOT)) == "untouched"


def test_a_rank_starts_without_the_compiler_and_every_patched_name_is_ours_afterwards() -> None:
    code = """
        from megatron_rl.platform import cpu, determinism
        compiler = cpu.torch.compile
        cpu.import_uncompiled()
        for patch in cpu.PATCHED:
            assert hasattr(patch.target(), patch.name), patch
            assert getattr(patch.target(), patch.name) is not patch.replacement, patch
        cpu.apply()
        for patch in cpu.PATCHED:
            assert getattr(patch.target(), patch.name) is patch.replacement, patch
        # the compiler is as it was, and nobody has asked for it
        assert cpu.torch.compile is compiler
        determinism.make_deterministic({})
        adam = cpu.FusedAdam([cpu.torch.zeros(1, requires_grad=True)])
        adam.zero_grad()
        adam.load_state_dict(adam.state_dict())
        assert not {"torch._dynamo", "torch._inductor"} & cpu.sys.modules.keys()
        print(len(cpu.PATCHED))
    """
    assert int(run_fresh(unindent(code))) == len(cpu.PATCHED) > 0


def unindent(code: str) -> str:
    return "\n".join(line[8:] for line in code.splitlines())


def test_activating_twice_changes_nothing() -> None:
    assert device.activate(accelerator=False) is True
    before = {(p.owner, p.name): getattr(p.target(), p.name) for p in cpu.PATCHED}
    assert device.activate(accelerator=False) is True
    after = {(p.owner, p.name): getattr(p.target(), p.name) for p in cpu.PATCHED}
    assert all(after[key] is value for key, value in before.items())


def test_each_patch_is_listed_once_with_a_reason() -> None:
    keys = [(patch.owner, patch.name) for patch in cpu.PATCHED]
    assert len(keys) == len(set(keys))
    assert all(len(patch.reason) > 20 for patch in cpu.PATCHED)


@pytest.mark.parametrize("owner", [p.owner for p in cpu.PATCHED if p.name == "torch"])
def test_modules_given_another_torch_do_spell_out_the_device(owner: str) -> None:
    """A patch that a newer megatron-core no longer needs must go."""
    source = Path(sys.modules[owner].__file__ or "").read_text()
    assert 'device="cuda"' in source or "device='cuda'" in source


def test_literal_cuda_means_cpu_inside_those_modules_only() -> None:
    device.activate(accelerator=False)
    from megatron.core.pipeline_parallel import schedules

    assert schedules.torch.zeros([], dtype=torch.int, device="cuda").device.type == "cpu"
    assert schedules.torch.zeros(2, device="meta").device.type == "meta"
    assert schedules.torch.Tensor is torch.Tensor
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_type_of_a_tensor_is_the_truth_outside_the_optimizers() -> None:
    device.activate(accelerator=False)
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype is torch.float64


def test_a_tensor_parallel_fork_draws_its_own_numbers_and_restores_the_others() -> None:
    device.activate(accelerator=False)
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("shard", 2)
    with tracker.fork("shard"):
        inside = torch.rand(4)
    outside = torch.rand(4)
    torch.manual_seed(2)
    assert torch.equal(inside, torch.rand(4))
    torch.manual_seed(1)
    assert torch.equal(outside, torch.rand(4))


def test_without_an_accelerator_the_facts_are_cpu_and_gloo() -> None:
    assert device.has_accelerator() == torch.cuda.is_available()
    expected = ("cuda", "nccl") if device.has_accelerator() else ("cpu", "gloo")
    assert (device.device().type, device.backend()) == expected
