"""How do many cases, or many runs of state machines, go on for as long as there is time, and what is counted?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from instruction_sets import ISAS, is_lacking

from .case import Outcome, draw, run
from .shrink import shrunk

_TELLS, _SLICE = 30.0, 1500  # seconds between two lines; cases on one instruction set


class Counts:
    """What was counted under one seed, kept in a file where there is one."""

    def __init__(self, file: Path | None, seed: int):
        self.file, self.seed, self.told = file, seed, time.monotonic()
        self.next: Counter = Counter()  # by what, the number behind the last one
        self.counted: Counter = Counter()
        self.refusals: Counter = Counter()
        if file is not None and file.exists():
            said = json.loads(file.read_text())
            if said["seed"] != seed:
                raise SystemExit(f"{file} holds counts of seed {said['seed']}, not of {seed}: name another file")
            self.next, self.counted, self.refusals = (Counter(said[w]) for w in ("next", "counted", "refusals"))

    def keep(self) -> None:
        if self.file is not None:
            said = {"seed": self.seed, "next": self.next, "counted": self.counted, "refusals": self.refusals}
            fresh = self.file.with_suffix(".new")
            fresh.write_text(json.dumps(said, indent=1))
            fresh.replace(self.file)

    def tell(self, force: bool = False) -> None:
        if force or time.monotonic() - self.told > _TELLS:
            self.told = time.monotonic()
            print(", ".join(f"{name} {count:,}" for name, count in sorted(self.counted.items())), flush=True)
            self.keep()


def attempt(case: dict[str, Any]) -> Outcome:
    """What came of a case; an error that is no refusal is wrong, too."""
    try:
        return run(case)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return Outcome("wrong", f"{type(error).__name__} in {where}: {error}"[:300])


def cases(seed: int, most: int | None, end: float, file: Path | None = None, first: int | None = None) -> int:
    """Run cases; how many went wrong. first: the number of the first one, else that behind the kept counts."""
    counts, failed = Counts(file, seed), 0
    number = counts.next["cases"] if first is None else first
    last = None if most is None else number + most
    while time.monotonic() < end and (last is None or number < last):
        case = draw(seed, number)
        outcome = attempt(case)
        number += 1
        counts.next["cases"] = number
        counts.counted[f"cases {outcome.word}"] += 1
        if outcome.word == "right":
            counts.counted[f"by {case['engine']}"] += 1
            counts.counted[f"of {case['world']['weights']}"] += 1
        counts.counted["tokens"] += outcome.tokens
        counts.counted["proven ties"] += outcome.ties
        if outcome.word == "refused":
            counts.refusals[outcome.what] += 1
        elif outcome.word == "wrong":
            failed += 1
            tell_failure(seed, number - 1, case, outcome)
        counts.tell()
    counts.tell(force=True)
    return failed


def tell_failure(seed: int, number: int, case: dict[str, Any], outcome: Outcome) -> None:
    """The seed, the number, and the smallest case that fails as well."""
    print(f"WRONG: seed {seed}, case {number}: {outcome.what}\n  {json.dumps(case)}", flush=True)
    small = shrunk(case, lambda one: attempt(one).word == "wrong")
    print(f"  the smallest: {attempt(small).what}\n  {json.dumps(small)}", flush=True)


def on_every_isa(seed: int, most: int | None, end: float, file: Path) -> int:
    """A slice of the cases after another, each on the next instruction set, in a process of its own; how many slices
    failed. file: with the counts."""
    failed, there, turn, done = 0, list(ISAS), 0, 0
    while there and time.monotonic() < end and (most is None or done < most):
        isa = there[turn % len(there)]
        count = min(_SLICE, most - done) if most is not None else _SLICE
        minutes = (end - time.monotonic()) / 60
        command = [sys.executable, "-m", "tests.differential", "--cases", str(count), "--minutes", str(minutes),
                   "--seed", str(seed), "--state", str(file)]  # fmt: skip
        print(f"{isa}:", flush=True)
        result = subprocess.run(command, env={**os.environ, "MLSPEC_CPU_ISA": isa}, stderr=subprocess.PIPE, text=True)
        if result.returncode and is_lacking(isa, result.stderr):
            there.remove(isa)
            continue
        print(result.stderr[-2000:], flush=True)
        failed, turn, done = failed + bool(result.returncode), turn + 1, done + count
    return failed


def machines(seed: int, most: int | None, end: float, file: Path | None = None) -> int:
    """Run state machines in portions, each with a seed of its own; how many portions failed."""
    from .machine import run_machine

    counts, failed, done = Counts(file, seed), 0, 0
    while time.monotonic() < end and (most is None or done < most):
        portion = min(25, most - done) if most is not None else 25
        number = counts.next["machines"]
        steps: Counter = Counter()
        error = run_machine(f"{seed} {number}", portion, steps)
        counts.next["machines"] = number + 1
        counts.counted.update(steps)
        done += portion
        if error:
            failed += 1
            print(f"WRONG: seed {seed}, portion {number} of state machines:\n{error}", flush=True)
        counts.tell()
    counts.tell(force=True)
    return failed


def threads(seed: int, seconds: float) -> int:
    """Eight threads on one model for so long; how many things were wrong. Memory is told behind a tenth of the
    phases, which make what is made once."""
    from .threads import traffic

    found = traffic(seconds, seed=seed)
    for one in found.wrong:
        print(f"WRONG: {one}", flush=True)
    warm, last = found.sizes[len(found.sizes) // 10], found.sizes[-1]
    print(f"{found.calls:,} calls, {found.changes:,} changes beside them, {len(found.sizes)} phases; "
          + "; ".join(f"{name} {a:,} -> {b:,}" for name, a, b in zip(("threads", "files", "bytes"), warm, last,
                                                                     strict=True)))  # fmt: skip
    return len(found.wrong)
