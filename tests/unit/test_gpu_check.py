"""tools/gpu_check.py and its parts: without a GPU they say so, and in the interpreter their code runs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import torch

from tests.helpers.source import ROOT

PREFIXES = ("gpu_check", "bench_kernels")


@pytest.fixture(scope="module")
def tools():
    """`gpu_check` and `gpu_check_kernels`."""
    before = set(sys.modules)
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("gpu_check"), importlib.import_module("gpu_check_kernels")
    finally:
        sys.path.remove(str(ROOT / "tools"))
        for name in set(sys.modules) - before:
            if name.startswith(PREFIXES):
                del sys.modules[name]


def run(*command, timeout=580):
    return subprocess.run(
        ["env", "TRITON_INTERPRET=1", sys.executable, *command],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["gpu_check", "gpu_check_kernels", "gpu_check_questions", "gpu_check_transfers"]
)
def test_without_a_gpu_each_part_says_so(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert importlib.import_module(name).main([]) == 3
    assert f"{name.split('_transfers')[0]}: no CUDA GPU here" in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_the_questions_are_asked_in_the_interpreter_and_go_into_one_file(tmp_path):
    path = tmp_path / "found.json"
    done = run("tools/gpu_check.py", "--smoke", "--only", "transfers,questions", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(path.read_text())["parts"]
    assert list(parts) == ["questions"]
    answers = parts["questions"]["result"]
    assert len(answers) == 6
    assert [answer for answer in answers if answer["problem"] or not answer["figures"]] == []


@pytest.mark.timeout(600)
def test_kernels_are_compared_with_float64_in_the_interpreter(tmp_path):
    path = tmp_path / "found.json"
    command = ["tools/gpu_check_kernels.py", "--smoke", "--op", "linear_logprob,rmsnorm", "--json", str(path)]
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())
    assert {(one["op"], one["dtype"]) for one in results} == {
        ("linear_logprob", "float32"), ("linear_logprob", "bfloat16"), ("rmsnorm", "float32"), ("rmsnorm", "bfloat16")
    }  # fmt: skip
    assert all("d weight" in one["errors"] for one in results)


def faulty_case(run_it):
    from bench_kernels_cases import Case, Contender, Least, Shape

    right = Contender(run=lambda t: {"logprob": t["x"] * 2.0})
    return Case(
        op="double", shape=Shape(name="s", tokens=4, hidden=1, vocab=1, dtype=torch.float32),
        tensors={"x": torch.arange(4.0)}, row_wise=("x",), leaves=("x",), upstream={"logprob": torch.ones(4)},
        contenders={"triton": Contender(run=run_it)}, reference=right, least=Least(num_bytes=(1.0, 1.0)), num_rows=4,
    )  # fmt: skip


def not_there(t):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("run_it", "problems"),
    [
        (lambda t: {"logprob": t["x"] * 2.0}, []),
        (lambda t: {"logprob": t["x"] * 2.0 + 3e-4}, ["logprob is off by 3.00e-04, at most 2e-04"]),
        (lambda t: {"logprob": t["x"] * 2.0 * float("nan")}, ["logprob is off by nan", "d x is off by nan"]),
        (
            lambda t: {"logprob": t["x"] * 2.0 + torch.rand(4) * 1e-5},
            ["logprob has other bits in a second run"],
        ),
        (not_there, ["RuntimeError: no such kernel"]),
    ],
)
def test_a_wrong_kernel_is_a_problem(tools, run_it, problems):
    found = tools[1].check_case(faulty_case(run_it), "triton", rows=4, smoke=False)
    assert len(found.problems) == len(problems)
    assert all(got.startswith(want) for got, want in zip(found.problems, problems, strict=True))


def test_a_part_that_crashes_or_hangs_ends_alone(tools, tmp_path, monkeypatch):
    monkeypatch.setattr(tools[0], "TOOLS", tmp_path)
    (tmp_path / "crash.py").write_text("import os; os.abort()")
    (tmp_path / "hang.py").write_text("import time; time.sleep(60)")
    (tmp_path / "good.py").write_text("import sys; open(sys.argv[-1], 'w').write('[1]')")
    outcomes = {
        name: tools[0].run(
            tools[0].Part(name=name, command=(f"{name}.py",), timeout_s=limit), tmp_path, smoke=True
        )
        for name, limit in (("crash", 30.0), ("hang", 0.2), ("good", 30.0))
    }
    assert outcomes["crash"].problem == "ended with exit code -6"
    assert outcomes["hang"].problem == "did not end within 0 s"
    assert (outcomes["good"].problem, outcomes["good"].result) == ("", [1])


def test_an_unknown_part_is_refused(tools, capsys):
    with pytest.raises(SystemExit):
        tools[0].main(["--only", "coffee"])
    assert "known parts are transfers, kernels, questions, benchmark" in capsys.readouterr().err
