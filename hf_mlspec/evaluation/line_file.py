"""How does a line of results stay where it was written, whatever kills the process? One writer, one line at a time."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows has no flock: two processes on one file are then not noticed
    fcntl = None


class LineFile:
    """A file of JSON lines, locked for this process; created with its folders if it does not exist.

    locks: whether this system can lock files. Raises BlockingIOError while another process has it locked, OSError for
    a path that cannot be written.
    """

    locks = fcntl is not None

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not buffered: what could not be written must not come later. Open as long as lines are written.
        self._out: IO[bytes] = open(path, "a+b", buffering=0)  # noqa: SIM115
        self._torn = False
        if not self.locks:
            return
        try:
            fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise BlockingIOError(f"{path} is being written by another process") from error

    def read(self) -> bytes:
        """All there is, half a line at the end included."""
        self._out.seek(0)
        return self._out.read()

    def cut(self, length: int) -> None:
        """Keep the first `length` bytes, where there are more."""
        if length < os.fstat(self._out.fileno()).st_size:
            self._out.truncate(length)

    def append(self, line: dict[str, Any], *, allow_nan: bool = True) -> str:
        """Add a line, on disk when this returns (one write, fsync); -> its JSON. OSError where that cannot be: then
        nothing of the line is there, or, where not even that could be had, no other line follows it."""
        text = json.dumps(line, allow_nan=allow_nan)
        if self._torn:
            raise OSError(errno.EIO, "half a line ends this file, and nothing may follow it: open it again")
        before = os.fstat(self._out.fileno()).st_size
        try:
            left = memoryview(text.encode() + b"\n")
            while left:
                left = left[self._out.write(left) :]
            os.fsync(self._out.fileno())
        except BaseException:
            self._torn = True
            self._out.truncate(before)
            self._torn = False
            raise
        return text

    def lies_at(self, path: Path) -> bool:
        """Whether this file is still the one at `path`, where another process may have removed it."""
        return path.exists() and os.path.samestat(path.stat(), os.fstat(self._out.fileno()))

    def close(self) -> None:
        """Unlock the file for other processes."""
        self._out.close()


def whole_lines(text: bytes) -> bytes:
    """The complete lines, without an incomplete last one that a killed process left."""
    return text[: text.rfind(b"\n") + 1]
