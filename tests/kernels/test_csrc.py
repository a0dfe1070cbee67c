"""kernels/csrc as CUDA: compiles without spills, and has no race in an emulation under ThreadSanitizer.

Where nvcc is not installed, what is checked is that the error says so.
"""

import re
import shutil
import subprocess

import pytest

from megatron_rl_kernels import native

EMULATE = ["g++", "-std=c++20", "-O1", "-g", "-fsanitize=thread", "-fopenmp-simd", "-pthread"]


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """Run the emulation, leaving out a barrier by its number (0: none)."""
    binary = tmp_path_factory.mktemp("emulate") / "emulate"
    subprocess.run(
        [*EMULATE, str(native.SOURCES / "emulate.cpp"), "-o", str(binary)], check=True, timeout=200
    )
    return lambda dropped: subprocess.run(
        [str(binary), str(dropped)], capture_output=True, text=True, timeout=100
    )


def test_as_many_threads_give_the_results_of_one_without_a_race(emulate):
    done = emulate(0)
    assert done.stdout == "the same with 16 threads as alone\n"
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("barrier", [1, 2, 3])
def test_every_barrier_is_needed(emulate, barrier):
    done = emulate(barrier)
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
    assert "block_reduce" in done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_cuda_kernels_compile_without_spills(arch):
    if shutil.which("nvcc") is None and shutil.which("/usr/local/cuda/bin/nvcc") is None:
        with pytest.raises(
            native.BuildError, match=r"impl = 'cuda' needs nvcc \(CUDA toolkit\), and none of nvcc"
        ):
            native.build_cuda(arch)
        return
    log = native.build_cuda(arch).log
    memory = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert memory == [("0", "0", "0")] * 9, log
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    # 512 threads with 64 registers are half of a multiprocessor: two blocks fit
    assert len(registers) == 9 and max(registers) <= 64, log
