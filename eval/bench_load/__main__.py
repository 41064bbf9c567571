"""How fast are large checkpoints of other libraries loaded, beside our own format, and in how much memory?

    python -m eval.bench_load                       # 2 GB a kind, in a folder that is removed afterwards
    python -m eval.bench_load --quick

Files of random codes are written, read once so that they are in memory, and loaded; every load is a fresh process, and
kinds take turns with our own int4 of the same codes. GB/s are bytes of the file over the seconds of `hf_mlspec.load`;
"peak over the result" is what the process held at most beyond what it held before and the weights that came of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hf_mlspec
from eval.bench_load.written import KINDS, write, write_ours
from eval.records import machine

LAYER_BYTES = 104e6  # of one layer's file


def measure(folder: Path) -> dict[str, Any]:
    """Seconds of a load, the model's resident bytes, and bytes of memory beyond those, at most."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass
    gc.collect()
    with machine.PeakMemory() as memory:
        begin = time.perf_counter()
        model = hf_mlspec.load(folder, dtype=torch.bfloat16)
        seconds = time.perf_counter() - begin
    held = hf_mlspec.resident_bytes(model)
    return {"seconds": seconds, "held": held, "over": memory.peak - memory.before - held}


def in_fresh_process(folder: Path, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "eval.bench_load", "--load", str(folder), "--threads", str(threads)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def bench(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    layers = 1 if args.quick else max(1, round(args.gigabytes * 1e9 / LAYER_BYTES))
    with tempfile.TemporaryDirectory(prefix="bench_load-") as place:
        folders = {"theirs": Path(place) / "theirs", "ours": Path(place) / "ours"}
        for folder in folders.values():
            folder.mkdir()
        nbytes = {"theirs": write(folders["theirs"], kind, layers, args.quick),
                  "ours": write_ours(folders["theirs"], folders["ours"])}  # fmt: skip
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in folders}
        for _ in range(args.repeats):
            for name, folder in folders.items():
                found[name].append(in_fresh_process(folder, args.threads))
    seconds = {name: statistics.median(one["seconds"] for one in each) for name, each in found.items()}
    ratios = [theirs["seconds"] / ours["seconds"] for theirs, ours in zip(found["theirs"], found["ours"], strict=True)]
    return {"kind": kind, "bytes": nbytes["theirs"], "rate": nbytes["theirs"] / seconds["theirs"],
            "our_rate": nbytes["ours"] / seconds["ours"], "over_ours": statistics.median(ratios),
            "peak": max(one["over"] for one in found["theirs"])}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    out = Table("kind", "file, GB", "GB/s", "our int4, GB/s", "seconds / ours", "peak over the result, MB")
    for row in rows:
        out.add_row(row["kind"], f"{row['bytes'] / 1e9:.2f}", f"{row['rate'] / 1e9:.2f}",
                    f"{row['our_rate'] / 1e9:.2f}", f"{row['over_ours']:.2f}", f"{row['peak'] / 1e6:.0f}")
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_load", description=__doc__.splitlines()[0])
    parser.add_argument("--kind", action="append", choices=KINDS, help="repeat it for more (default: all)")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of a file (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="loads of each that count (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(%(default)s)")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="load this in this process and print JSON")
    parser.add_argument("--quick", action="store_true", help="one small layer, once")
    args = parser.parse_args(argv)
    if not args.gigabytes > 0 or args.repeats < 1 or args.threads < 1:
        parser.error("--gigabytes must be above 0, --repeats and --threads at least 1")
    torch.set_num_threads(args.threads)
    if args.load:
        print(json.dumps(measure(args.load)))
        return 0
    args.repeats = 1 if args.quick else args.repeats
    Console().print(table([bench(kind, args) for kind in args.kind or KINDS]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
