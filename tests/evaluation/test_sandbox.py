"""Can a generated program get out of its sandbox, feign a pass, or outlive its limit? (Every attempt is made.)"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_mlspec.evaluation import run_program, run_programs, sandbox, sandbox_process
from hf_mlspec.evaluation.sandbox import landlock_abi

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp is of Linux")
LANDLOCK = [pytest.param(False, id="strict")]
if landlock_abi() >= 3:
    LANDLOCK.append(pytest.param(True, id="landlock"))
both = pytest.mark.parametrize("landlock", LANDLOCK)
needs_landlock = pytest.mark.skipif(landlock_abi() < 3, reason="this kernel or container has no Landlock of ABI 3")


def run(program, **options):
    return run_program(program, **{"timeout": 5.0, **options})


@both
def test_a_program_that_holds_its_tests_passes(landlock):
    outcome = run("def add(a, b):\n    return a + b\n\nassert add(1, 2) == 3", landlock=landlock)
    assert (outcome.passed, outcome.kind, outcome.detail) == (True, "passed", "")
    assert 0 < outcome.seconds < 5


@both
@pytest.mark.parametrize(("program", "kind", "detail"), [
    ("assert 1 == 2, 'no'", "failed", "AssertionError: no, line 1"),
    ("\n1 / 0", "error", "ZeroDivisionError: division by zero, line 2"),
    ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
    ("raise StopIteration", "error", "StopIteration"),
    ("def f():\n    return next(iter([]))\nassert f()", "error", "StopIteration"),
    ("def f(:", "syntax", "SyntaxError"),
    ("return 1", "syntax", "SyntaxError"),
    ("x = 1\n\0", "syntax", "null bytes"),
    ("x = '\ud800'", "syntax", "surrogates"),
    ("(" * 10**5, "syntax", "SyntaxError"),
    ("import sys\nsys.exit(0)", "exit", "SystemExit: 0, line 2"),
    ("import os\nos._exit(0)", "exit", "status 0 before its tests"),
    ("input()", "error", "EOFError"),
    ("x = [0] * 10**12", "memory", "MemoryError"),
    ("def f():\n    f()\nf()", "error", "RecursionError"),
    ("import sys\nsys.setrecursionlimit(10**9)\ndef f():\n    sorted([1], key=lambda _: f())\nf()", "crash", "SIG"),
    ("import os\nos.abort()", "crash", "SIG"),
    ("class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E", "error", "no description"),
])  # fmt: skip
def test_how_a_program_ended(program, kind, detail, landlock):
    outcome = run(program, landlock=landlock)
    assert (outcome.passed, outcome.kind) == (False, kind)
    assert detail in outcome.detail


FEIGNS = {
    "printing": "print('passed'); print('R')",
    "write and exit": """
import os
for fd in range(999):
    for text in (b"R", b"passed", b'{"kind": "passed", "detail": ""}'):
        try:
            os.write(fd, text)
        except OSError:
            pass
os._exit(0)""",
    "write and go on": "import os\nfor fd in range(3, 999):\n  try: os.write(fd, b'R')\n  except OSError: pass",
    "close": "import os\nos.closerange(0, 999)",
    "redirect": "import os\nfor fd in range(3, 999):\n  try: os.dup2(1, fd)\n  except OSError: pass",
    "atexit": "import atexit, os, sys\natexit.register(os._exit, 0)\nsys.exit()",
    "frames": """
import os, sys
frame, found = sys._getframe(), []
while frame:
    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
        if isinstance(value, dict):
            found += value.values()
        found.append(value)
    frame = frame.f_back
for text in found:
    if isinstance(text, (str, bytes)) and len(text) == 32:
        for fd in range(3, 999):
            try: os.write(fd, text.encode() if isinstance(text, str) else text)
            except OSError: pass
os._exit(0)""",
    "objects": """
import gc, os
for found in gc.get_objects():
    if type(found).__name__ in ("map", "partial", "list_iterator", "starmap", "chain"):
        try: next(found)
        except BaseException: pass
        try: found()
        except BaseException: pass
os._exit(0)""",
    "another gc": """
import gc, importlib.util, os
other = importlib.util.module_from_spec(gc.__spec__)
gc.__spec__.loader.exec_module(other)
other.unfreeze()
known = other.get_objects()
for found in [*known, *other.get_referrers(os.write), *other.get_referents(*known)]:
    if getattr(found, "func", None) is os.write:
        found()
        break
