"""tools/bench_compare.py: ratios of two benchmark files, and when they are too much."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from tests.helpers.source import ROOT


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("bench_compare", ROOT / "tools" / "bench_compare.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_compare"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_compare"]


def row(**changes):
    base = {
        "op": "rmsnorm", "variant": "", "shape": "tiny", "dtype": "float32", "contender": "portable", "is_ours": True,
        "phase": "both", "seconds": {"median": 2.0, "p10": 1.9, "p90": 2.2}, "peak_mib": 100.0,
        "errors": {"out": 1e-6, "d x": 4e-6}, "failed": "",
    }  # fmt: skip
    return base | changes


def seconds(median):
    return {"median": median, "p10": median, "p90": median}


def file(*rows, device="cuda", **machine):
    about = {"device": device, "processor": "card", "threads": 1, "versions": {"torch": "2.13.0"}} | machine
    return {"machine": about, "rows": list(rows)}


@pytest.fixture
def run(tool, tmp_path, capsys):
    """Exit code, what is printed, complaints."""

    def run(before, after, *more):
        paths = [tmp_path / "before.json", tmp_path / "after.json"]
        for path, data in zip(paths, (before, after), strict=True):
            path.write_text(json.dumps(data))
        code = tool.main([*map(str, paths), *more])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_same_file_twice_is_within(run):
    code, out, err = run(file(row()), file(row()))
    assert (code, err) == (0, "")
    assert "1.000    1.000    1.000  rmsnorm tiny float32 portable both" in out
    assert "1 rows compared, 0 beyond tolerance" in out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"seconds": seconds(2.19)}, None),
        ({"seconds": seconds(2.21)}, "time beyond 1.1"),
        ({"seconds": seconds(0.5)}, None),
        ({"peak_mib": 106.0}, "memory beyond 1.05"),
        ({"errors": {"out": 1e-6, "d x": 9e-6}}, "error beyond 2"),
        ({"failed": "RuntimeError: no"}, "fails: RuntimeError: no"),
    ],
)
def test_what_is_worse_by_more_than_its_tolerance_fails(run, change, problem):
    code, out, _ = run(file(row()), file(row(**change)))
    assert code == (0 if problem is None else 1)
    assert problem is None or f"<- {problem}" in out


def test_a_row_of_ours_that_is_gone_fails_and_a_new_one_does_not(run):
    code, out, _ = run(file(row(), row(phase="forward")), file(row(), row(phase="backward")))
    assert code == 1
    assert "rmsnorm tiny float32 portable forward  <- gone" in out
    assert run(file(row()), file(row(), row(phase="forward")))[0] == 0


def test_others_show_whether_the_machine_changed_and_are_never_at_fault(run):
    other = {"contender": "torch eager", "is_ours": False}
    code, out, _ = run(file(row(**other)), file(row(**other, seconds=seconds(20.0))))
    assert code == 0
    assert "10.000" in out


def test_tiny_memory_and_rounding_errors_are_not_compared(run):
    before, after = row(peak_mib=0.0, errors={"out": 0.0}), row(peak_mib=7.9, errors={"out": 9e-8})
    code, out, _ = run(file(before), file(after))
    assert code == 0
    assert "1.000    1.000    1.000" in out


def test_the_most_special_tolerance_counts(run, tmp_path):
    path = tmp_path / "tolerances.json"
    special = {"cuda": {"time": 1.5}, "cuda/rmsnorm": {"time": 3.0}, "cpu": {"time": 1.0}}
    path.write_text(json.dumps({"default": {"time": 1.1, "memory": 1.1, "error": 2.0}, **special}))
    slower = row(seconds=seconds(5.0))
    assert run(file(row()), file(slower), "--tolerances", str(path))[0] == 0
    other = {"op": "swiglu"}
    assert run(file(row(**other)), file(slower | other), "--tolerances", str(path))[0] == 1


def test_a_change_of_versions_is_said(run):
    _, out, _ = run(file(row()), file(row(), versions={"torch": "2.14.0"}))
    assert "versions differs: {'torch': '2.13.0'}, then {'torch': '2.14.0'}" in out


def test_files_that_cannot_be_compared_are_named(run, tmp_path):
    code, _, err = run(file(row()), file(row(), device="cpu"))
    assert (code, err) == (2, "bench_compare: one file is of cuda, the other of cpu\n")
    code, _, err = run(file(row()), {"no": "benchmark"})
    assert code == 2
    assert "after.json is not a file of tools/bench_kernels.py" in err
    path = tmp_path / "tolerances.json"
    path.write_text('{"default": {"speed": 1.0}}')
    assert run(file(row()), file(row()), "--tolerances", str(path))[0] == 2


def test_the_default_tolerances_can_be_read(tool):
    assert tool.limits(tool.load_tolerances(tool.TOLERANCES), "cpu", "policy_loss") == {
        "time": 1.3, "memory": 1.25, "error": 2.0
    }  # fmt: skip
