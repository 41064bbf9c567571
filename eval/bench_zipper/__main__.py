"""What do weights in two parts cost on a GPU: the low part, the high part there or on the host, whole chains?

    python -m eval.bench_zipper [--part products host timeline rates replayed prefill memory] [--layers 4] [--quick]
                                [--model FOLDER]

products   microseconds of the low part, of its float32 sums, of the high part on the device and of both, 8192 x 8192,
           captured, over copies that the L2 cache does not hold
host       of way (a), for every linear of the 8B shape: the copy out, the waking of the worker, the CPU's arithmetic,
           the copy back, each alone, and the whole call beside the GPU's own product
timeline   of way (a), for two of these linears: when each step of one call ends, from the call's begin
rates      tokens/s of a model of the 8B shape with few layers (random weights), or of the one given: (a) the high part
           on the host, (b) on the device, (c) either, with "zipper-low" drafts, and bfloat16 with ["mxfp4"]
replayed   the same ways, with drafts accepted as those of code-76m were (eval/traces)
prefill    milliseconds of prompts, by mode and place of the high part
memory     bytes of the weights on the device over those of 16 bits, with head and embedding and without
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from eval.parts import run_parts

from . import host, memory, prefill, products, rates, replayed, timeline

PARTS = {"products": products.lines, "host": host.lines, "timeline": timeline.lines, "rates": rates.lines,
         "replayed": replayed.lines, "prefill": prefill.lines, "memory": memory.lines}  # fmt: skip

PLACES = ("host", "device", "dense")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_zipper", description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--layers", type=int, default=4, help="of the 8B shape, which has 32 (%(default)s)")
    parser.add_argument("--model", type=Path, help="folder of a model in place of the shape, in rates and memory")
    parser.add_argument("--mode", default="clamp", choices=("exact", "paper", "clamp"), help="of models (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of a continuation (%(default)s)")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--drafted", nargs="+", type=int, default=[4], help="tokens of a round, in replayed")
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 512, 2048], help="tokens (%(default)s)")
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=PLACES, help="of the high part, in rates "
                        "and replayed; dense: bfloat16 weights (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small shapes: shows that the program runs")
    parser.add_argument("--json", type=Path, help="file for the results, too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if not torch.cuda.is_available():
        print("eval.bench_zipper times a GPU, and torch finds none here", file=sys.stderr)
        return 1
    return run_parts(PARTS, options)


if __name__ == "__main__":
    sys.exit(main())