os._exit(0)""",
}


@both
@pytest.mark.parametrize("program", FEIGNS.values(), ids=FEIGNS)
def test_a_pass_is_not_feigned(program, landlock):
    tests = "\nassert False" if "print" in program else ""
    assert run(program + tests, landlock=landlock).passed is False


def test_a_pass_is_not_feigned_below_a_process_with_many_files():
    """Where verdicts are written has a low number in the program's process, whatever its caller has open."""
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
    try:
        assert run(FEIGNS["redirect"]).passed is False
        assert run("assert 1 < 2").passed
    finally:
        for one in opened:
            os.close(one)


@both
def test_limits_of_time_and_of_reports(landlock):
    begun = time.monotonic()
    outcomes = run_programs(["while True: pass", IGNORES_SIGNALS, CLOSES_AND_SLEEPS, FLOODS], timeout=1.0, workers=4)
    assert time.monotonic() - begun < 8
    assert [outcome.kind for outcome in outcomes] == ["timeout", "timeout", "tampered", "tampered"]
    assert "1 seconds" in outcomes[0].detail
    assert run("import sys\nfor _ in range(2000): sys.stdout.write('x' * 10**5)", landlock=landlock).passed


IGNORES_SIGNALS = "import signal, time\nfor s in (1, 2, 15, 24): signal.signal(s, signal.SIG_IGN)\ntime.sleep(1000)"
CLOSES_AND_SLEEPS = "import os, time\nos.closerange(0, 999)\ntime.sleep(1000)"
FLOODS = """
import os
while True:
    for fd in range(3, 999):
        try: os.write(fd, b'x' * 4096)
        except OSError: pass"""


def test_memory_is_limited():
    grows = "x = []\nwhile True: x.append('a' * 10**6)"
    assert run(grows, memory_bytes=2**27).kind == "memory"
    assert run("x = 'a' * 10**8", memory_bytes=2**28).passed
    assert run("import hashlib, dataclasses", memory_bytes=2**26).passed  # the least that is accepted


