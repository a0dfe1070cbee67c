"""A system-call filter as bytes for `bwrap --seccomp`: no sockets, no namespaces, no tracing, no kernel interfaces.

The filter is a deny list behind namespaces, an unprivileged uid and rlimits, not the only wall.
"""

from __future__ import annotations

import errno
import platform
import struct

# BPF: (code, jump if true, jump if false, operand), see linux/filter.h and linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_X32_BIT = 0x40000000  # x86-64 alone: the same calls under other numbers

# numbers from 424 on are the same on every architecture
_COMMON = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
    "memfd_secret": 447,
}  # fmt: skip
_X86_64 = {
    "shmget": 29, "shmat": 30, "socket": 41, "connect": 42, "bind": 49, "listen": 50, "semget": 64, "msgget": 68,
    "ptrace": 101, "syslog": 103, "personality": 135, "modify_ldt": 154, "pivot_root": 155, "chroot": 161,
    "acct": 163, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "iopl": 172,
    "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "mq_open": 240, "kexec_load": 246,
    "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
    "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313, "memfd_create": 319,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "personality": 92,
    "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "syslog": 116, "ptrace": 117,
    "reboot": 142, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "shmat": 196, "socket": 198,
    "bind": 200, "listen": 201, "connect": 203, "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224,
    "swapoff": 225, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264,
    "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
    "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip
_CLONE3 = 435
# machine: (AUDIT_ARCH of linux/audit.h, number of clone, what is denied)
_MACHINES = {"x86_64": (0xC000003E, 56, _X86_64), "aarch64": (0xC00000B7, 220, _AARCH64)}


def build_filter(machine: str | None = None) -> bytes | None:
    """The filter for a machine (default: this one); None where its call numbers are not known here."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    arch, clone, denied = known
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    program = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32_BIT),
        refuse,
    ]
    for number in sorted([*denied.values(), *_COMMON.values()]):
        program += [(_EQUAL, 0, 1, number), refuse]
    program += [
        # its flags lie in memory, out of a filter's sight; libraries go back to clone when they hear ENOSYS
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        refuse,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
