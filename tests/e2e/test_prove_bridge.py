"""The tool that proves the bridge on a model: Hugging Face -> megatron-core TP3 x PP2 -> vLLM -> Hugging Face."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.gguf_model import make_source, write_gguf
from tests.helpers.processes import mark_of, processes_of, wait_for

ROOT = Path(__file__).parents[2]
TIME_S = 280.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Llama type, tied, 9 heads over 3 kv heads, a vocabulary that three ranks pad: SmolLM2's shape, but tiny."""
    spec = importlib.util.spec_from_file_location("fetch_smollm2", ROOT / "tools" / "fetch_smollm2.py")
    fetch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetch)
    place = tmp_path_factory.mktemp("models")
    fetch.convert(write_gguf(place / "m.gguf", make_source(place / "source")), place / "m")
    return place / "m"


def prove(model, place, *options):
    """Run the tool with `place` for temporary files and as the mark of its processes."""
    place.mkdir()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    own = {"TMPDIR": str(place), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [
            sys.executable,
            str(ROOT / "tools" / "prove_bridge.py"),
            str(model),
            "--tp",
            "3",
            "--pp",
            "2",
            *options,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, **own, **mark_of(place)},
        timeout=TIME_S + 15,
    )


def assert_nothing_is_left(place):
    wait_for(lambda: not processes_of(place), f"the end of every process of {place}", timeout_s=20.0)
    assert list(place.iterdir()) == []


def test_every_weight_goes_through_the_whole_chain_and_comes_back(model, tmp_path):
    keep = tmp_path / "kept"
    done = prove(model, tmp_path / "place", "--timeout-s", str(TIME_S), "--keep", str(keep))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.endswith("verdict: proven\n")
    assert "FAIL" not in done.stdout and done.stdout.count("\nok  ") == 10
    assert sorted(path.name for path in keep.iterdir()) == ["exported", "logs", "report.json"]
    report = json.loads((keep / "report.json").read_text())
    # every number once: one worker, a tied head, no padding
    tensors = load_file(keep / "exported" / "model.safetensors").values()
    assert report["sync_bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert_nothing_is_left(tmp_path / "place")


def test_a_proof_that_takes_too_long_ends_in_time_and_leaves_nothing(model, tmp_path):
    done = prove(model, tmp_path / "place", "--timeout-s", "4")
    assert done.returncode == 2
    assert "error: --timeout-s: not finished after 4 s; raise it" in done.stderr
    assert_nothing_is_left(tmp_path / "place")
