"""What do int8 outliers, ordered inputs and online rotations cost a step on the CPU, over int4 in groups of 128?

    python -m eval.bench_transforms --shape llama-1.1b --layers 3 --threads 1
    python -m eval.bench_transforms --quick

Models of random codes, each prepared and given the same prompt, write greedily without levels, in turns; the least
time of a step counts, at w4a16 and w4a4. Ordered: inputs are gathered at random, as Atom's are by their size. Rotated:
o and down have the Hadamard matrices of QuaRot in front, or down alone, as SpinQuant has it. For a GPU:
python -m eval.bench_gpu --only transforms.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

import hf_mlspec
from eval.random_packed import WIDE_ENOUGH, ordered, random_int4_model, random_outlier_model, rotated
from eval.records import machine
from eval.targets import SHAPES

PRECISIONS = ("w4a16", "w4a4")
VOCABULARY = 1024  # the head is BF16 in all of them, and is not what is asked about
CPU = torch.device("cpu")


def made(shape: str, sizes: dict[str, int]) -> dict[str, PreTrainedModel]:
    """By name, int4 first."""
    models = {
        "int4": random_int4_model(shape, CPU, **sizes),
        "int4-int8": random_outlier_model(shape, CPU, **sizes),
        "int4-int8, ordered": ordered(random_outlier_model(shape, CPU, **sizes)),
        "int4, rotated": rotated(random_int4_model(shape, CPU, **sizes)),
        "int4, down rotated": rotated(random_int4_model(shape, CPU, **sizes), across_heads=False),
    }
    return {name: hf_mlspec.prepare(model, engine="cpu") for name, model in models.items()}


def step_seconds(models: dict[str, PreTrainedModel], tokens: int, repeats: int) -> dict[tuple[str, str], float]:
    """By name and precision, the least of all turns; the first turn warms up."""
    ids = torch.randint(0, 90, (1, 8), generator=torch.Generator().manual_seed(0))
    best = dict.fromkeys(((name, precision) for name in models for precision in PRECISIONS), math.inf)
    for turn in range(repeats + 1):
        for name, precision in best:
            with hf_mlspec.precision_switch(models[name]).at(precision):
                began = time.perf_counter()
                models[name].generate(input_ids=ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                                      pad_token_id=0, assistant_models=[])
                seconds = (time.perf_counter() - began) / tokens
            best[name, precision] = min(best[name, precision], seconds if turn else math.inf)
    return best


def lines_of(best: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    """A line a model and precision, with its time over int4's."""
    return [{"model": name, "precision": precision, "step_seconds": seconds,
             "of_int4": seconds / best["int4", precision]} for (name, precision), seconds in best.items()]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_transforms", description=__doc__.splitlines()[0])
    wide = [name for name, own in SHAPES.items() if own["hidden_size"] % 128 == own["intermediate_size"] % 128 == 0]
    parser.add_argument("--shape", choices=sorted(wide), default="llama-1.1b")
    parser.add_argument("--layers", type=int, help="of the model (the shape's)")
    parser.add_argument("--tokens", type=int, default=32, help="of a call (32)")
    parser.add_argument("--repeats", type=int, default=6, help="turns (6)")
    parser.add_argument("--threads", type=int, help="threads of the CPU (torch's own choice)")
    parser.add_argument("--json", type=Path, help="write a line of JSON for each row of the table")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, one turn")
    args = parser.parse_args(argv)
    if min(args.layers or 1, args.tokens, args.repeats, args.threads or 1) < 1:
        parser.error("--layers, --tokens, --repeats and --threads are at least 1")
    args.sizes = {"vocab_size": VOCABULARY, **({"num_hidden_layers": args.layers} if args.layers else {})}
    if args.quick:
        args.shape, args.sizes, args.tokens, args.repeats = "tiny", {**args.sizes, **WIDE_ENOUGH}, 4, 1
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    lines = lines_of(step_seconds(made(args.shape, args.sizes), args.tokens, args.repeats))
    table = Table("model", "precision", "step ms", "x int4", title=args.shape)
    for line in lines:
        row = line["model"], line["precision"], f"{1e3 * line['step_seconds']:.3f}", f"{line['of_int4']:.3f}"
        table.add_row(*row)
    Console().print(table)
    if args.json:
        told = {"shape": args.shape, "machine": machine.card("cpu")}
        args.json.write_text("".join(json.dumps(line | told) + "\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
