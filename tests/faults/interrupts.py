"""How does an interrupt come at the n-th bytecode of this project's code?

As a signal: the interpreter raises KeyboardInterrupt where it next looks for signals, so that nothing is tried that a
user's Ctrl-C could not do. interrupts.c counts.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import which
from typing import Any

HERE = Path(__file__).parent
COMPILER = next(filter(which, ("cc", "gcc", "clang")), None)
INCLUDE = Path(sysconfig.get_paths()["include"])
CAN_BE_BUILT = COMPILER is not None and (INCLUDE / "Python.h").exists()
_OURS = b"/hf_mlspec/"


@cache
def counter(folder: Path) -> ctypes.PyDLL:
    """The compiled counter, made in a folder."""
    library = folder / "interrupts.so"
    flags = ["-O1", "-shared", "-fPIC", f"-I{INCLUDE}", "-o", str(library)]
    subprocess.run([COMPILER, *flags, str(HERE / "interrupts.c")], check=True)
    made = ctypes.PyDLL(str(library))
    made.begin.argtypes, made.begin.restype = [ctypes.c_long, ctypes.c_char_p], None
    made.end.argtypes, made.end.restype = [], ctypes.c_long
    return made


def interrupted(made: ctypes.PyDLL, at: int, act: Callable[[], Any]) -> tuple[Any, bool, int]:
    """What `act` gives with an interrupt at bytecode `at`, None where it is ended by it; whether it was; and how many
    bytecodes there were. at: 0: no interrupt."""
    found, ended, count = None, False, 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process of a shell's background ignores it
    try:
        try:
            made.begin(at, _OURS)
            found = act()
        finally:
            count = made.end()
    except KeyboardInterrupt:
        ended = True
    finally:
        signal.signal(signal.SIGINT, before)
    return found, ended, count
