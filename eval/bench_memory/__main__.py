"""What does a prepared model hold beyond its weights? One fresh process per way of decoding, peaks of resident memory.

    python -m eval.bench_memory                       # a random-weight 22 x 2048/5632 model in BF16, 2.2 GB
    python -m eval.bench_memory --shape tiny
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hf_mlspec
from eval.records import machine
from eval.targets import SMALL_SHAPES, random_start

WAYS = ("stock", "prepared", "prepared, with its MXFP4 cast as a level")


def measure(shape: str, way: str) -> dict[str, Any]:
    """Resident bytes of this process: with the model loaded, and at the peak of preparing and decoding 16 tokens."""
    target, ids = random_start(shape)
    weights = hf_mlspec.resident_bytes(target)
    levels = {WAYS[0]: None, WAYS[1]: [], WAYS[2]: ["mxfp4"]}[way]
    with machine.PeakMemory() as memory:
        more = {} if levels is None else {"assistant_models": levels}
        target.generate(**ids, max_new_tokens=16, do_sample=False, **more)
    return {"way": way, "shape": shape, "weights": weights, "before": memory.before, "peak": memory.peak}


def in_fresh_process(shape: str, way: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "eval.bench_memory", "--shape", shape, "--way", way]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def table(found: list[dict[str, Any]]) -> Table:
    out = Table("decoding", "weights MB", "resident before MB", "peak MB", "peak adds, of the weights")
    for one in found:
        share = (one["peak"] - one["before"]) / one["weights"]
        sizes = [f"{one[name] / 1e6:.0f}" for name in ("weights", "before", "peak")]
        out.add_row(one["way"], *sizes, f"{share:.3f}")
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_memory", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SMALL_SHAPES), default="llama-1.1b")
    parser.add_argument("--way", choices=WAYS, help="measure this one in this process and print JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(2)
    if args.way:
        print(json.dumps(measure(args.shape, args.way)))
        return 0
    Console().print(table([in_fresh_process(args.shape, way) for way in WAYS]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
