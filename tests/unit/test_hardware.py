"""Machine types: those of the package, and the user's own."""

from pathlib import Path

import pytest

from megatron_rl.errors import RecipeError
from megatron_rl.estimate import hardware
from megatron_rl.estimate.hardware import known_hardware, load_hardware

H100 = Path(hardware.__file__).parent / "gpus/h100-80g.yaml"


def test_the_package_knows_three_machine_types():
    assert known_hardware() == ("b200", "h100-80g", "h200-141g")


@pytest.mark.parametrize("name", known_hardware())
def test_every_machine_type_loads_under_its_own_name(name):
    assert load_hardware(name).name == name


@pytest.mark.parametrize("name", known_hardware())
def test_every_rate_of_a_machine_type_has_its_source_beside_it(name):
    physics, ours = (H100.parent / f"{name}.yaml").read_text().split("# What software reaches")
    rates = [line for line in physics.splitlines() if ": " in line and not line.startswith(("#", "name"))]
    assert len(rates) == 7
    assert [line for line in rates if "#" not in line and not line.startswith("gpus_per_node")] == []
    assert "README.md" in ours


def test_an_own_file_is_read_by_its_path(tmp_path):
    own = tmp_path / "ours.yaml"
    own.write_text(H100.read_text().replace("h100-80g", "ours").replace("3350", "3000"))
    assert (load_hardware(own).name, load_hardware(str(own)).hbm_gb_per_s) == ("ours", 3000)


def test_an_unknown_name_is_answered_with_the_list_and_the_nearest():
    with pytest.raises(
        RecipeError, match=r"--gpu: got 'h100', must be one of b200, h100-80g, .*did you mean 'h100-80g'"
    ):
        load_hardware("h100")


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(RecipeError, match=r"--gpu: no file gpus/h200-141g\.yaml; .*did you mean 'h200-141g'"):
        load_hardware("gpus/h200-141g.yaml")


def test_every_wrong_key_of_a_file_is_listed_with_its_line(tmp_path):
    own = tmp_path / "ours.yaml"
    text = H100.read_text().replace("hbm_frac: 0.8", "hbm_frac: 1.8").replace("memory_gib:", "memory_gb:")
    own.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_hardware(own)
    lines = str(error.value).splitlines()
    assert lines[0].endswith("ours.yaml: 3 problems")
    assert "  memory_gib: missing, must be a number from 0.001 to 1,000,000" in lines
    assert any("unknown key; did you mean 'memory_gib'?" in line for line in lines)
    assert any(line.startswith("  hbm_frac (line ") and "from 0.001 to 1" in line for line in lines)


def test_text_that_is_no_mapping_is_refused(tmp_path):
    own = tmp_path / "ours.yaml"
    own.write_text("- 1\n")
    with pytest.raises(RecipeError, match="must be a mapping"):
        load_hardware(own)


@pytest.mark.parametrize("value", ["1e300", "85520809984", "1e-9", "0", "-1", ".inf"])
def test_an_amount_in_another_unit_is_refused(tmp_path, value):
    own = tmp_path / "ours.yaml"
    own.write_text(H100.read_text().replace("memory_gib: 79.6", f"memory_gib: {value}"))
    with pytest.raises(
        RecipeError, match=r"memory_gib \(line 3\): got .*, must be a number from 0.001 to 1,000,000"
    ):
        load_hardware(own)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("matmul_frac: 0.5", "matmul_frac: 1.0e-300"),
        ("collective_us: 15", "collective_us: 1.0e+300"),
        ("gpus_per_node: 8", "gpus_per_node: 1000000000000"),
    ],
)
def test_figures_that_would_make_every_estimate_infinite_or_endless_are_refused(tmp_path, old, new):
    own = tmp_path / "ours.yaml"
    own.write_text(H100.read_text().replace(old, new))
    with pytest.raises(RecipeError, match=rf"{old.split(':')[0]} \(line \d+\): got "):
        load_hardware(own)
