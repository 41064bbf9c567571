"""Which system calls may a generated program make? A seccomp filter, as bytes, for x86-64 and aarch64.

The filter names what is allowed; every other call, one of a future kernel included, fails with EPERM, and where the C
library then has an older way (clone3, openat2) with ENOSYS. Allowed is what Python needs to compute, to import its
standard library and to read files. Not allowed, and so not listed, are processes and threads (fork, clone, exec),
sockets of any family, signals to anyone, other processes (ptrace, pidfd, process_vm), sessions and process groups,
mounts and namespaces, owners, modes, times and attributes of files, links and folders, shared memory and message
queues, io_uring, bpf, userfaultfd, perf, keyctl, memfd and file handles.

A filter is classic BPF over `struct seccomp_data {int nr; u32 arch; u64 ip; u64 args[6];}` (linux/seccomp.h); each
instruction is `struct sock_filter {u16 code; u8 jt; u8 jf; u32 k;}`.
"""

from __future__ import annotations

import errno
import struct

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # BPF codes: word at k, A & k, A == k, A >= k
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # SECCOMP_RET_*; an errno in the low 16 bits
_NUMBER, _ARCH, _ARGS = 0, 4, 16  # offsets in seccomp_data
_X32 = 0x40000000  # calls of the x32 ABI, which come with the arch of x86-64

# Open for writing in any way: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND, __O_TMPFILE; the same on both machines.
WRITING = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000 | 0o20000000

_ARCHS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*

# name: (number on x86-64, number on aarch64); None where the machine has no such call
_COMPUTE = {
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "msync": (26, 227), "madvise": (28, 233), "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "pause": (34, None), "alarm": (37, None), "getitimer": (36, 102),
    "setitimer": (38, 103), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "getrandom": (318, 278), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "exit": (60, 93),
    "exit_group": (231, 94), "arch_prctl": (158, None),
}
_WHO_AND_WHERE = {
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, None), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "uname": (63, 160),
    "sysinfo": (99, 179), "getrlimit": (97, 163), "getrusage": (98, 165), "getcwd": (79, 17), "umask": (95, 166),
    "chdir": (80, 49), "wait4": (61, 260),
}
_FILES = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18, 68),
    "readv": (19, 65), "writev": (20, 66), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getdents": (78, None),
    "getdents64": (217, 61), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None),
    "pipe2": (293, 59), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46), "close_range": (436, 436),
}
_CHANGE_FOLDER = {
    "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "creat": (85, None),
}
_OPEN = {"open": (2, None), "openat": (257, 56)}
_ABSENT = {"clone3": (435, 435), "openat2": (437, 437)}  # their arguments lie in memory, where no filter reads
_IOCTL, _FCNTL, _PRLIMIT = (16, 29), (72, 25), (302, 261)

_TCGETS, _FIONCLEX, _FIOCLEX = 0x5401, 0x5450, 0x5451  # is it a terminal; close-on-exec, which Python sets by ioctl
_F_DUPFD_CLOEXEC = 1030
_WHOLE_WORD = 0xFFFFFFFF

Test = tuple[int, int, tuple[int, ...]]  # the word at an offset, masked, is one of these


def seccomp_filter(machine: str, *, writing: bool) -> bytes:
    """The filter for this machine, to be given to PR_SET_SECCOMP.

    machine: "x86_64" or "aarch64"; calls of any other ABI, x32 included, kill the process.
    writing: False denies every way to open a file for writing, to rename and to remove it (EACCES); True leaves that
             to Landlock.
    Raises ValueError for a machine without a table.
    """
    if machine not in _ARCHS:
        raise ValueError(f"there is no table of system calls for {machine!r}, only for {' and '.join(_ARCHS)}")
    code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _ARCHS[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for number, tests, refusal in _rules(list(_ARCHS).index(machine), writing):
        body = [*(step for test in tests for step in _checked(test, refusal)), (_RETURN, 0, 0, _ALLOW)]
        code += [(_EQUAL, 0, len(body), number), *body]
    for numbers in _ABSENT.values():
        code += [(_EQUAL, 0, 1, numbers[0]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    code.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def _rules(column: int, writing: bool) -> list[tuple[int, list[Test], int]]:
    """(number, tests that must all hold, errno where one does not) of every call that may be allowed."""
    free = {**_COMPUTE, **_WHO_AND_WHERE, **_FILES, **(_CHANGE_FOLDER if writing else {})}
    rules: list[tuple[int | None, list[Test], int]] = [(numbers[column], [], errno.EPERM) for numbers in free.values()]
    for flags, numbers in enumerate(_OPEN.values(), 1):  # the flags of open are its argument 1, those of openat 2
        read_only = [] if writing else [(_argument(flags), WRITING, (0,))]
        rules.append((numbers[column], read_only, errno.EACCES))
    rules.append((_IOCTL[column], [(_argument(1), _WHOLE_WORD, (_TCGETS, _FIONCLEX, _FIOCLEX))], errno.ENOTTY))
    # F_DUPFD to F_SETFL; not F_SETOWN and F_SETSIG, which send signals, nor locks, which others may wait for
    rules.append((_FCNTL[column], [(_argument(1), _WHOLE_WORD, (0, 1, 2, 3, 4, _F_DUPFD_CLOEXEC))], errno.EPERM))
    rules.append((_PRLIMIT[column], _reads_own_limits(), errno.EPERM))
    return [(number, tests, refusal) for number, tests, refusal in rules if number is not None]


def _reads_own_limits() -> list[Test]:
    """prlimit64(0, resource, NULL, old): process 0 is the caller, and no new limit is given."""
    new_limit = _argument(2)
    return [(_argument(0), _WHOLE_WORD, (0,)), (new_limit, _WHOLE_WORD, (0,)), (new_limit + 4, _WHOLE_WORD, (0,))]


def _argument(index: int) -> int:
    """The offset of an argument's low word; both machines are little-endian."""
    return _ARGS + 8 * index


def _checked(test: Test, refusal: int) -> list[tuple[int, int, int, int]]:
    """Go on behind these instructions if the word is one of the values, else fail with the errno."""
    offset, mask, values = test
    masked = [] if mask == _WHOLE_WORD else [(_AND, 0, 0, mask)]
    tries = [(_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [(_LOAD, 0, 0, offset), *masked, *tries, (_RETURN, 0, 0, _ERRNO | refusal)]