REFUSED = {
    "fork": "import os; os.fork()",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "subprocess": "import subprocess; subprocess.run(['true'])",
    "posix_spawn": "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "multiprocessing": "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "thread": "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()",
    "new session": "import os; os.setsid()",
    "signal to the parent": "import os; os.kill(os.getppid(), 9)",
    "signal to all": "import os; os.kill(-1, 9)",
    "other owner of signals": "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "limits": "import resource as r; r.setrlimit(r.RLIMIT_CPU, (1000, 1000))",
    "limits of the parent": "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_NOFILE, (1, 1))",
    "priority": "import os; os.nice(1)",
    "affinity": "import os; os.sched_setaffinity(0, {0})",
    "user": "import os; os.setuid(1)",
    "chroot": "import os; os.chroot('.')",
    "memfd": "import os; os.memfd_create('x')",
    "fifo": "import os; os.mkfifo('x')",
    "folder": "import os; os.mkdir('x')",
    "link": "import os; os.symlink('/etc', 'x')",
    "shared memory": "from multiprocessing.shared_memory import SharedMemory; SharedMemory('x', True, 100)",
    "memory of itself": "open('/proc/self/mem', 'r+b')",
    **{f"socket {family}": f"import socket; socket.socket(getattr(socket, {family!r}), socket.SOCK_DGRAM)"
       for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK")},
    "raw socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "pair of sockets": "import socket; socket.socketpair()",
}  # fmt: skip


@both
@pytest.mark.parametrize("program", REFUSED.values(), ids=REFUSED)
def test_what_leaves_the_process_is_refused(program, landlock):
    outcome = run(program, landlock=landlock)
    assert outcome.kind == "error", outcome
    assert any(word in outcome.detail for word in ("not permitted", "ermission denied", "can't start new thread",
                                                   "not allowed")), outcome  # fmt: skip


@both
@pytest.mark.parametrize("number", {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "bpf": (321, 280),
    "io_uring_setup": (425, 425), "open_by_handle_at": (304, 265), "mount": (165, 40), "unshare": (272, 97),
    "setns": (308, 268), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "keyctl": (250, 219),
    "pidfd_open": (434, 434), "tgkill": (234, 131), "prctl": (157, 167), "seccomp": (317, 277), "shmget": (29, 194),
    "fsopen": (430, 430), "a later one": (600, 600),
}.items(), ids=lambda item: item[0])  # fmt: skip
def test_a_raw_system_call_is_refused(number, landlock):
    column = 0 if os.uname().machine == "x86_64" else 1
    if number[1][column] is None:
        pytest.skip(f"{number[0]} is no call of {os.uname().machine}")
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.syscall(ctypes.c_long({number[1][column]}), *[ctypes.c_long(0)] * 6) == -1
assert ctypes.get_errno() == 1, ctypes.get_errno()"""
    assert run(program, landlock=landlock).passed


def test_calls_of_the_x32_abi_kill():
    if os.uname().machine != "x86_64":
        pytest.skip("x32 is of x86-64")
    outcome = run("import ctypes\nctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 + 57))")
    assert (outcome.kind, outcome.detail) == ("crash", "killed by SIGSYS")


OUTSIDE = {
    "write": "open({0!r}, 'w')", "append": "open({0!r}, 'a')", "update": "open({0!r}, 'r+')",
    "truncate": "os.truncate({0!r}, 0)", "open to truncate": "os.open({0!r}, os.O_RDONLY | os.O_TRUNC)",
    "remove": "os.remove({0!r})", "rename": "os.rename({0!r}, {0!r} + '2')", "replace": "os.rename({0!r}, 'x')",
    "link here": "os.link({0!r}, 'x')", "mode": "os.chmod({0!r}, 0)", "owner": "os.chown({0!r}, 1, 1)",
    "times": "os.utime({0!r}, (1, 1))", "attribute": "os.setxattr({0!r}, 'user.x', b'1')",
    "new file": "open({0!r} + '2', 'x')", "nameless file": "os.open(os.path.dirname({0!r}), os.O_TMPFILE | os.O_RDWR)",
    "new folder": "os.mkdir({0!r} + '2')", "from there": "os.chdir(os.path.dirname({0!r})); open('new', 'w')",
    "folder of temporary files": "open('/tmp/mlspec-escaped', 'w')", "shared memory": "open('/dev/shm/mlspec-x', 'w')",
}  # fmt: skip


@both
@pytest.mark.parametrize("statement", OUTSIDE.values(), ids=OUTSIDE)
def test_nothing_outside_its_folder_changes(statement, landlock, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    before = victim.stat()
    outcome = run("import os\n" + statement.format(str(victim)), landlock=landlock)
    assert outcome.kind == "error", outcome
    assert "ermission denied" in outcome.detail or "not permitted" in outcome.detail
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    after = victim.stat()
    assert (victim.read_text(), after.st_mode, after.st_uid) == ("precious", before.st_mode, before.st_uid)
    assert after.st_mtime_ns == before.st_mtime_ns
    assert not Path("/tmp/mlspec-escaped").exists()


@needs_landlock
def test_its_folder_takes_plain_files_and_goes_afterwards(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    program = """
import os
with open('a', 'w') as file: file.write('x')
os.rename('a', 'b')
assert open('b').read() == 'x' and os.listdir() == ['b']
open(os.devnull, 'w').write('x')"""
    assert run(program).passed
    assert run("open('left', 'w').write('x')\nwhile True: pass", timeout=0.3).kind == "timeout"
    assert list(tmp_path.iterdir()) == []


@needs_landlock
@pytest.mark.parametrize("program", ["while True:\n  n += 1\n  with open(str(n), 'wb') as f: f.write(b'x' * 2**22)",
                                     "while True:\n  n += 1\n  open(str(n), 'w').close()"])
def test_its_folder_is_limited(program):
    assert run("n = 0\n" + program, timeout=20.0).kind == "disk"


HIDES = """
import ctypes, mmap, os
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
for n in range({0}):
    fd = os.open({1} | os.O_RDWR, 0o600)
    os.write(fd, b'x' * 2**23)
    libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)  # no descriptor is kept
    os.close(fd)
    {2}"""


@needs_landlock
@pytest.mark.parametrize(("name", "hide"), [
    ("'a', os.O_CREAT", "os.unlink('a')"), ("'a', os.O_CREAT", "os.rename('a', 'b')"), ("'.', os.O_TMPFILE", ""),
], ids=["removed", "replaced", "nameless"])  # fmt: skip
def test_files_without_a_name_count(name, hide):
    outcome = run(HIDES.format(300, name, hide), timeout=30.0)
    assert (outcome.kind, outcome.detail) == ("disk", "over 67108864 bytes or 1000 files in its folder")
    assert run(HIDES.format(6, name, hide) + "\nimport time\ntime.sleep(0.2)").passed


@needs_landlock
def test_a_large_file_is_refused_and_other_files_are_not_read(tmp_path):
    (tmp_path / "secret").write_text("x")
    assert "File too large" in run("open('a', 'wb').write(b'x' * 2**24)").detail
    assert "ermission denied" in run(f"open({str(tmp_path / 'secret')!r})").detail


def test_the_strict_way_writes_nowhere():
    assert "ermission denied" in run("open('a', 'w')", landlock=False).detail


@both
def test_it_inherits_nothing(landlock, monkeypatch):
    monkeypatch.setenv("MLSPEC_SECRET", "x")
    with socket.socket() as ours:
        os.dup2(ours.fileno(), 900)  # inheritable
        program = f"""
