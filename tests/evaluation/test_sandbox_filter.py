"""Does the filter allow what it lists and nothing else, on both machines? (Its instructions are run by hand.)"""

from __future__ import annotations

import errno
import os
import struct

import pytest

from hf_mlspec.evaluation.sandbox_filter import seccomp_filter

X86, ARM = 0xC000003E, 0xC00000B7
ALLOW, KILL = 0x7FFF0000, 0x80000000
DENY, ABSENT, NO_WRITING = (0x50000 | number for number in (errno.EPERM, errno.ENOSYS, errno.EACCES))


def decide(machine, number, *arguments, arch=None, writing=False):
    """The filter's return value for a call, by interpreting its classic BPF."""
    arch = arch or {"x86_64": X86, "aarch64": ARM}[machine]
    data = struct.pack("=iIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("=HBBI", seccomp_filter(machine, writing=writing)))
    at, word = 0, 0
    while True:
        operation, yes, no, value = code[at]
        at += 1
        if operation == 0x20:
            (word,) = struct.unpack_from("=I", data, value)
        elif operation == 0x54:
            word &= value
        elif operation == 0x06:
            return value
        else:
            at += yes if {0x15: word == value, 0x35: word >= value}[operation] else no


@pytest.mark.parametrize(("machine", "allowed", "denied"), [
    ("x86_64", {"read": 0, "write": 1, "mmap": 9, "exit_group": 231, "getrandom": 318, "openat": 257},
     {"socket": 41, "fork": 57, "clone": 56, "execve": 59, "kill": 62, "ptrace": 101, "truncate": 76, "prctl": 157}),
    ("aarch64", {"read": 63, "write": 64, "mmap": 222, "exit_group": 94, "getrandom": 278, "openat": 56},
     {"socket": 198, "clone": 220, "execve": 221, "kill": 129, "ptrace": 117, "truncate": 45, "prctl": 167}),
])  # fmt: skip
def test_listed_calls_and_others(machine, allowed, denied):
    assert {name: decide(machine, number) for name, number in allowed.items()} == dict.fromkeys(allowed, ALLOW)
    assert {name: decide(machine, number) for name, number in denied.items()} == dict.fromkeys(denied, DENY)
    assert all(decide(machine, number) == DENY for number in range(440, 1000))
    assert decide(machine, 435) == decide(machine, 437) == ABSENT


def test_other_abis_are_killed():
    assert decide("x86_64", 0, arch=0x40000003) == KILL  # i386
    assert decide("x86_64", 0, arch=ARM) == KILL
    assert decide("aarch64", 63, arch=X86) == KILL
    assert decide("x86_64", 0x40000000) == decide("x86_64", -1) == KILL


@pytest.mark.parametrize(("machine", "call", "before"), [("x86_64", 2, 1), ("x86_64", 257, 2), ("aarch64", 56, 2)])
def test_opening_for_writing(machine, call, before):
    for flags in (os.O_WRONLY, os.O_RDWR, 3, os.O_CREAT, os.O_TRUNC, os.O_APPEND, 0o20200000, 0o20000000 | 2):
        arguments = [0] * before + [flags]
        assert decide(machine, call, *arguments) == NO_WRITING
        assert decide(machine, call, *arguments, writing=True) == ALLOW
    assert decide(machine, call, *[7] * before, 0o2200000) == ALLOW  # O_RDONLY, O_CLOEXEC, O_DIRECTORY


def test_folders_change_only_beside_landlock():
    for machine, calls in {"x86_64": (87, 263, 82, 264, 316, 85), "aarch64": (35, 38, 276)}.items():
        assert {decide(machine, call) for call in calls} == {DENY}
        assert {decide(machine, call, writing=True) for call in calls} == {ALLOW}


@pytest.mark.parametrize(("machine", "ioctl", "fcntl", "prlimit"), [("x86_64", 16, 72, 302), ("aarch64", 29, 25, 261)])
def test_calls_with_arguments(machine, ioctl, fcntl, prlimit):
    assert decide(machine, ioctl, 0, 0x5401) == ALLOW
    assert decide(machine, ioctl, 0, 0x5412) == 0x50000 | errno.ENOTTY  # TIOCSTI types into a terminal
    assert {decide(machine, fcntl, 3, command) for command in (0, 1, 2, 3, 4, 1030)} == {ALLOW}
    assert {decide(machine, fcntl, 3, command) for command in (5, 6, 7, 8, 10, 1024, 1026, 1031)} == {DENY}
    assert decide(machine, prlimit, 0, 7, 0) == ALLOW
    assert decide(machine, prlimit, 1, 7, 0) == DENY
    assert decide(machine, prlimit, 0, 7, 1) == decide(machine, prlimit, 0, 7, 1 << 32) == DENY


def test_a_machine_without_a_table():
    with pytest.raises(ValueError, match="no table of system calls for 'riscv64'"):
        seccomp_filter("riscv64", writing=True)
