"""Building and loading of kernels/csrc: once, whole or not at all, and with the compiler's words when it fails."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_kernels import native

SMALL = 'extern "C" int answer() { return ANSWER; }\n'


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with one small source in place of kernels/csrc."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "host.cpp").write_text(f'#include "answer.h"\n{SMALL}')
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(native, "SOURCES", folder)
    return folder


def _answer(library):
    return ctypes.CDLL(str(library.path)).answer()


def test_a_library_is_built_once_and_again_when_a_header_changes(sources, tmp_path):
    cache = tmp_path / "cache"
    first = native.build_host(cache=cache)
    assert _answer(first) == 42
    built = first.path.stat().st_mtime_ns
    assert native.build_host(cache=cache).path.stat().st_mtime_ns == built
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    second = native.build_host(cache=cache)
    assert second.path != first.path and _answer(second) == 43
    # nothing half-made stays behind
    assert {path.suffix for path in cache.iterdir()} == {".so", ".log", ".lock"}


def test_a_source_that_does_not_compile_raises_with_the_words_of_the_compiler(sources, tmp_path):
    (sources / "answer.h").write_text("#error this is not an answer\n")
    with pytest.raises(
        native.BuildError, match=r"(?s)g\+\+ .*host\.cpp.* failed with exit code 1:.*not an answer"
    ):
        native.build_host(cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (native.build_host, r"impl = 'host' needs a C\+\+ compiler, and none of no-such-compiler was found"),
        (
            lambda **kw: native.build_cuda("sm_90a", **kw),
            r"impl = 'cuda' needs nvcc \(CUDA toolkit\), and none of",
        ),
    ],
    ids=["host", "cuda"],
)
def test_a_machine_without_a_compiler_is_told_so(build, text, tmp_path):
    with pytest.raises(native.BuildError, match=text):
        build(cache=tmp_path, compiler="no-such-compiler")


def test_an_installation_without_sources_and_a_cache_that_is_a_file_are_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(native.BuildError, match=r"cannot build host\.cpp in .*file"):
        native.build_host(cache=tmp_path / "file")
    monkeypatch.setattr(native, "SOURCES", tmp_path / "nowhere")
    with pytest.raises(
        native.BuildError, match=r"nowhere/host\.cpp does not exist: C\+\+ sources come with a checkout"
    ):
        native.build_host(cache=tmp_path)


def test_processes_that_build_at_once_all_get_a_whole_library(sources, tmp_path):
    script = (
        "import ctypes, sys; from pathlib import Path; from megatron_rl_kernels import native\n"
        "native.SOURCES = Path(sys.argv[1])\n"
        "print(ctypes.CDLL(str(native.build_host(cache=Path(sys.argv[2])).path)).answer())\n"
    )
    package = str(Path(native.__file__).parents[1])
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(sources), str(tmp_path / "cache")],
            env={"PYTHONPATH": package, "PATH": "/usr/local/bin:/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [job.communicate(timeout=120)[0].strip() for job in jobs] == ["42"] * 2
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((8, 0), "sm_80")]
)
def test_the_architecture_follows_the_device(capability, arch):
    assert native._arch(*capability) == arch
