"""What does it cost to stream the planes of a model, and what does a chain that drafts with resident planes gain?

    python -m eval.bench_planes [--part rounds offload] [--budget 6GB] [--shape llama-3-8b]       # on a GPU
    python -m eval.bench_planes --part disk --model FOLDER --budget 60MB                          # on a CPU
    python -m eval.bench_planes --quick                                                           # tiny, few tokens

rounds    replayed acceptance (eval/traces): seconds of a round, streamed and with all planes resident, beside what the
          fetched bytes take at the measured speed of the bus, and beside drafting
captured  the same in rounds that are one graph each, with a tiny model below the top planes, too
prompts   seconds of a prefill, streamed and resident
routed    seconds of prompts and tokens at widths that a router picks, and at static ones, streamed and resident
choosing  seconds of the choices alone for a prompt; on a CPU processor time, beside that of the prompt
table     the same in calls of generate, beside BF16, in the form of QAQ's Table 1
drafts    replayed acceptance: rounds whose draft reads the planes that a router picks, beside fixed planes
kernels   which kernels a prompt and a token of it take
offload   tokens/s of accelerate's CPU offload on the same budget: the BF16 model, and the same planes
disk      tokens/s of a packed folder, planes in memory and in a file, and the memory that either process holds
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from eval.parts import run_parts

from . import captured, disk, drafts, kernels, offload, rounds, routed, table

PARTS = {
    "rounds": rounds.lines, "captured": captured.lines, "prompts": rounds.prompts, "routed": routed.lines,
    "choosing": routed.choosing, "table": table.lines, "drafts": drafts.lines,
    "kernels": kernels.lines, "offload": offload.lines, "disk": disk.lines,
}  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_planes", description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", default=["rounds", "prompts", "offload"], choices=PARTS)
    parser.add_argument("--shape", default="llama-3-8b", help="with random weights (%(default)s)")
    parser.add_argument("--model", type=Path, help="folder of a model, of the part disk")
    parser.add_argument("--tiny", default="llama-2x1024", help="shape of the tiny level, of the part captured")
    parser.add_argument("--budget", default="6GB", help="bytes on the device for weights (%(default)s)")
    parser.add_argument("--top-planes", type=int, default=4, help="always resident; they draft (%(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="of the trace (%(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="of a row (%(default)s)")
    parser.add_argument("--windows", type=int, default=141, help="of 2,048 tokens, of the part table: as many as "
                        "WikiText-2's test set has with Llama 3's tokenizer (%(default)s)")  # fmt: skip
    parser.add_argument("--engine", help="of the parts disk and rounds: cpu, cuda, modules (the fastest; rounds: two)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny shape: shows that the program runs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="file for the results, too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.child:
        print(json.dumps(disk.measured(options)))
        return 0
    return run_parts(PARTS, options)


if __name__ == "__main__":
    sys.exit(main())
