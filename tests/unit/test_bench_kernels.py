"""tools/bench_kernels.py: what it measures, how rates and floors are derived, and when it shows a speed-up."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.helpers.source import ROOT

NAMES = ("bench_kernels", "bench_kernels_cases", "bench_kernels_report", "bench_kernels_timing")


@pytest.fixture(scope="module")
def tools():
    """The tool's modules by the last word of their names."""
    import importlib

    before = set(sys.modules)
    sys.path.insert(0, str(ROOT / "tools"))
    threads = torch.get_num_threads()
    try:
        yield {
            name.removeprefix("bench_kernels").lstrip("_"): importlib.import_module(name) for name in NAMES
        }
    finally:
        torch.set_num_threads(threads)
        sys.path.remove(str(ROOT / "tools"))
        for name in set(sys.modules) - before:
            if name.startswith("bench_kernels"):
                del sys.modules[name]


def doubled(tools, *, run=None, rows=8, shape="tiny", gemms=(1, 2), name="portable", **more):
    """A case of an op that doubles; its reference is right, its contender what is asked for."""
    cases = tools["cases"]
    right = cases.Contender(run=lambda t: {"out": t["x"] * 2.0})
    return cases.Case(
        op="double",
        shape=cases.SHAPES[shape],
        tensors={"x": torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)},
        row_wise=("x",),
        leaves=("x",),
        upstream={"out": torch.ones(rows, 3)},
        contenders={
            name: cases.Contender(run=run or right.run, gemms=gemms),
            cases.EAGER: cases.Contender(run=right.run, gemms=(1, 2)),
        },
        reference=right,
        least=cases.Least(gemm_flops=100.0, gemms=(1, 3), num_bytes=(10.0, 40.0)),
        num_rows=rows,
        **more,
    )


def lap(tools, forward_s, backward_s, forward_bytes=0, both_bytes=0):
    return tools["timing"].Lap(
        forward_s=forward_s, backward_s=backward_s, wall_s=forward_s + backward_s, forward_bytes=forward_bytes,
        both_bytes=both_bytes,
    )  # fmt: skip


def rows(tools, case, laps, *, tested=True, failed=None, flops_per_s=1000.0):
    ceiling = tools["timing"].Ceiling(flops_per_s=flops_per_s, bytes_per_s=1000.0)
    found = tools["report"].rows_of(case, laps, {}, failed or {}, ceiling, tested=tested)
    return {(row.contender, row.phase): row for row in found}


@pytest.fixture
def two_sides(tools):
    """Rows of a contender of 2 + 2 s beside plain torch of 1 + 3 s."""
    laps = {"portable": [lap(tools, 2.0, 2.0)], "torch eager": [lap(tools, 1.0, 3.0)]}
    return lambda **options: rows(tools, doubled(tools, gemms=(1, 3)), laps, **options)


def test_rates_count_the_products_made_and_those_that_cannot_be_avoided(two_sides):
    both = two_sides()["portable", "both"]
    assert both.tflops_done == pytest.approx(4 * 100.0 / 4.0 / 1e12)
    assert both.tflops_useful == pytest.approx(3 * 100.0 / 4.0 / 1e12)
    assert two_sides()["portable", "backward"].tflops_useful == pytest.approx(2 * 100.0 / 2.0 / 1e12)


def test_the_floor_is_the_larger_of_products_and_bytes(two_sides):
    found = two_sides()
    assert found["portable", "both"].floor_s == pytest.approx(0.3)
    assert found["portable", "both"].floor_share == pytest.approx(0.3 / 4.0)
    assert found["portable", "forward"].floor_s == pytest.approx(0.1)
    by_bytes = two_sides(flops_per_s=1e9)
    assert by_bytes["portable", "both"].floor_s == pytest.approx(0.04)


def test_gradients_made_in_forward_have_a_floor_of_both_phases_together(tools):
    laps = {"portable": [lap(tools, 3.0, 0.1)], "torch eager": [lap(tools, 1.0, 3.0)]}
    found = rows(tools, doubled(tools, gemms=(3, 0)), laps)
    assert found["portable", "forward"].floor_share is found["portable", "backward"].floor_share is None
    assert found["portable", "both"].floor_share == pytest.approx(0.3 / 3.1)
    assert found["portable", "both"].tflops_useful == pytest.approx(300.0 / 3.1 / 1e12)


@pytest.mark.parametrize(("tested", "speed_up"), [(True, 0.5), (False, None), (None, None)])
def test_a_speed_up_is_shown_only_beside_passing_tests(two_sides, tested, speed_up):
    found = two_sides(tested=tested)
    assert found["portable", "forward"].speed_up == speed_up
    assert found["torch eager", "forward"].speed_up is None


