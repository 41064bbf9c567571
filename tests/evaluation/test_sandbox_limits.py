"""What else was tried against the sandbox, and what can it not stop? The guide says the latter first."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from hf_mlspec.evaluation import run_program
from hf_mlspec.evaluation.sandbox import landlock_abi

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp is of Linux")
LANDLOCK = [False, *([True] if landlock_abi() >= 3 else [])]
both = pytest.mark.parametrize("landlock", LANDLOCK, ids=lambda on: "landlock" if on else "strict")
on_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="machine code of x86-64")
# Calls beside those of test_sandbox.py: (x86-64, aarch64); None: there is none.
CALLS = {
    "sendfile": (40, 71), "splice": (275, 76), "vmsplice": (278, 75), "copy_file_range": (326, 285),
    "pidfd_send_signal": (424, 424), "rt_sigqueueinfo": (129, 138), "tkill": (200, 130), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "name_to_handle_at": (303, 264),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "timer_create": (222, 107), "timerfd_create": (283, 85),
    "eventfd2": (290, 19), "signalfd4": (289, 74), "epoll_create1": (291, 20), "mlockall": (151, 230),
    "mq_open": (180, 180), "msgget": (68, 186), "semget": (64, 190), "add_key": (248, 217), "personality": (135, 92),
    "syslog": (103, 116), "reboot": (169, 142), "swapon": (167, 224), "init_module": (175, 105),
    "kexec_load": (246, 104), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "mount_setattr": (442, 442), "move_mount": (429, 429), "pivot_root": (155, 41), "acct": (163, 89),
    "sethostname": (170, 161), "settimeofday": (164, 170), "landlock_restrict_self": (446, 446), "capset": (126, 91),
    "setgroups": (116, 159), "mknod": (133, None), "mknodat": (259, 33), "fallocate": (285, 47), "sync": (162, 81),
    "memfd_secret": (447, 447), "mbind": (237, 235), "sched_setscheduler": (144, 119), "ioprio_set": (251, 30),
    "pkey_mprotect": (329, 288), "membarrier": (324, 283), "io_setup": (206, 0), "pidfd_getfd": (438, 438),
}  # fmt: skip


@both
def test_no_other_call_gets_through(landlock):
    column = 0 if os.uname().machine == "x86_64" else 1
    numbers = {name: pair[column] for name, pair in CALLS.items() if pair[column] is not None}
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
through = []
for name, number in {numbers!r}.items():
    ctypes.set_errno(0)
    found = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
    if (found, ctypes.get_errno()) != (-1, 1):
        through.append((name, found, ctypes.get_errno()))
assert not through, through"""
    outcome = run_program(program, timeout=5.0, landlock=landlock)
    assert outcome.passed, outcome


@both
@on_x86
@pytest.mark.parametrize("call", [2, 11, 102, 120], ids=["fork", "execve", "socketcall", "clone"])
def test_calls_of_the_32_bit_abi_kill(call, landlock):
    """Machine code that the program makes itself: int 0x80."""
    program = f"""
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(b"\\xb8" + ({call}).to_bytes(4, "little") + b"\\xcd\\x80\\xc3")
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()"""
    outcome = run_program(program, timeout=5.0, landlock=landlock)
    assert outcome.kind == "crash", outcome


DESCRIPTORS = {
    "leases": "fcntl.fcntl(fd, 1024, fcntl.F_RDLCK)",
    "notices": "fcntl.fcntl(fd, 1026, 1)",
    "owners of signals": "fcntl.fcntl(fd, fcntl.F_SETOWN, os.getppid())",
    "locks": "fcntl.lockf(fd, fcntl.LOCK_SH)",
    "locks of files": "fcntl.flock(fd, fcntl.LOCK_SH)",
    "typing into a terminal": "fcntl.ioctl(fd, 0x5412, b'x')",
    "a word whose upper half is ignored": "libc.ioctl(fd, ctypes.c_long((1 << 32) | 0x5412), b'x')",
    "opened again for writing": "open(f'/proc/self/fd/{fd}', 'r+b')",
    "mapped for writing": "mmap.mmap(fd, 10, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)",
    "cut": "os.ftruncate(fd, 0)",
    "written": "os.pwrite(fd, b'x', 0)",
}


@both
@pytest.mark.parametrize("attempt", DESCRIPTORS.values(), ids=DESCRIPTORS)
def test_a_file_that_may_be_read_cannot_be_used_otherwise(attempt, landlock):
    """A source of the standard library, which every program may read."""
    before = Path(os.__file__).stat().st_mtime_ns, Path(os.__file__).stat().st_size
    program = f"""
import ctypes, fcntl, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open(os.__file__, os.O_RDONLY)
found = {attempt}
assert found != -1, "refused" """
    outcome = run_program(program, timeout=5.0, landlock=landlock)
    assert outcome.kind in ("error", "failed"), outcome
    assert (Path(os.__file__).stat().st_mtime_ns, Path(os.__file__).stat().st_size) == before


@both
def test_what_it_cannot_stop(landlock, tmp_path):
    """With Landlock, too: that a file is there, and how large it is. Without: what is in it, and its neighbours."""
    (tmp_path / "secret").write_text("12345")
    program = f"""
import os
path = {str(tmp_path / 'secret')!r}
assert os.stat(path).st_size == 5
found = []
for what in (lambda: open(path).read(), lambda: os.listdir(os.path.dirname(path))):
    try: found.append(what())
    except PermissionError: found.append(None)
assert found == {[None, None] if landlock else ['12345', ['secret']]!r}, found"""
    outcome = run_program(program, timeout=5.0, landlock=landlock)
    assert outcome.passed, outcome


def test_the_guide_says_what_it_cannot_stop_before_what_it_does():
    text = (ROOT / "docs" / "guide" / "evaluation.md").read_text(encoding="utf-8")
    section = text[text.index("## Programs that models write") :]
    cannot, does = section.index("cannot stop"), section.index("What it stops")
    assert cannot < does
    for word in ("search its memory", "Landlock", "terminal", "size", "processor"):
        assert re.search(word.replace(" ", r"\s+"), section[cannot:does]), word
