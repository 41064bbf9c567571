"""How fast are large checkpoints of other libraries loaded, beside our own format, and in how much memory?

    python -m eval.bench_load                       # 2 GB a kind, in a folder that is removed afterwards
    python -m eval.bench_load --quick

Files of random codes are written, read once so that they are in memory, and loaded; every load is a fresh process, and
kinds take turns with our own format of the same codes. GB/s are bytes of the file over seconds of `hf_mlspec.load`.
Our own files are mapped, and not read before they are used. So two more ratios are told: "seconds / copied", of a load
over copying every tensor of the file from its mapping into new memory, as much as whoever moves words has to read and
write; with --forward also "to a token / ours", of seconds of a load and the first forward pass, of one token. "Peak
over the result" is what the process held at most beyond what it held before and the weights that came of it.
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
from safetensors import safe_open

import hf_mlspec
from eval.bench_load.written import DENSE_BYTES, KINDS, LAYER_BYTES, write, write_ours
from eval.records import machine


def measure(folder: Path, forward: bool = True) -> dict[str, Any]:
    """Seconds of a load, and with the first forward pass (None if not asked for); the model's resident
    bytes, and bytes beyond those, at most (None where the system does not count them)."""
    read_once(folder)
    gc.collect()
    with machine.PeakMemory() as memory:
        begin = time.perf_counter()
        model = hf_mlspec.load(folder, dtype=torch.bfloat16)
        seconds = time.perf_counter() - begin
    held = hf_mlspec.resident_bytes(model)
    first = None
    if forward:
        begin = time.perf_counter()
        with torch.no_grad():
            model(torch.tensor([[1]]))
        first = seconds + time.perf_counter() - begin
    counted = memory.peak is not None and memory.before is not None
    over = memory.peak - memory.before - held if counted else None
    return {"seconds": seconds, "first": first, "held": held, "over": over}


def measure_copy(folder: Path) -> dict[str, Any]:
    """Seconds of copying every tensor of the files into new memory."""
    read_once(folder)
    begin, copies = time.perf_counter(), []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            copies += [opened.get_tensor(name).clone() for name in opened.keys()]  # noqa: SIM118
    return {"seconds": time.perf_counter() - begin, "copied": sum(copy.nbytes for copy in copies)}


def read_once(folder: Path) -> None:
    """So that the files are in memory."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass


def in_fresh_process(folder: Path, args: argparse.Namespace, what: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "eval.bench_load", f"--{what}", str(folder), "--threads", str(args.threads)]
    command += ["--forward"] if args.forward else []
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def bench(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    layers = 1 if args.quick else max(1, round(args.gigabytes * 1e9 / LAYER_BYTES.get(kind, DENSE_BYTES)))
    with tempfile.TemporaryDirectory(prefix="bench_load-") as place:
        folders = {"theirs": Path(place) / "theirs", "ours": Path(place) / "ours"}
        for folder in folders.values():
            folder.mkdir()
        nbytes = {"theirs": write(folders["theirs"], kind, layers, args.quick),
                  "ours": write_ours(folders["theirs"], folders["ours"])}  # fmt: skip
        found: dict[str, list[dict[str, Any]]] = {"theirs": [], "ours": [], "copies": []}
        for _ in range(args.repeats):
            for name, folder in folders.items():
                found[name].append(in_fresh_process(folder, args, "load"))
            found["copies"].append(in_fresh_process(folders["theirs"], args, "copy"))
    return {"kind": kind, "bytes": nbytes["theirs"], **rates(nbytes, found)}


def rates(nbytes: dict[str, int], found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of loads and copies in turns: GB/s of both, medians of the ratios of each turn, the highest peak."""

    def over(name: str, key: str = "seconds") -> float:
        turns = zip(found["theirs"], found[name], strict=True)
        return statistics.median(mine[key] / other[key] for mine, other in turns)

    seconds = {name: statistics.median(one["seconds"] for one in each) for name, each in found.items()}
    peaks = [one["over"] for one in found["theirs"]]
    return {"rate": nbytes["theirs"] / seconds["theirs"], "our_rate": nbytes["ours"] / seconds["ours"],
            "over_ours": over("ours"), "over_copy": over("copies"),
            "first_over_ours": over("ours", "first") if found["theirs"][0]["first"] else None,
            "peak": None if None in peaks else max(peaks)}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    out = Table("kind", "file, GB", "GB/s", "our own, GB/s", "seconds / ours", "seconds / copied",
                "to a token / ours", "peak over the result, MB")  # fmt: skip
    for row in rows:
        peak = "not counted here" if row["peak"] is None else f"{row['peak'] / 1e6:.0f}"
        ratios = ["-" if row[name] is None else f"{row[name]:.2f}"
                  for name in ("over_ours", "over_copy", "first_over_ours")]  # fmt: skip
        sizes = [f"{row[name] / 1e9:.2f}" for name in ("bytes", "rate", "our_rate")]
        out.add_row(row["kind"], *sizes, *ratios, peak)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_load", description=__doc__.splitlines()[0])
    parser.add_argument("--kind", action="append", choices=KINDS, help="repeat it for more (default: all)")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of a file (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="loads of each that count (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(%(default)s)")
    parser.add_argument("--forward", action="store_true", help="time the first forward pass behind a load, too")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="load this in this process and print JSON")
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="copy its tensors in this process and print JSON")
    parser.add_argument("--quick", action="store_true", help="one small layer, once")
    args = parser.parse_args(argv)
    if not args.gigabytes > 0 or args.repeats < 1 or args.threads < 1:
        parser.error("--gigabytes must be above 0, --repeats and --threads at least 1")
    torch.set_num_threads(args.threads)
    if args.load or args.copy:
        print(json.dumps(measure(args.load, args.forward) if args.load else measure_copy(args.copy)))
        return 0
    args.repeats = 1 if args.quick else args.repeats
    Console().print(table([bench(kind, args) for kind in args.kind or KINDS]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
