"""How is a reader fed malformed inputs, and what must never happen meanwhile?

A reader takes an input, or raises an error that this project wrote: one that a `raise` statement of ours made, of a
kind that the reader's documentation names. Anything else (a KeyError of a dict, a message of the standard library, a
crash) is a finding, and so is an input that takes longer than a second, or memory beyond twice the file.
"""

from __future__ import annotations

import linecache
import random
import signal
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .mutate import changed_bytes, changed_text

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / name}/" for name in ("hf_mlspec", "eval", "mlspec_cli"))
MOST_SECONDS = 1.0
_ENDS_SECONDS = 20  # a reader that takes longer is ended
_MOST_BYTES = 8 << 20  # a reader's own buffers, beside twice the file
_WATCHED = 64  # of so many inputs the memory of one is looked at


@dataclass(frozen=True)
class Target:
    """A reader.

    name: in words. seeds: good inputs. read: takes the path of a file with an input. suffixes: of that file, one at a
    time. errors: the kinds that it documents. mend: gives an input a checksum that fits, so that what is behind the
    check is reached; None where there is none.
    """

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[Path], object]
    errors: tuple[type[BaseException], ...] = (ValueError,)
    suffixes: tuple[str, ...] = (".bin",)
    mend: Callable[[bytes], bytes] | None = None


@dataclass
class Finding:
    """An input that something happened with that must not; what: in a line; said: by the error. count: inputs like
    it."""

    what: str
    said: str
    data: bytes
    suffix: str
    count: int = 0


@dataclass
class Counts:
    """What became of a target's inputs."""

    inputs: int = 0
    taken: int = 0
    refused: int = 0
    peak: float = 0.0  # the largest memory, by the size of the file and a megabyte
    seconds: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict)

    def found(self, what: str, data: bytes, suffix: str, said: object = "") -> None:
        """Keep the shortest input of each kind."""
        known = self.findings.get(what)
        if known is None or len(data) < len(known.data):
            self.findings[what] = Finding(what, str(said)[:80], data, suffix, known.count if known else 0)
        self.findings[what].count += 1


def inputs(target: Target, chance: random.Random) -> Iterator[bytes]:
    """Malformed inputs without end, the good ones first."""
    yield from target.seeds
    while True:
        data = chance.choice(target.seeds)
        changed = changed_text(data, chance) if chance.random() < 0.5 else None
        if changed is None:
            changed = changed_bytes(data, target.seeds, chance)
        yield target.mend(changed) if target.mend and chance.random() < 0.5 else changed


def fuzz(target: Target, folder: Path, *, seed: int, seconds: float, most: int | None = None) -> Counts:
    """Feed a target until the time is over, or it had `most` inputs."""
    chance, counts, begin = random.Random(seed), Counts(), time.monotonic()
    for data in inputs(target, chance):
        if time.monotonic() - begin > seconds or counts.inputs == most:
            break
        feed(target, data, chance.choice(target.suffixes), folder, counts)
    counts.seconds = time.monotonic() - begin
    return counts


def feed(target: Target, data: bytes, suffix: str, folder: Path, counts: Counts) -> None:
    """One input."""
    path = folder / f"input{suffix}"
    path.write_bytes(data)
    watched = counts.inputs % _WATCHED == 0
    counts.inputs += 1
    if watched:
        tracemalloc.start()
    begin = time.thread_time()
    try:
        with _ended():
            target.read(path)
        counts.taken += 1
    except _TooLong:
        counts.found(f"it takes longer than {_ENDS_SECONDS} s", data, suffix)
    except Exception as error:
        counts.refused += 1
        if problem := foreign(error, target.errors):
            counts.found(problem, data, suffix, error)
    if (taken := time.thread_time() - begin) > MOST_SECONDS and not watched:
        counts.found(f"it takes longer than {MOST_SECONDS:.0f} s", data, suffix, f"{taken:.1f} s")
    if watched:
        peak = tracemalloc.get_traced_memory()[1] / (2 * len(data) + _MOST_BYTES)
        tracemalloc.stop()
        counts.peak = max(counts.peak, peak)
        if peak > 1:
            counts.found("it takes more memory than twice the file", data, suffix)


def foreign(error: BaseException, kinds: Sequence[type[BaseException]]) -> str:
    """What is wrong with an error; "" where it is one of ours."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    raised = linecache.getline(frame.filename, frame.lineno).strip().startswith("raise")
    if raised and frame.filename.startswith(OURS) and isinstance(error, tuple(kinds)):
        return ""
    place = Path(frame.filename).name
    return f"{type(error).__name__} of {place}, in {_last_of_ours(error)}"


def _last_of_ours(error: BaseException) -> str:
    """Where this project was when a foreign error came."""
    found = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(OURS)]
    return f"{found[-1].filename.removeprefix(f'{ROOT}/')}:{found[-1].lineno}" if found else "outside"


class _TooLong(BaseException):
    """The reader did not end."""


@contextmanager
def _ended() -> Iterator[None]:
    """What takes too long ends here."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_ENDS_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
