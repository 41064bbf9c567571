"""How does the process that runs one generated program begin, speak and end, seen from outside?"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

REMEDY = ("it needs Linux on x86-64 or aarch64, a 64-bit Python, and a kernel and container that permit seccomp "
          "filters (CONFIG_SECCOMP_FILTER)")
LARGEST_FILE, _LARGEST_FOLDER, _MOST_FILES = 2**23, 2**26, 1000  # bytes, bytes, files
_STARTING = 60.0  # seconds until an interpreter on a busy machine has confined itself
_LOOK = 0.05  # seconds between two looks at the scratch folder
_LONGEST_REPORT = 2**16
_KINDS = ("failed", "error", "syntax", "exit", "memory")


class ConfinedProcess:
    """One process, from its start to its verdict."""

    def __init__(self, order: dict[str, object], scratch: str) -> None:
        self.token, self.scratch, self.said = f"R{order['token']}".encode(), scratch, b""
        self.reports, report = os.pipe()
        try:
            self.process = _start(scratch, report)
        except BaseException:
            os.close(self.reports)
            raise
        finally:
            os.close(report)
        self.order = json.dumps({**order, "report": report}).encode()

    def run(self, timeout: float) -> tuple[str, str, float]:
        """(kind, detail, seconds) as in ProgramOutcome; RuntimeError where the process cannot confine itself."""
        try:
            self._tell()
            begun = time.monotonic()
            limit = self._listen(begun + timeout)
            seconds = time.monotonic() - begun
        finally:
            self._kill()
            os.close(self.reports)
            self.process.stderr.close()
        kind, detail = limit or self._verdict()
        if kind == "timeout":
            detail = f"not finished after {timeout:g} seconds"
        return kind, detail, seconds

    def _tell(self) -> None:
        """Hand over the program and wait until its process is confined; RuntimeError where that fails."""
        with contextlib.suppress(BrokenPipeError), self.process.stdin as order:  # ended unread: why is read below
            order.write(self.order)
        if self._heard(_STARTING) and self.said[:1] == b"R":
            return
        self._kill()
        lines = self.process.stderr.read(_LONGEST_REPORT).decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"its process ended with {self.process.returncode}, or hung"
        raise RuntimeError(f"a generated program cannot be confined, so it is not run: {reason}; {REMEDY}")

    def _listen(self, end: float) -> tuple[str, str] | None:
        """Read reports until the process is silent or over a limit, and then say which."""
        while (left := end - time.monotonic()) > 0:
            if self._heard(min(left, _LOOK)) is False:
                return self._ended(left)
            if len(self.said) > _LONGEST_REPORT:
                return "tampered", f"more than {_LONGEST_REPORT} bytes where verdicts are written"
            if disk := over_disk(self.scratch, self.process.pid):
                return "disk", disk
        return "timeout", ""

    def _heard(self, seconds: float) -> bool | None:
        """True: something was said; False: nothing will be any more; None: silence for so long."""
        if not select.select([self.reports], [], [], seconds)[0]:
            return None
        piece = os.read(self.reports, _LONGEST_REPORT)
        self.said += piece
        return bool(piece)

    def _ended(self, left: float) -> tuple[str, str] | None:
        """The pipe is closed, which an honest process does by ending."""
        try:
            self.process.wait(min(left, 1.0))
        except subprocess.TimeoutExpired:
            return "tampered", "it closed the descriptor where verdicts are written and went on"
        return None

    def _verdict(self) -> tuple[str, str]:
        status = self.process.returncode
        if self.said == self.token:
            return "passed", ""
        if self.said == b"R":
            return _silent_end(status)
        try:
            told = json.loads(self.said[1:])
            kind, detail = told["kind"], told["detail"]
        except (ValueError, TypeError, KeyError, RecursionError):
            kind = detail = None
        if kind not in _KINDS or not isinstance(detail, str):
            return "tampered", "no verdict, but something else where verdicts are written"
        return kind, detail

    def _kill(self) -> None:
        """The process and its whole group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _start(scratch: str, report: int) -> subprocess.Popen:
    # -I would also ignore PYTHONHASHSEED, and a verdict must not depend on the order of a set; -s, an environment of
    # our own and an empty folder isolate as much.
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-s", "-S", "-B", "-c", _child()], cwd=scratch, pass_fds=(report,), start_new_session=True,
        env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", **kept},
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )


@functools.cache
def _child() -> str:
    return Path(__file__).with_name("sandbox_child.py").read_text(encoding="utf-8")


def _silent_end(status: int) -> tuple[str, str]:
    if status == -signal.SIGXCPU:
        return "timeout", ""
    if status < 0:
        return "crash", f"killed by {signal.Signals(-status).name}"
    return "exit", f"the process ended with status {status} before its tests did"


def over_disk(scratch: str, pid: int) -> str | None:
    """Which limit of the scratch folder is passed? It holds plain files only.

    A file that was removed, replaced or never had a name is in no listing, and takes space as long as it is mapped: it
    counts as one of the largest size. (Open descriptors are few: RLIMIT_NOFILE.)
    """
    used, files = LARGEST_FILE * _removed_and_mapped(scratch, pid), 0
    with os.scandir(scratch) as entries:
        for files, entry in enumerate(entries, 1):
            used += _disk_bytes(entry)
            if used > _LARGEST_FOLDER or files > _MOST_FILES:
                break
    over = used > _LARGEST_FOLDER or files > _MOST_FILES
    return f"over {_LARGEST_FOLDER} bytes or {_MOST_FILES} files in its folder" if over else None


def _removed_and_mapped(scratch: str, pid: int) -> int:
    """How many files that no longer lie in the folder does the process map?"""
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended meanwhile
    folder = f"/{Path(scratch).name}/".encode()
    gone = (line.split(None, 5) for line in lines if folder in line and line.endswith(b" (deleted)"))
    return len({(device, inode) for _, _, _, device, inode, _ in gone})


def _disk_bytes(entry: os.DirEntry) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0  # removed since it was listed
