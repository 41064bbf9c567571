"""How is a reader fed malformed inputs, and what must never happen meanwhile?

A reader takes an input, or raises an error that this project wrote: one that a `raise` statement of ours made, of a
kind that the reader's documentation names. Anything else (a KeyError of a dict, a message of the standard library, a
crash) is a finding, and so is an input that takes longer than a second, or memory beyond twice the file, and one that
becomes something else than it says (`Wrong`).
"""

from __future__ import annotations

import linecache
import os
import random
import signal
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from .lines import Lines
from .mutate import changed_bytes, changed_text

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / name}/" for name in ("hf_mlspec", "eval", "mlspec_cli"))
MOST_SECONDS = 1.0
ENDS_SECONDS = 20.0  # a reader that takes twice as long is ended
_MOST_BYTES = 8 << 20  # a reader's own buffers, beside twice the file
_MEMORY_OF, _LINES_OF = 64, 16  # of so many inputs the memory, and the lines, of one are looked at
_LARGEST = 1 << 16  # bytes of an input that joins the pool


class Wrong(Exception):
    """A reader took an input and made something else of it than it says."""


@dataclass(frozen=True)
class Target:
    """A reader.

    name: in words. seeds: good inputs. read: takes the path of a file with an input, or the bytes themselves where
    there are no suffixes. suffixes: of that file, one at a time. errors: the kinds that it documents. change: an input
    and a generator -> what says something else; None where it cannot tell, and bytes are changed. mend: gives an input
    a checksum that fits, so that what is behind the check is reached; None where there is none. drawn: an input is
    eight bytes, with which `read` seeds the generator that makes what is malformed.
    """

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[Any], object]
    errors: tuple[type[BaseException], ...] = (ValueError,)
    suffixes: tuple[str, ...] = (".bin",)
    change: Callable[[bytes, random.Random], bytes | None] = changed_text
    mend: Callable[[bytes], bytes] | None = None
    drawn: bool = False


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
    """What became of a target's inputs. errors: by the place that raised them. peak: the largest memory, as a part of
    what a reader may take. slowest: in seconds of this thread."""

    inputs: int = 0
    taken: int = 0
    refused: int = 0
    peak: float = 0.0
    slowest: float = 0.0
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)

    def found(self, what: str, data: bytes, suffix: str, said: object = "") -> None:
        """Keep the shortest input of each kind."""
        known = self.findings.get(what)
        if known is None or len(data) < len(known.data):
            self.findings[what] = Finding(what, str(said)[:80], data, suffix, known.count if known else 0)
        self.findings[what].count += 1


def inputs(target: Target, chance: random.Random, pool: Sequence[bytes]) -> Iterator[bytes]:
    """Malformed inputs without end. pool: of what they are made; it may grow meanwhile."""
    while target.drawn:
        yield chance.randbytes(8)
    while True:
        data = pool[int(chance.random() * len(pool))]
        changed = target.change(data, chance) if chance.random() < 0.5 else None
        if changed is None:
            changed = changed_bytes(data, pool, chance)
        yield target.mend(changed) if target.mend and chance.random() < 0.5 else changed


def fuzz(
    target: Target, folder: Path, *, seed: int | str, seconds: float, most: int | None = None,
    counts: Counts | None = None, pool: list[bytes] | None = None, lines: Lines | None = None,
    first: Sequence[bytes] | None = None,
) -> Counts:  # fmt: skip
    """Feed a target until the time is over, or it had `most` inputs in all.

    counts, pool: of earlier runs, which go on. lines: those that nobody reached; inputs that reach one join the pool.
    first: inputs that come before those that are made; None: the good ones.
    """
    begin, chance = time.monotonic(), random.Random(seed)
    counts, pool = counts or Counts(), pool if pool is not None else list(target.seeds)
    known = iter(target.seeds if first is None else first)
    made = inputs(target, chance, pool)
    with _Clock(counts):
        while time.monotonic() - begin <= seconds and counts.inputs != most:
            data = next(known, None)
            looked_at = data is not None or counts.inputs % _LINES_OF == 1
            suffix = target.suffixes[int(chance.random() * len(target.suffixes))] if target.suffixes else ""
            data = next(made) if data is None else data
            if feed(target, data, suffix, folder, counts, lines if looked_at else None):
                pool += [data] if len(data) <= _LARGEST and data not in pool else []
    counts.seconds += time.monotonic() - begin
    return counts


def feed(
    target: Target, data: bytes, suffix: str, folder: Path, counts: Counts, lines: Lines | None = None
) -> bool:
    """One input; whether it reached one of the lines, where any are given, that none reached before."""
    given: Any = data
    if target.suffixes:
        given = folder / f"input{suffix}"
        _write(given, data)
    memory, reached = counts.inputs % _MEMORY_OF == _MEMORY_OF - 1, 0
    counts.inputs += 1
    if lines is not None:
        reached = lines.begin()
    elif memory:
        tracemalloc.start()
    begin = time.thread_time()
    try:
        target.read(given)
        counts.taken += 1
    except _TooLong:
        counts.found(f"it takes longer than {ENDS_SECONDS:.0f} s", data, suffix)
    except Wrong as error:
        counts.found(f"it is something else than it says: {error}", data, suffix)
    except Exception as error:
        counts.refused += 1
        place, problem = _judged(error, target.errors)
        counts.errors[place] += 1
        if problem:
            counts.found(problem, data, suffix, error)
    taken = time.thread_time() - begin
    if lines is not None:
        return lines.end() > reached
    if memory:
        peak = tracemalloc.get_traced_memory()[1] / (2 * len(data) + _MOST_BYTES)
        tracemalloc.stop()
        counts.peak = max(counts.peak, peak)
        if peak > 1:
            counts.found("it takes more memory than twice the file", data, suffix)
    elif taken > counts.slowest:
        counts.slowest = taken
        if taken > MOST_SECONDS:
            counts.found(f"it takes longer than {MOST_SECONDS:.0f} s", data, suffix, f"{taken:.1f} s")
    return False


def _write(path: Path, data: bytes) -> None:
    """As `Path.write_bytes`, in a third of the time."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(file, data)
    os.close(file)


_judgements: dict[tuple, tuple[str, str]] = {}


def _judged(error: BaseException, kinds: tuple[type[BaseException], ...]) -> tuple[str, str]:
    """Where an error comes from, and what is wrong with it; "" where it is one of ours."""
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    key = type(error), last.tb_frame.f_code.co_filename, last.tb_lineno, kinds
    if (known := _judgements.get(key)) is None:
        known = f"{type(error).__name__} of {Path(key[1]).name}:{key[2]}", foreign(error, kinds)
        if not known[1]:  # a foreign one is found in several places of ours
            _judgements[key] = known
    return known


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


class _Clock:
    """Ends an input that goes on and on. It strikes every few seconds: no input pays for it."""

    def __init__(self, counts: Counts, seconds: float = 0.0) -> None:
        self.counts, self.seen, self.seconds = counts, -1, seconds or ENDS_SECONDS

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGALRM, self._strike)
        signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)

    def _strike(self, number: int, frame: FrameType | None) -> None:
        if self.seen == self.counts.inputs:
            self.seen = -1  # the next strike may come before the next input
            raise _TooLong
        self.seen = self.counts.inputs
