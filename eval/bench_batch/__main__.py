"""How many lines a second does `mlspec batch` answer with several workers of Ray, beside one?

    python -m eval.bench_batch --model FOLDER --workers 1,2 --level mxfp4

Every number of workers answers a short file and a long one, in turn, each in processes of its own: what the long one
takes more is of its additional lines alone, not of starting Ray and loading models. Each worker has one thread. One
JSON object a line; the last one has the ratios to the first number of workers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_mlspec
from eval.plans.options import counts


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_batch", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder (the target of the demo pair)")
    parser.add_argument("--level", action="append", default=[], help="a word or a folder")
    parser.add_argument("--workers", type=counts, default=[1, 2], help="(1,2)")
    parser.add_argument("--lines", type=counts, default=[16, 400], help="of the short and the long file (16,400)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a line (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="(%(default)s)")
    args = parser.parse_args(argv)
    if len(args.lines) != 2 or args.lines[0] >= args.lines[1]:
        parser.error("--lines takes two numbers, the smaller one first")
    if args.repeats < 1 or args.new_tokens < 1:
        parser.error("--repeats and --new-tokens are 1 or more")
    args.model = args.model or str(hf_mlspec.demo_pair()[0])
    return args


def rate(short: tuple[int, float], long: tuple[int, float]) -> float:
    """Lines a second of what the long file has more; inputs are lines and seconds. ValueError where that took no
    time."""
    if long[1] <= short[1]:
        raise ValueError(f"{long[0]} lines took {long[1]:.1f} s and {short[0]} lines {short[1]:.1f} s: give more "
                         "--lines, or the machine less to do")
    return (long[0] - short[0]) / (long[1] - short[1])


def answered(args: argparse.Namespace, workers: int, lines: int) -> float:
    """Seconds of one run, all of whose lines have answers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "in.jsonl"
        asked = [{"prompt": f"def f{number}(x):\n    ", "max_tokens": args.new_tokens} for number in range(lines)]
        file.write_text("".join(f"{json.dumps(one)}\n" for one in asked))
        command = [sys.executable, "-m", "mlspec_cli", "batch", str(file), f"{folder}/out", "--model", args.model,
                   "--lines-per-file", "8", "--workers", str(workers), "--json"]  # fmt: skip
        for level in args.level:
            command += ["--level", level]
        began = time.perf_counter()
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                              check=False)
        if done.returncode:
            raise ValueError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "mlspec batch failed")
        return time.perf_counter() - began


def measured(args: argparse.Namespace, run: Callable[[argparse.Namespace, int, int], float], say: Callable[[dict], Any]
             ) -> None:
    """Rates of all numbers of workers in turn, and the ratio of their medians to the first one's."""
    rates: dict[int, list[float]] = {workers: [] for workers in args.workers}
    for repeat in range(args.repeats):
        for workers in args.workers:
            few, many = [(lines, run(args, workers, lines)) for lines in args.lines]
            own = rate(few, many)
            rates[workers].append(own)
            say({"kind": "run", "repeat": repeat, "workers": workers, "lines_per_second": round(own, 3)})
    median = {workers: statistics.median(found) for workers, found in rates.items()}
    first = median[args.workers[0]]
    say({"kind": "ratio", **{str(workers): round(own / first, 3) for workers, own in median.items()}})


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        measured(args, answered, lambda line: print(json.dumps(line), flush=True))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
