"""The ahead-of-time gates: figures of the machine code, the rules, and that all kernels keep to them."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys

import pytest

from tests.helpers.source import ROOT

CLEAN = {
    "registers": 64, "stack_bytes": 0, "shared_bytes": 1024, "hgmma": 0, "hmma": 0, "tf32": 0, "fp64": 0,
    "tma_loads": 0, "loads_16_bytes": 2, "loads_2_bytes": 0, "stores_16_bytes": 2, "spill_stores": 0, "spill_loads": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def gates():
    spec = importlib.util.spec_from_file_location("kernel_gates", ROOT / "tools" / "kernel_gates.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_gates"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["kernel_gates"]


def launched(gates, *, kernel="row_kernel", config="*bf16 | BLOCK=1024", is_product=False, **figures):
    return gates.Launched(
        op="op", kernel=kernel, config=config, is_product=is_product, seconds=0.0, figures=CLEAN | figures
    )


def expectation(gates, one, **figures):
    file = {"triton": "3.7.1", "capability": 90, "tolerance": {"registers": 8}}
    return {one.kernel: {"kernel": one.kernel, **file, "configs": {one.config: one.figures | figures}}}


# a machine that does other things takes minutes for what takes one
SLOW = pytest.mark.timeout(900)
SLOW_S = 880


@SLOW
def test_every_kernel_is_compiled_as_expected_and_breaks_no_rule():
    command = [sys.executable, str(ROOT / "tools" / "kernel_gates.py"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SLOW_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_kernel_that_is_launched_has_an_expectation(gates):
    launched_somewhere = set()
    for path in (ROOT / "kernels" / "megatron_rl_kernels").rglob("triton_op.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # kernel[grid](...)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                kernel = node.func.value
                launched_somewhere.add(kernel.attr if isinstance(kernel, ast.Attribute) else kernel.id)
    assert launched_somewhere - {kernel.split(".")[1] for kernel in gates.load_expected()} == set()


@SLOW
def test_each_fault_is_seen_in_the_machine_code(gates):
    path = f"PYTHONPATH={ROOT / 'kernels' / 'gates'}:{ROOT / 'kernels'}"
    command = [
        "env",
        "-u",
        "TRITON_INTERPRET",
        path,
        sys.executable,
        str(ROOT / "tests/kernels/gate_faults.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SLOW_S)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    seen = {}
    for name, found in figures.items():
        is_product = name in ("product", "tf32")
        one = gates.Launched(
            op="op", kernel=name, config="*bf16", is_product=is_product, seconds=0.0, figures=found
        )
        seen[name] = [
            problem.split(" = ")[0].split(":")[0].split(";")[0] for problem in gates.broken_rules(one)
        ]
    assert seen == {
        "product": [],
        "tf32": [f"{figures['tf32']['tf32']} tf32 instructions"],
        "row": [],
        "strided": ["no load of 16 bytes"],
        "float64": [f"{figures['float64']['fp64']} float64 instructions"],
        "spilling": ["stack_bytes"],
    }


@pytest.mark.parametrize(
    ("figures", "is_product", "problem"),
    [
        ({"shared_bytes": 227 * 1024 + 1}, False, "shared_bytes"),
        ({"registers": 256}, False, "registers"),
        ({"hgmma": 0}, True, "no HGMMA"),
        ({"hgmma": 4, "hmma": 1}, True, "1 HMMA"),
        ({"hgmma": 4, "stack_bytes": 161}, True, "stack_bytes = 161"),
    ],
)
def test_a_broken_rule_is_named_even_where_it_is_expected(gates, figures, is_product, problem):
    one = launched(gates, is_product=is_product, **figures)
    found = gates.check([one], expectation(gates, one), version="3.7.1", capability=90)
    assert len(found) == 1
    assert problem in found[0]


def test_float32_products_need_no_tensor_cores_and_small_kernels_no_wide_loads(gates):
    assert not list(gates.broken_rules(launched(gates, config="*fp32 | BM=64", is_product=True)))
    for kernel in gates.NARROW:
        assert not list(gates.broken_rules(launched(gates, kernel=kernel, loads_16_bytes=0)))
    assert len(list(gates.broken_rules(launched(gates, loads_16_bytes=0)))) == 1


@pytest.mark.parametrize(
    ("figures", "problem"),
    [
        ({"registers": 72}, None),
        ({"registers": 73}, "registers = 64, expected 73 +- 8"),
        ({"loads_16_bytes": 3}, "loads_16_bytes = 2, expected 3"),
        ({"shared_bytes": 0}, "shared_bytes = 1024, expected 0"),
    ],
)
def test_a_figure_may_differ_by_its_tolerance_alone(gates, figures, problem):
    one = launched(gates)
    found = gates.check([one], expectation(gates, one, **figures), version="3.7.1", capability=90)
    assert found == ([] if problem is None else [f"{one.where}: {problem}"])


def test_figures_of_another_triton_are_not_compared_but_its_rules_hold(gates):
    one = launched(gates)
    file = expectation(gates, one, registers=10)
    assert gates.check([one], file, version="3.6.0", capability=90) == []
    assert len(gates.check([launched(gates, fp64=1)], file, version="3.6.0", capability=90)) == 1


def test_another_architecture_is_compiled_and_not_judged(gates):
    one = launched(gates, config="*bf16 | BM=64", is_product=True)
    assert len(gates.check([one], expectation(gates, one), version="3.7.1", capability=90)) == 1
    assert gates.check([one], expectation(gates, one), version="3.7.1", capability=100) == []


def test_new_and_stale_configurations_are_named(gates):
    one, other = launched(gates), launched(gates, config="*fp32 | BLOCK=2048")
    found = gates.check([other], expectation(gates, one), version="3.7.1", capability=90)
    assert [problem.split("]: ")[1] for problem in found] == ["not expected", "expected, not launched"]
    assert "no expectation" in gates.check([one], {}, version="3.7.1", capability=90)[0]
    assert "delete its file" in gates.check([], expectation(gates, one), version="3.7.1", capability=90)[0]


def test_of_a_part_nothing_is_missing(gates):
    one = launched(gates)
    known = expectation(gates, one)
    known["row_kernel"]["configs"]["*fp32 | BLOCK=2048"] = one.figures
    known |= {"other": known["row_kernel"]}
    assert gates.check([one], known, version="3.7.1", capability=90, is_all=False) == []


def test_an_update_keeps_tolerances_and_makes_the_check_pass(gates, tmp_path, monkeypatch):
    monkeypatch.setattr(gates, "EXPECTED", tmp_path)
    one = launched(gates)
    (path,) = gates.update([one], version="3.7.1", capability=90)
    file = json.loads(path.read_text())
    path.write_text(json.dumps(file | {"tolerance": {"registers": 1}}))
    moved = launched(gates, registers=70)
    assert len(gates.check([moved], gates.load_expected(), version="3.7.1", capability=90)) == 1
    gates.update([moved], version="3.7.1", capability=90)
    assert gates.check([moved], gates.load_expected(), version="3.7.1", capability=90) == []
    assert gates.load_expected()["row_kernel"]["tolerance"] == {"registers": 1}


def test_a_python_without_triton_is_an_error_of_its_own(gates, tmp_path, capsys):
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 'No package metadata was found' >&2\nexit 1\n")
    bare.chmod(0o755)
    assert gates.main(["--triton-python", str(bare)]) == 2
    assert "has no Triton" in capsys.readouterr().err


@pytest.fixture
def compiler(gates, tmp_path, monkeypatch):
    """A Python whose Triton gives what `answer.json` says, and writes down how often it was asked."""
    monkeypatch.setattr(gates, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(gates, "EXPECTED", tmp_path / "expected")
    python = tmp_path / "python"
    lines = ("#!/bin/sh", '[ "$1" = -c ] && echo 3.7.1 && exit 0', f"echo asked >> {tmp_path}/calls")
    python.write_text("\n".join([*lines, f"cat {tmp_path}/answer.json"]) + "\n")
    python.chmod(0o755)

    def check(*more, failed=None):
        one = {"op": "op", "kernel": "op.row", "config": "*bf16", "is_product": False, "seconds": 1.0}
        answer = {"triton": "3.7.1", "torch": "2.13.0", "capability": 90, "failed": failed or {}}
        answer["launched"] = [one | {"figures": CLEAN}]
        (tmp_path / "answer.json").write_text(json.dumps(answer))
        code = gates.main(["--triton-python", str(python), *more])
        return code, len((tmp_path / "calls").read_text().splitlines())

    return check


def test_figures_of_the_same_sources_are_compiled_once(compiler):
    assert compiler("--update") == (0, 1)
    assert compiler() == (0, 1)
    assert compiler("--capability", "100") == (0, 2)


def test_a_call_that_does_not_compile_is_a_problem_and_is_tried_again(compiler, capsys):
    failed = {"op: clip": "CompilationError: no"}
    compiler("--update")
    capsys.readouterr()
    assert compiler("--only", "op", failed=failed) == (1, 2)
    assert "op: clip: does not compile\nCompilationError: no" in capsys.readouterr().err
    assert compiler("--only", "op", failed=failed) == (1, 3)


def test_an_op_of_which_a_call_does_not_compile_keeps_its_expectations(gates, compiler):
    compiler("--update")
    before = gates.load_expected()
    before["op.row"]["configs"]["*fp32"] = CLEAN
    (gates.EXPECTED / "op.row.json").write_text(json.dumps(before["op.row"]))
    assert compiler("--update", "--only", "op", failed={"op: clip": "CompilationError: no"})[0] == 1
    assert gates.load_expected() == before