def test_quantiles_lie_between_neighbours(tools):
    assert tools["timing"].quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert tools["timing"].quantile([0.0, 10.0], 0.1) == pytest.approx(1.0)
    assert tools["timing"].quantile([7.0], 0.9) == 7.0
    spread = tools["timing"].Spread.of([float(i) for i in range(11)])
    assert (spread.median, spread.p10, spread.p90) == (5.0, 1.0, 9.0)


def test_the_peak_is_the_largest_of_all_rounds_and_backward_has_none(tools):
    mib = 2**20
    laps = {
        "portable": [lap(tools, 1.0, 1.0, 5 * mib, 7 * mib), lap(tools, 1.0, 1.0, 4 * mib, 9 * mib)],
        "torch eager": [lap(tools, 1.0, 1.0)],
    }
    found = rows(tools, doubled(tools), laps)
    assert found["portable", "forward"].peak_mib == 5.0
    assert found["portable", "both"].peak_mib == 9.0
    assert found["portable", "backward"].peak_mib is None


def test_errors_are_those_against_the_reference(tools):
    case = doubled(tools, run=lambda t: {"out": t["x"] * 2.5})
    found = tools["cases"].errors(case, case.contenders["portable"], rows=8)
    assert found == {"out": pytest.approx(0.5 * 23), "d x": pytest.approx(0.25)}
    right = doubled(tools)
    assert tools["cases"].errors(right, right.contenders["portable"], rows=8) == {"out": 0.0, "d x": 0.0}


def test_of_a_sample_row_wise_results_alone_are_compared(tools):
    run = lambda t: {"out": t["x"] * 2.5, "total": t["x"].sum()}  # noqa: E731
    case = doubled(tools, run=run)
    case.reference = tools["cases"].Contender(run=lambda t: {"out": t["x"] * 2.0, "total": t["x"].sum()})
    assert tools["cases"].errors(case, case.contenders["portable"], rows=2) == {
        "out": pytest.approx(2.5), "d x": pytest.approx(0.25)
    }  # fmt: skip
    assert "total" in tools["cases"].errors(case, case.contenders["portable"], rows=8)


def test_inputs_survive_a_contender_that_overwrites_them(tools):
    case = doubled(tools, run=lambda t: {"out": t["x"].detach().zero_()})
    before = case.tensors["x"].clone()
    one = tools["cases"].Contender(run=case.contenders["portable"].run, destroys=("x",))
    tools["timing"].CpuClock().lap(case, one)
    tools["cases"].errors(case, one, rows=8)
    assert torch.equal(case.tensors["x"], before)


def test_a_contender_that_does_not_run_hides_no_other(tools):
    def run(t):
        raise RuntimeError("not on this machine\nat all")

    case = doubled(tools, run=run, unavailable={"elsewhere": "not installed"})
    found = tools[""].run_case(case, tools["timing"].CpuClock(), rounds=2, sample=8)
    assert found.failed == {"elsewhere": "not installed", "portable": "RuntimeError: not on this machine"}
    assert len(found.laps["torch eager"]) == 2
    lines = rows(tools, case, found.laps, failed=found.failed)
    assert lines["portable", "both"].failed == "RuntimeError: not on this machine"
    assert "not installed" in tools["report"].line_of(lines["elsewhere", "both"])


def test_memory_on_a_cpu_is_what_a_lap_adds_at_its_peak(tools):
    size = 64 * 2**20

    def run(t):
        temporary = torch.ones(size, dtype=torch.uint8)
        return {"out": t["x"] * float(temporary[0]) * 2.0}

    case = doubled(tools, run=run)
    found = tools["timing"].CpuClock().lap(case, case.contenders["portable"])
    # pages that the process had to spare are not new
    assert 0.95 * size <= found.forward_bytes < 1.5 * size
    plain = tools["timing"].CpuClock().lap(case, case.contenders["torch eager"])
    assert plain.forward_bytes < size / 4


