"""Do readers refuse what is malformed, in their own words, at once and in little memory? Feeds them, and counts.

python -m tests.fuzz --minutes 5                    all readers, the time shared out
python -m tests.fuzz --only gguf --inputs 100000    one of them
python -m tests.fuzz --state DIR --minutes 600      a long run: again with the same folder it goes on
python -m tests.fuzz --state DIR --minutes 0        what it reached so far
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from .corpus import read_corpus
from .harness import Counts, Target, fuzz
from .lines import Lines
from .state import State
from .targets import TARGETS

_TURN = 4.0  # seconds that a reader is fed before the next one
_ROOM = 1 << 30  # bytes of address space beyond those at the start: what is asked for beyond is refused


def told(target: Target, counts: Counts) -> str:
    """A line of the table."""
    rate = counts.inputs / max(counts.seconds, 1e-9)
    return (f"{target.name:24} {counts.inputs:10,} {counts.taken:10,} {counts.refused:10,} {len(counts.errors):6} "
            f"{len(counts.findings):4} {counts.peak:6.2f} {1000 * counts.slowest:7.1f} {rate:8,.0f}")  # fmt: skip


HEAD = (f"{'reader':24} {'inputs':>10} {'taken':>10} {'refused':>10} errors  new memory slowest a second")


def run(targets: list[Target], seconds: float, most: int | None, least: int, seed: int, state: State) -> None:
    """Turn by turn, those first that had fewer than ``least``; what one does not need is the others'."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        while time.monotonic() < end:
            open_ones = [one for one in targets if most is None or state.counts[one.name].inputs < most]
            few = [one for one in open_ones if state.counts[one.name].inputs < least]
            if not open_ones:
                break
            for target in few or open_ones:
                left = end - time.monotonic()
                turn = min(_TURN, max(left, 0) if state.folder else seconds / len(few or open_ones), left)
                if turn > 0:
                    state.begin(target.name)
                    fuzz(target, Path(folder), seed=f"{seed} {target.name} {state.turns[target.name]}", seconds=turn,
                         most=most, counts=state.counts[target.name], pool=state.pools[target.name],
                         lines=state.lines, first=state.first(target.name))  # fmt: skip
                    state.end(target.name)


def bounded() -> None:
    """Whoever asks for memory that a file only claims gets an error that is none of ours."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + _ROOM, hard))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="of all readers together (5)")
    parser.add_argument("--inputs", type=int, help="the most inputs of each")
    parser.add_argument("--least", type=int, default=0, help="as many inputs of each, before any gets more")
    parser.add_argument("--only", metavar="TEXT", help="readers whose name has this text")
    parser.add_argument("--without", metavar="TEXT", help="not those whose name has this one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, metavar="FOLDER", help="where a long run is kept, and goes on")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where inputs that were found something with go")
    parser.add_argument("--lines", action="store_true", help="show the lines that no input reached")
    options = parser.parse_args()
    targets = [one for one in TARGETS if (options.only is None or options.only in one.name)
               and (options.without is None or options.without not in one.name)]  # fmt: skip
    faulthandler.enable()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    state = State(targets, options.state, Lines(), {one.name: [*one.seeds, *read_corpus(one.name)] for one in targets})
    bounded()
    run(targets, 60 * options.minutes, options.inputs, options.least, options.seed, state)
    print(HEAD)
    for target in targets:
        print(told(target, state.counts[target.name]))
    findings = [(name, one) for name, counts in state.counts.items() for one in counts.findings.values()]
    for number, (name, one) in enumerate(findings):
        data = repr(one.data[:100]) + "..." * (len(one.data) > 100)
        print(f"{name} ({one.count} inputs): {one.what}: {one.said}\n    {data}")
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            (options.keep / f"{name.replace(' ', '_')}-{number}{one.suffix}").write_bytes(one.data)
    reached, count = state.lines.share()
    print(f"{sum(counts.inputs for counts in state.counts.values()):,} inputs, {len(findings)} findings; "
          f"{reached:,} of {count:,} lines of readers reached ({100 * reached / count:.1f} %)")
    for file, lines in state.lines.told().items() if options.lines else ():
        print(f"    {file}: {', '.join(map(str, lines))}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
