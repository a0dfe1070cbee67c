"""Which implementation runs: by device or as asked for, said once, refused where it cannot."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from megatron_rl_kernels.dispatch import choose_impl
from tests.helpers.source import ROOT

CPU = torch.device("cpu")


def test_cpus_run_torch_unless_asked_otherwise_and_the_log_says_it_once(caplog):
    with caplog.at_level(logging.INFO, logger="megatron_rl_kernels"):
        for _ in range(3):
            assert (
                choose_impl("an_op", None, device=CPU, offered=("reference", "portable", "triton"))
                == "portable"
            )
        assert choose_impl("an_op", "reference", device=CPU, offered=("reference", "portable")) == "reference"
    assert [record.getMessage() for record in caplog.records] == [
        "an_op runs on portable: the one for cpu tensors",
        "an_op runs on reference: asked for",
    ]


@pytest.mark.parametrize(
    ("impl", "device", "words"),
    [
        (
            "tritn",
            "cpu",
            "op: impl = 'tritn', which does not exist; this op has portable, triton, cuda, host",
        ),
        ("reference", "cpu", "op: impl = 'reference'; this op has portable, triton, cuda, host"),
        ("cuda", "cpu", "impl = 'cuda' needs CUDA tensors, got cpu; here it can be portable, triton, host"),
        ("host", "meta", "impl = 'host' needs CPU tensors, got meta; here it can be portable"),
        ("triton", "meta", "impl = 'triton' needs CUDA tensors"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(impl, device, words):
    with pytest.raises(ValueError) as caught:
        choose_impl("op", impl, device=torch.device(device), offered=("portable", "triton", "cuda", "host"))
    assert words in str(caught.value)


def test_triton_is_refused_on_cpu_tensors_outside_its_interpreter():
    code = (
        "import torch; from megatron_rl_kernels.rmsnorm import rmsnorm;"
        "rmsnorm(torch.ones(2, 8), torch.ones(8), eps=1e-6, impl='triton')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "kernels", capture_output=True, text=True, timeout=120
    )
    assert "rmsnorm: impl = 'triton' needs CUDA tensors (or TRITON_INTERPRET=1), got cpu" in done.stderr