def test_shapes_are_named_or_given_by_their_sizes(tools):
    shapes_of = tools["cases"].shapes_of
    (one,) = shapes_of("8192x4096x151936/tp4")
    assert (one.tokens, one.hidden, one.vocab, one.local_vocab) == (8192, 4096, 151936, 37984)
    assert [shape.name for shape in shapes_of("reference")] == ["reference"]
    assert {shape.tp for shape in shapes_of("h100")} == {1, 4, 8}
    assert len({shape.name for shape in shapes_of("h100-all")}) == len(shapes_of("h100-all")) > 40
    for wrong in ("huge", "8x8", "8x8x10/tp3", "0x8x8"):
        with pytest.raises(ValueError, match="shapes: "):
            shapes_of(wrong)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--op", "softmax"], "--op softmax does not exist"),
        (["--shapes", "huge"], "'huge' is not known"),
        (["--device", "cuda"], "there is no CUDA device here"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tools, capsys, monkeypatch, arguments, complaint):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        tools[""].main(arguments)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_an_op_without_passing_tests_is_not_tested(tools, monkeypatch, tmp_path):
    monkeypatch.setattr(tools[""], "ROOT", tmp_path)
    directory = tmp_path / "tests" / "kernels"
    directory.mkdir(parents=True)
    assert not tools[""].tests_pass("double")
    (directory / "test_double_good.py").write_text("def test_it(): pass\n")
    assert tools[""].tests_pass("double")
    (directory / "test_double_bad.py").write_text("def test_it(): assert False\n")
    assert not tools[""].tests_pass("double")


@pytest.mark.timeout(600)
def test_every_op_is_measured_at_a_tiny_size(tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, "tools/bench_kernels.py", "--no-tests", "--rounds", "1", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(path.read_text())
    ours = {row["op"] for row in found["rows"] if row["contender"] == "portable"}
    assert ours == {path.parent.name for path in (ROOT / "kernels/megatron_rl_kernels").glob("*/__init__.py")}
    measured = [row for row in found["rows"] if not row["failed"]]
    assert all(row["seconds"]["median"] >= 0 and row["speed_up"] is None for row in measured)
    errors = {
        (row["op"], row["contender"], name): value
        for row in measured if row["dtype"] == "float32" for name, value in row["errors"].items()
    }  # fmt: skip
    assert {key: value for key, value in errors.items() if not value < 1e-5} == {}
    assert set(found["machine"]["ceilings"]) == {"float32"}
    assert found["machine"]["versions"]["torch"] == torch.__version__


def test_floors_of_the_head_follow_from_its_sizes(tools):
    import bench_kernels_floors as floors

    (shape,) = tools["cases"].shapes_of("8192x4096x151936")
    found = floors.floor(shape, floors.CARDS[1])
    assert found.datasheet_s * 1e3 == pytest.approx(10.31, abs=0.01)
    assert found.reached_s * 1e3 == pytest.approx(12.91, abs=0.01)
    head, hidden, logits = 151936 * 4096 * 2, 8192 * 4096 * 2, 8192 * 151936 * 2
    assert found.kept_bytes == 3 * head + 4 * hidden + 2 * head + 4 * logits
    assert found.again_bytes == 4 * head + 4 * hidden + 2 * head + 3 * logits
    assert next(line for line in floors.table([shape]) if "8192" in line).startswith(
        "| 8192x4096x151936 | 10.3 / 12.9 ms | 30.9 / 38.7 ms | 41.2 / 51.6 ms | 16.4 GB: 5.5 ms H100, 3.8 ms H200 |"
    )


@pytest.mark.parametrize(("tested", "ratio"), [(True, "2.00"), (None, "2.00 (not tested)")])
def test_a_file_becomes_a_table_with_a_line_for_each_contender(tools, tmp_path, capsys, tested, ratio):
    import bench_kernels_markdown as markdown

    laps = {"portable": [lap(tools, 0.5, 1.5, 2**20, 2**21)] * 2, "torch eager": [lap(tools, 0.25, 0.75)]}
    case = doubled(tools, unavailable={"elsewhere": "not installed"})
    ceiling = tools["timing"].Ceiling(flops_per_s=1e3, bytes_per_s=1e3)
    found = tools["report"].rows_of(
        case, laps, {"portable": {"out": 1e-6, "d x": 3e-6}}, dict(case.unavailable), ceiling, tested=tested
    )
    about = tools["report"].machine(torch.device("cpu"), {torch.float32: ceiling})
    tools["report"].write_json(tmp_path / "found.json", about, found)
    assert markdown.main([str(tmp_path / "found.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {torch.__version__}" in lines[0]
    assert lines[4] == (
        f"| double, tiny float32 | portable | 500 ms (500 to 500) | 2 s (2 to 2) | {ratio} | 15% | 2 | 3.0e-06 |"
    )
    assert lines[5].startswith("| double, tiny float32 | torch eager | 250 ms | 1 s | 1.00 |")
    assert not any("elsewhere" in line for line in lines)
