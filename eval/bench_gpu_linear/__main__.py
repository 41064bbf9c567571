"""Are the GPU's linear kernels right, the same for any number of tokens, and how near to the memory's speed?

    python -m eval.bench_gpu_linear --library build/libmlspec_cuda.so [--check] [--time] [--step] [--out FILE]

Checks compare with float64 over poisoned outputs and fresh random inputs; times are replays of a CUDA graph over
weights that rotate through more than the L2 cache holds. One JSON line a measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from .calls import OPS, Kernels
from .check import FEW_SHAPES, FEW_TOKENS, SHAPES, TOKENS, check, check_chain, check_quantize
from .time import read_bandwidth, time_cublas, time_op, time_step

TIMED_TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 288)
BY_NAME = {op.name: op for op in OPS}


def table(lines: list[dict], tokens: tuple[int, ...]) -> str:
    rows: dict[str, dict[int, str]] = {}
    for line in lines:
        keys = ("overlap", "variant", "ranks", "ring_bytes", "stages_ahead")
        variant = " ".join(f"{k}={line[k]}" for k in keys if k in line)
        name = f"{line['op']} {line['out']}x{line['in']} {variant}"
        rows.setdefault(name, {})[line["tokens"]] = f"{line['us']:.1f} ({line['share']:.2f})"
    width = max(map(len, rows))
    head = " ".join(f"{'M=' + str(t):>11}" for t in tokens)
    body = (f"{name:{width}} " + " ".join(f"{cells.get(t, '-'):>11}" for t in tokens) for name, cells in rows.items())
    return "\n".join([f"{'us (share of read bandwidth)':{width}} {head}", *body])


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_gpu_linear", description=__doc__)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true", help="of single linears")
    parser.add_argument("--step", action="store_true", help="time the linears of a Llama-3-8B step")
    parser.add_argument("--few", action="store_true", help="check few shapes and tokens")
    parser.add_argument("--no-chain", action="store_true", help="check no dependent calls: for a sanitizer")
    parser.add_argument("--check-size", help="check this one OUTxIN and few tokens: for a sanitizer")
    parser.add_argument("--ops", default="bf16,mxfp4,mxfp4 a8,int4 g128 a16,int4 g128 a8", help="that are timed")
    parser.add_argument("--check-ops", default=",".join(op.name for op in OPS))
    parser.add_argument("--tokens", default=",".join(map(str, TIMED_TOKENS)))
    parser.add_argument("--sizes", default="8192x8192")
    parser.add_argument("--variants", default='[{"overlap": 0}, {"overlap": 1}]', help="JSON, of --time")
    parser.add_argument("--choices", default="[{}]", help="JSON, of --step")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def run_checks(kernels: Kernels, a: argparse.Namespace) -> bool:
    """Whether all passed."""
    passed = True
    cases = (FEW_SHAPES, FEW_TOKENS) if a.few else (SHAPES, TOKENS)
    if a.check_size:
        cases = ((tuple(map(int, a.check_size.split("x"))),), (1, 9, 77))
    for name in a.check_ops.split(","):
        begin = time.perf_counter()
        try:
            worst = check(kernels, BY_NAME[name], *cases)
            if not a.no_chain:
                check_chain(kernels, BY_NAME[name])
            seconds = time.perf_counter() - begin
            print(f"check {name}: worst error {worst:.3f} of the allowed ({seconds:.1f} s)", flush=True)
        except AssertionError as problem:
            passed = False
            print(f"FAILED {problem}", flush=True)
    return passed


def run_times(kernels: Kernels, a: argparse.Namespace, tokens: tuple[int, ...]) -> list[dict]:
    probe = read_bandwidth()
    print(f"read bandwidth {probe / 1e12:.2f} TB/s", flush=True)
    lines = []
    for text in a.sizes.split(","):
        size = tuple(map(int, text.split("x")))
        lines += time_cublas(size, tokens, probe)
        for name in a.ops.split(","):
            lines += time_op(kernels, BY_NAME[name], size, tokens, json.loads(a.variants), probe)
    print(table(lines, tokens), flush=True)
    return [{"read_bandwidth": probe, **line} for line in lines]


def main(arguments: list[str] | None = None) -> None:
    a = parse_arguments(arguments)
    kernels, tokens = Kernels(a.library), tuple(map(int, a.tokens.split(",")))
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    passed, lines = True, []
    if a.check:
        check_quantize(kernels)
        passed = run_checks(kernels, a)
    if a.time:
        lines += run_times(kernels, a, tokens)
    if a.step:
        for name in a.ops.split(","):
            lines += time_step(kernels, BY_NAME[name], tokens, json.loads(a.choices))
            torch.cuda.empty_cache()
    if a.out:
        a.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sys.exit(not passed)


if __name__ == "__main__":
    main()
