"""The system-call filter, run as the kernel would run it, for both machines whose numbers it knows."""

from __future__ import annotations

import errno
import struct

import pytest

from megatron_rl.rewards.sandbox.seccomp import build_filter

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435


def refused(number: int) -> int:
    return 0x00050000 | number


def run(machine: str, call: int, argument: int = 0, *, arch: int | None = None) -> int:
    """What the filter returns for a call with its first argument; raises IndexError where it runs off its end."""
    data = struct.pack("=IIQQ", call, ARCH[machine] if arch is None else arch, 0, argument)
    text = build_filter(machine)
    program = [struct.unpack_from("=HBBI", text, at) for at in range(0, len(text), 8)]
    accumulator, counter = 0, 0
    while True:
        code, if_true, if_false, operand = program[counter]
        counter += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif code == 0x06:
            return operand
        else:
            tests = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }
            counter += if_true if tests[code] else if_false


@pytest.mark.parametrize(
    ("machine", "calls"),
    [
        # socket, ptrace, mount, unshare, bpf, memfd_create, io_uring_setup
        ("x86_64", [41, 101, 165, 272, 321, 319, 425]),
        ("aarch64", [198, 117, 40, 97, 280, 279, 425]),
    ],
)
def test_what_no_program_needs_is_refused(machine, calls):
    assert {run(machine, call) for call in calls} == {refused(errno.EPERM)}


@pytest.mark.parametrize(
    ("machine", "calls"),
    [
        # read, write, mmap, execve, exit_group, socketpair, getrandom, futex
        ("x86_64", [0, 1, 9, 59, 231, 53, 318, 202]),
        ("aarch64", [63, 64, 222, 221, 94, 199, 278, 98]),
    ],
)
def test_what_python_needs_is_allowed(machine, calls):
    assert {run(machine, call) for call in calls} == {ALLOW}


@pytest.mark.parametrize("machine", sorted(ARCH))
def test_processes_and_threads_are_allowed_but_no_namespaces(machine):
    clone = CLONE[machine]
    assert run(machine, clone, 0x01200011) == ALLOW  # fork
    assert run(machine, clone, 0x003D0F00) == ALLOW  # a thread
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert run(machine, clone, flag | 17) == refused(errno.EPERM)
    assert run(machine, CLONE3) == refused(errno.ENOSYS)


@pytest.mark.parametrize("machine", sorted(ARCH))
def test_calls_of_another_architecture_end_the_program(machine):
    assert run(machine, 0, arch=0x40000003) == KILL


def test_the_second_set_of_numbers_of_x86_64_is_refused():
    assert run("x86_64", 0x40000000 + 41) == refused(errno.EPERM)


def test_a_machine_whose_numbers_are_unknown_has_no_filter():
    assert build_filter("riscv64") is None
