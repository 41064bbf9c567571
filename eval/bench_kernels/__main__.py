"""How fast are our matrix products, beside the memory's own speed and beside the best peers in the same process?

    python -m eval.bench_kernels --op mxfp4_linear --m 8192 --k 8192 --n 1,2,4,8,16 --ggml FOLDER --json out.jsonl
    python -m eval.bench_kernels --quick          # small weights, few calls: shows that everything runs

A weight is [m, k], activations are [n, k]. All contenders and a read of memory take turns, call by call; weights go
round so that no cache holds them. Medians of uncontended calls (samples.py). A peer that cannot take
part is named with its reason. --ggml: a folder below which ggml.h and libggml.so of a built ik_llama.cpp lie.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from eval.bench_kernels.contenders import OPS, Contender, Weights, contenders, error, not_compiled
from eval.bench_kernels.report import table
from eval.bench_kernels.samples import MAX_WAIT, Series, alternate, has_schedstat
from eval.peers.missing import MissingPeer
from eval.records import machine


def numbers(text: str) -> list[int]:
    """ "1,2,4" -> [1, 2, 4]."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give positive numbers with commas between, as in 1,2,4")
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=OPS, action="append", help="may be repeated; all of them by default")
    parser.add_argument("--m", type=int, help="outputs of the weight (8192)")
    parser.add_argument("--k", type=int, help="inputs of the weight (8192)")
    parser.add_argument("--n", type=numbers, help="rows of activations (1,2,4,5,8,9,16)")
    parser.add_argument("--samples", type=int, help="uncontended calls of each contender (40)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rotate", type=int, metavar="MB", help="weights to go round (4 x L3, 256 to 2048)")
    parser.add_argument("--probe", type=int, metavar="MB", default=256, help="memory one read of the probe takes")
    parser.add_argument("--ggml", type=Path, metavar="FOLDER", help="a built ik_llama.cpp")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="contenders whose name holds it")
    parser.add_argument("--processor-time", action="store_true",
                        help="seconds that this process ran, of every call: for machines that are busy otherwise")
    parser.add_argument("--quick", action="store_true", help="1024 x 1024, n 1 and 4, 3 calls, contended or not")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line a contender and n")
    args = parser.parse_args(argv)
    quick = {"m": 1024, "k": 1024, "n": [1, 4], "samples": 3, "rotate": 64}
    full = {"m": 8192, "k": 8192, "n": [1, 2, 4, 5, 8, 9, 16], "samples": 40}
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def copies_of(field_: list[Contender], rotate: int) -> int:
    """Copies of each weight so that all of them together hold `rotate` bytes; even, as a sample uses two."""
    needed = -(-rotate // sum(one.nbytes for one in field_))
    return max(2, needed + needed % 2)


def make(field_: list[Contender], copies: int) -> tuple[dict[Contender, Any], dict[str, str]]:
    """Contenders with their weights, and the reasons of those that are missing."""
    made, missing = {}, {}
    for one in field_:
        try:
            made[one] = one.make(copies)
        except MissingPeer as reason:
            missing[one.name] = str(reason)
    return made, missing


def going_round(call, copies: int):
    """call(copy) as a call without arguments that takes the next copy each time."""
    at = -1

    def run():
        nonlocal at
        at = (at + 1) % copies
        return call(at)

    return run


def measure(made: dict[Contender, Any], n: int, w: Weights, copies: int, args: argparse.Namespace) -> dict[str, Any]:
    """One n: a Series for each contender, their errors, and the probe's bytes a second at each round."""
    x = torch.randn(n, w.in_features, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16).to(torch.float32)
    series, errors, missing = [], {}, {}
    for one, weight in made.items():
        try:
            call = weight.bind(x)
        except MissingPeer as reason:
            missing[one.name] = str(reason)
            continue
        errors[one.name] = error(call(0), x, w if one.slab is None else one)
        if not errors[one.name] < one.largest_error:
            raise RuntimeError(f"{one.name}, n {n}: relative error {errors[one.name]:.3g}, another weight")
        series.append(Series(one.name, going_round(call, copies), one.nbytes if one.ours else weight.nbytes))
    probe = machine.ReadProbe(args.probe)
    reads = Series("read of memory", probe, probe.nbytes)
    alternate([reads, *series], args.samples, 6 * args.samples, args.threads,
              float("inf") if args.quick else MAX_WAIT, args.processor_time)
    return {"n": n, "series": series, "errors": errors, "missing": missing, "reads": reads}


def lines(op: str, found: dict[str, Any], ours: set[str], rotated: int) -> list[dict[str, Any]]:
    """One entry for each contender: milliseconds, share of the probe, and its time over each peer's, the median over
    rounds in which both had an uncontended call (below 1: faster than it)."""
    reads = found["reads"].median()
    bandwidth = found["reads"].nbytes / reads if reads else None
    entries = []
    for s in found["series"]:
        middle, entry = s.median(), {"op": op, "n": found["n"], "contender": s.name, "ours": s.name in ours}
        entry |= {"samples": len(s.seconds), "contended": len(s.contended), "weight_bytes": s.nbytes}
        entry |= {"probe_bytes_per_second": bandwidth, "regime": bandwidth and machine.regime(bandwidth)}
        entry |= {"rotated_bytes": rotated, "relative_error": found["errors"][s.name], "ms": middle and middle * 1e3}
        entry["best_ms"] = 1e3 * min(s.seconds) if s.seconds else None
        entry["share_of_probe"] = s.nbytes / middle / bandwidth if middle and bandwidth else None
        entry["ratios"] = {
            peer.name: ratio for peer in found["series"] if peer.name not in ours and (ratio := s.over(peer))
        } if s.name in ours else {}
        entries.append(entry)
    for name, reason in found["missing"].items():
        entries.append({"op": op, "n": found["n"], "contender": name, "ours": name in ours, "missing": reason})
    return entries


def bench(op: str, w: Weights, args: argparse.Namespace) -> list[dict[str, Any]]:
    field_ = [c for c in contenders(op, w, args.ggml) if not args.only or any(t in c.name for t in args.only)]
    if not field_:
        return []
    rotate = machine.rotation_bytes() if args.rotate is None else args.rotate * 2**20
    copies = copies_of(field_, rotate)
    made, missing = make(field_, copies)
    ours = {one.name for one in field_ if one.ours}
    rotated = copies * sum(weight.nbytes for weight in made.values())
    entries = []
    for n in args.n:
        found = measure(made, n, w, copies, args)
        found["missing"] |= missing
        entries += lines(op, found, ours, rotated)
    for weight in made.values():
        weight.close()
    return entries


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not has_schedstat():
        print("this needs Linux with /proc/self/task/*/schedstat: uncontended calls cannot be told", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)
    try:
        w = Weights(args.m, args.k)
    except ValueError as reason:
        print(reason, file=sys.stderr)
        return 2
    console = Console(width=None if Console().is_terminal else 180)
    common = {"m": args.m, "k": args.k, "machine": machine.card(), "not_compiled": not_compiled()}
    for op in args.op or OPS:
        entries = bench(op, w, args)
        if not entries:
            continue
        console.print(table(op, entries, args))
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            with args.json.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps({**entry, **common}) + "\n" for entry in entries)
    if common["not_compiled"]:
        console.print(f"OURS RAN IN PLAIN TORCH: {common['not_compiled']}", style="bold red", markup=False)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
