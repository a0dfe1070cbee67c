"""launch/packages.sh: installs what is missing where it may, says what to do where it may not, and never fails."""

import os
import shutil
import subprocess

import pytest

from tests.helpers.source import ROOT

TOOLS = ("bash", "dirname", "env", "mkdir", "tee", "timeout")


@pytest.fixture
def machine(tmp_path):
    """A machine of its own commands; `apt-get` and `id` are scripts of the test."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "launch" / "packages.sh", tmp_path / "launch")
    for tool in TOOLS:
        os.symlink(shutil.which(tool), tmp_path / "bin" / tool)

    def run(*, user=0, apt_get=None):
        scripts = {"id": f"echo {user}", **({"apt-get": apt_get} if apt_get is not None else {})}
        for name, script in scripts.items():
            path = tmp_path / "bin" / name
            path.write_text(f"#!/bin/bash\n{script}\n")
            path.chmod(0o755)
        command = ["bash", str(tmp_path / "launch" / "packages.sh"), "chromium", "bubblewrap"]
        environment = {"PATH": str(tmp_path / "bin")}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    run.place = tmp_path
    return run


def test_what_is_missing_is_installed_and_what_is_there_is_left_alone(machine):
    (machine.place / "bin" / "bwrap").symlink_to(shutil.which("bash"))
    done = machine(apt_get=f'echo "$@" >>"{machine.place}/asked"')
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (asked,) = (machine.place / "asked").read_text().splitlines()
    assert asked.endswith("install -y --no-install-recommends chromium")


def test_a_failed_try_says_why_and_is_not_repeated(machine):
    first = machine(apt_get="echo no route; exit 100")
    assert first.returncode == 0
    assert first.stdout.count("apt-get said: no route") == 2
    assert "apt-get install chromium" in first.stdout
    again = machine(apt_get="exit 100")
    assert (again.returncode, again.stdout) == (0, "")


def test_one_who_may_not_install_is_told_what_to_ask_for(machine):
    done = machine(user=1000, apt_get="exit 1")
    assert done.returncode == 0
    assert "the test of the report needs the browser Chromium; install it" in done.stdout
    assert "code_tests needs bubblewrap" in done.stdout
