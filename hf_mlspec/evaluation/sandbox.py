"""Does a generated program pass its tests, run where it can do no harm?

`run_program` starts one Python process per program, in a session and a scratch folder of its own. The process limits
its memory, time and files, drops its privileges, and confines itself with Landlock and a seccomp filter before it
compiles the program: no writing outside the folder, no sockets, no processes or threads, no signals. If that is
not possible, nothing runs.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import secrets
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .sandbox_filter import seccomp_filter
from .sandbox_process import LARGEST_FILE, REMEDY, ConfinedProcess

_LEAST_MEMORY = 2**26  # address space; an interpreter alone takes about 20 MiB
_LEAST_LANDLOCK = 3  # before ABI 3 it does not see that a file is truncated


@dataclass(frozen=True)
class ProgramOutcome:
    """How a program ended.

    passed:  it ran to its end: no test raised.
    kind:    "passed"; "failed" (an assertion), "error" (another exception), "syntax" (it does not compile), "exit" (it
        ended its process before its tests did), "timeout", "memory", "disk", "crash" (a signal) or "tampered" (it
        wrote where results are reported).
    detail:  exception and line, or the limit. The program's own process wrote it, so do not trust it more than the
        program.
    seconds: wall-clock time in the confined process.
    """

    passed: bool
    kind: str
    detail: str
    seconds: float


def run_program(program: str, *, timeout: float = 10.0, memory_bytes: int = 2**30,
                landlock: bool = True) -> ProgramOutcome:
    """Run a program that holds its own tests (HumanEval's `check(...)`, MBPP's asserts) and say how it ended.

    It sees the standard library, an empty standard input, no environment, a fixed hash seed and an empty folder for
    plain files; its module is not `__main__`. It passes when its last line has run. The verdict is a random token that
    the process learns and hides before it runs the program: printing, exiting, closing or writing to descriptors give
    none. Tests and program share one interpreter, though, so a program written against this file could search its
    memory; a model that plays such games needs tests in another process.

    timeout:      wall-clock seconds from confinement to the end, then its process group is killed; CPU seconds, too.
    memory_bytes: address space of the process, at least 64 MiB.
    landlock:     False denies all writing instead of confining it to the folder; so it is where the kernel has no
                  Landlock of ABI 3 (Linux 6.2), and then the program can read what this user can, other processes'
                  environments included.
    Raises RuntimeError where a program cannot be confined, and ValueError or TypeError for arguments out of range.
    """
    _check(program, timeout, memory_bytes)
    abi = landlock_abi() if landlock else 0
    abi = abi if abi >= _LEAST_LANDLOCK else 0
    limits = {"RLIMIT_CPU": math.ceil(timeout) + 1, "RLIMIT_AS": memory_bytes, "RLIMIT_FSIZE": LARGEST_FILE,
              "RLIMIT_NOFILE": 32, "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}
    order = {"program": program, "token": secrets.token_hex(16), "parent": os.getpid(), "landlock": abi,
             "filter": _filter(writing=bool(abi)).hex(), "limits": limits}
    with tempfile.TemporaryDirectory(prefix="mlspec-program-") as scratch:
        kind, detail, seconds = ConfinedProcess(order, scratch).run(timeout)
    return ProgramOutcome(kind == "passed", kind, detail, seconds)


def run_programs(programs: Sequence[str], *, workers: int | None = None, timeout: float = 10.0,
                 memory_bytes: int = 2**30, progress: bool = True) -> list[ProgramOutcome]:
    """`run_program` of each, several at a time; outcomes in the order of the programs.

    workers:  processes at a time; None is one for each processor this process may use.
    progress: a bar, where the error stream is a terminal.
    """
    from tqdm import tqdm

    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers}: give at least 1, or None for one a processor")
    pool = ThreadPoolExecutor(workers or _processors())
    try:
        outcomes = pool.map(lambda program: run_program(program, timeout=timeout, memory_bytes=memory_bytes), programs)
        return list(tqdm(outcomes, "programs", len(programs), disable=None if progress else True))
    finally:
        pool.shutdown(cancel_futures=True)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


@functools.cache
def landlock_abi() -> int:
    """The version of Landlock that the kernel offers here; 0 where it has none, or a container hides it."""
    if not sys.platform.startswith("linux"):
        return 0
    create_ruleset, version = 444, 1  # LANDLOCK_CREATE_RULESET_VERSION
    zero = ctypes.c_long(0)
    return max(0, ctypes.CDLL(None).syscall(ctypes.c_long(create_ruleset), zero, zero, ctypes.c_long(version)))


@functools.cache
def _filter(*, writing: bool) -> bytes:
    """The filter for this machine; RuntimeError where there is none."""
    if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        raise RuntimeError(f"a generated program cannot be confined on {sys.platform}, so it is not run: {REMEDY}")
    try:
        return seccomp_filter(platform.machine(), writing=writing)
    except ValueError as error:
        raise RuntimeError(f"a generated program cannot be confined, so it is not run: {error}; {REMEDY}") from error


def _check(program: str, timeout: float, memory_bytes: int) -> None:
    if not isinstance(program, str):
        raise TypeError(f"a program is a str, got a {type(program).__name__}")
    if not 0 < timeout <= 86400:
        raise ValueError(f"timeout={timeout}: give seconds above 0 and up to 86400")
    if memory_bytes < _LEAST_MEMORY:
        raise ValueError(f"memory_bytes={memory_bytes}: an interpreter needs at least {_LEAST_MEMORY} (64 MiB)")
