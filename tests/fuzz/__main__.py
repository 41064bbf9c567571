"""Do readers refuse what is malformed, in their own words, at once and in little memory? Feeds them, and counts.

python -m tests.fuzz --minutes 5                  all readers, the time shared out
python -m tests.fuzz --only gguf --inputs 100000  one of them
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

from .harness import Counts, Target, fuzz
from .targets import TARGETS


def told(target: Target, counts: Counts) -> str:
    """A line of the table."""
    rate = counts.inputs / max(counts.seconds, 1e-9)
    return (f"{target.name:20} {counts.inputs:9,} {counts.taken:9,} {counts.refused:9,} {len(counts.findings):4} "
            f"{counts.peak:6.2f} {rate:8,.0f}")  # fmt: skip


def run(targets: list[Target], seconds: float, most: int | None, seed: int, folder: Path) -> dict[str, Counts]:
    """The counts of each, the time shared out evenly: what one does not need is the others'."""
    end, found = time.monotonic() + seconds, {}
    for number, target in enumerate(targets):
        share = max(end - time.monotonic(), 0) / (len(targets) - number)
        found[target.name] = fuzz(target, folder, seed=seed, seconds=share, most=most)
        print(told(target, found[target.name]), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="of all readers together (5)")
    parser.add_argument("--inputs", type=int, help="the most inputs of each")
    parser.add_argument("--only", metavar="TEXT", help="readers whose name has this text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where inputs that were found something with go")
    options = parser.parse_args()
    targets = [one for one in TARGETS if options.only is None or options.only in one.name]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    print(f"{'reader':20} {'inputs':>9} {'taken':>9} {'refused':>9} new  memory  a second")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        found = run(targets, 60 * options.minutes, options.inputs, options.seed, Path(folder))
    findings = [(name, one) for name, counts in found.items() for one in counts.findings.values()]
    for number, (name, one) in enumerate(findings):
        data = repr(one.data[:100]) + "..." * (len(one.data) > 100)
        print(f"{name} ({one.count} inputs): {one.what}: {one.said}\n    {data}")
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            (options.keep / f"{name.replace(' ', '_')}-{number}{one.suffix}").write_bytes(one.data)
    print(f"{sum(counts.inputs for counts in found.values()):,} inputs, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