import os, sys
assert set(os.environ) <= {{'PYTHONHASHSEED', 'PYTHONUTF8', 'LC_CTYPE', 'LD_LIBRARY_PATH'}}, set(os.environ)
assert hash('a') == {hash_of_a()}
assert not any('site-packages' in path or path == '' for path in sys.path), sys.path
try: os.fstat(900)
except OSError: pass
else: raise AssertionError('a descriptor of the parent')"""
        try:
            outcome = run(program, landlock=landlock)
        finally:
            os.close(900)
    assert outcome.passed, outcome


def hash_of_a():
    command = [sys.executable, "-S", "-c", "print(hash('a'))"]
    return int(subprocess.run(command, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True).stdout)


@both
def test_the_standard_library_is_there(landlock):
    program = """
import collections, ctypes, datetime, decimal, hashlib, heapq, json, random, re, statistics, string, typing, zoneinfo
from dataclasses import dataclass
@dataclass
class A:
    x: 'int'
assert A(1).x == 1 and hashlib.sha256(b'').hexdigest()[:4] == 'e3b0' and __name__ == 'program'"""
    outcome = run(program, landlock=landlock)
    assert outcome.passed, outcome


def test_order_of_many():
    outcomes = run_programs([f"import time\ntime.sleep({0.2 / (1 + n)})\nassert {n} % 3" for n in range(6)], workers=3)
    assert [outcome.passed for outcome in outcomes] == [False, True, True, False, True, True]
    assert run_programs([]) == []


SLEEPER = """
import sys, types
for name in ("hf_mlspec", "hf_mlspec.evaluation"):  # without importing torch, which takes seconds
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [name.replace(".", "/")]
from hf_mlspec.evaluation.sandbox import run_program
run_program("import time\\ntime.sleep(1000)", timeout=600)
"""


def test_it_ends_with_the_process_that_asked(tmp_path):
    asking = subprocess.Popen([sys.executable, "-c", SLEEPER], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        child = wait_for(lambda: children(asking.pid))
        time.sleep(0.5)  # until it has confined itself
    finally:
        asking.send_signal(signal.SIGKILL)
        asking.wait()
    assert wait_for(lambda: not Path(f"/proc/{child[0]}").exists() or "State:\tZ" in state(child[0]))


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def state(pid):
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return "State:\tZ"


def wait_for(question):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if answer := question():
            return answer
        time.sleep(0.02)
    raise AssertionError("waited for 30 seconds")


def test_without_confinement_nothing_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    sandbox._filter.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"no table .* 'riscv64'.*x86-64 or aarch64"):
            run("pass")
    finally:
        sandbox._filter.cache_clear()
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(sandbox.sys, "platform", "darwin")
        with pytest.raises(RuntimeError, match="cannot be confined on darwin, so it is not run"):
            sandbox._filter.__wrapped__(writing=False)
    monkeypatch.setattr(sandbox, "_filter", lambda writing: b"\xff" * 8)  # what the kernel refuses
    with pytest.raises(RuntimeError, match=r"cannot be confined.*PR_SET_SECCOMP: Invalid argument; it needs Linux"):
        run("pass")
    monkeypatch.setattr(sandbox_process, "_child", lambda: "import no_such_module")
    with pytest.raises(RuntimeError, match="no_such_module"):
        run("pass")


@pytest.mark.parametrize(("options", "error"), [
    ({"timeout": 0}, "timeout=0"), ({"timeout": float("nan")}, "timeout=nan"), ({"memory_bytes": 1000}, "64 MiB"),
])  # fmt: skip
def test_wrong_arguments(options, error):
    with pytest.raises(ValueError, match=error):
        run("pass", **options)


def test_wrong_programs_and_workers():
    with pytest.raises(TypeError, match="a program is a str, got a bytes"):
        run_program(b"pass")
    with pytest.raises(ValueError, match="workers=0"):
        run_programs(["pass"], workers=0)
