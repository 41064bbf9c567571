"""How long does each method of calibration take, and in how much memory, on a model and on blocks of a large shape?

    python -m eval.bench_calibration --model FOLDER --calibration FILE --device cuda
    python -m eval.bench_calibration --shape llama-3-8b --blocks 2 --device cuda      # random weights, random ids

Seconds are those of `hf_mlspec.quantize`, its text read before; of a shape also those of one more block, from which
all its blocks are reckoned. Before each, the model is loaded once and a small one calibrated by the method, so that
neither the code of libraries nor their buffers count (--cold: they do). Memory, over what the BF16 model holds and
with it: of the GPU, the most that torch held during the call; of a CPU, the most that the process grew by since before
the model was loaded: name one method a run, a second one uses what the first left.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec
from eval import targets
from eval.records import machine
from eval.refused import refused

METHODS = ("rtn", "gptq", "awq", "smoothquant", "quarot+gptq", "atom+gptq", "quarot+atom+gptq")
VOCABULARY = 4096  # of a shape: blocks are measured, not the head
Make = Callable[[int], PreTrainedModel]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_calibration", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model and its tokenizer (default: the demo target)")
    parser.add_argument("--calibration", type=Path, help="a text (default: this project's guide)")
    parser.add_argument("--shape", choices=sorted(targets.SHAPES), help="random weights instead of a model")
    parser.add_argument("--blocks", type=int, default=2, help="of the shape, 2 or more (%(default)s)")
    parser.add_argument("--methods", nargs="+", help=f"of quantize (default: {' '.join(METHODS)})")
    parser.add_argument("--samples", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of a sample (%(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of the CPU (default: torch's own)")
    parser.add_argument("--work-folder", action="store_true",
                        help="with one, as `mlspec quantize`: on a CPU hidden states wait in a file of it")
    parser.add_argument("--cold", action="store_true", help="calibrate nothing before")
    parser.add_argument("--quick", action="store_true", help="two samples of 64 tokens, one method if none is named")
    parser.add_argument("--json", type=Path, help="file for the results, too")
    args = parser.parse_args(argv)
    args.methods = args.methods or (["gptq"] if args.quick else list(METHODS))
    if args.quick:
        args.samples, args.tokens = 2, 64
    if args.blocks < 2:
        parser.error(f"--blocks is {args.blocks}: one block more than another is what is timed, give 2 or more")
    texts, written = [("--calibration", args.calibration)], [("--json", args.json)]
    if reason := refused(args.device, [("--model", args.model)], texts, written):
        parser.error(reason)
    return args


def source(args: argparse.Namespace) -> tuple[Make, Any, Any]:
    """What makes a model anew (of so many blocks, where it is a shape), what to calibrate on, the tokenizer."""
    if args.shape:
        ids = torch.randint(VOCABULARY, (args.samples, args.tokens), generator=torch.Generator().manual_seed(0))
        how = {"vocab_size": VOCABULARY, "max_position_embeddings": max(args.tokens, 64)}
        shape = partial(targets.random_model, args.shape, args.device, **how)
        return lambda blocks: shape(num_hidden_layers=blocks), ids.tolist(), None
    folder = args.model or hf_mlspec.demo_pair()[0]
    guide = Path(__file__).parents[2] / "docs" / "guide"
    texts = [args.calibration] if args.calibration else sorted(guide.glob("*.md"))
    text = [path.read_text(encoding="utf-8") for path in texts]
    load, tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained(folder)
    return lambda _: load(folder, dtype=torch.bfloat16).to(args.device).eval(), text, tokenizer


def run(args: argparse.Namespace, given: tuple[Make, Any, Any], method: str, blocks: int) -> dict[str, Any]:
    """One call of quantize on a new model. given: of `source`."""
    make, calibration, tokenizer = given
    if not args.cold:
        warm_up(make, method, args.device)
    with machine.PeakMemory() as memory:
        model, on_gpu = make(blocks), torch.device(args.device).type == "cuda"
        held = sum(parameter.nbytes for parameter in model.parameters())
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        busy = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            done = hf_mlspec.quantize(model, method, calibration=calibration, tokenizer=tokenizer,
                                      samples=args.samples, tokens=args.tokens,
                                      work_folder=Path(folder) / "blocks" if args.work_folder else None)  # fmt: skip
        busy = time.process_time() - busy
    grown = None if memory.peak is None else memory.peak - memory.before
    peak = done.peak_bytes if on_gpu else grown
    noise = statistics.median(layer.sqnr for layer in done.layers if layer.sqnr is not None)
    return {"method": method, "blocks": blocks, "seconds": done.seconds, "cpu_seconds": busy,
            "peak_over_model": peak and peak / held, "sqnr_db": noise}  # fmt: skip


def warm_up(make: Make, method: str, device: str) -> None:
    """Import, load and compute what any calibration does."""
    make(1)
    small = targets.random_model("tiny-2x512", device, vocab_size=64)
    hf_mlspec.quantize(small, method, calibration=torch.arange(64)[None].tolist())
    del small
    gc.collect()


def bench(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a method; of a shape with `seconds_per_block`."""
    given = source(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    for method in args.methods:
        row = run(args, given, method, args.blocks)
        if args.shape:
            less = run(args, given, method, args.blocks - 1)
            row["seconds_per_block"] = row["seconds"] - less["seconds"]
        yield row


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    """What a reader sees; a shape's last column is reckoned for all of its blocks."""
    title = f"{args.shape or args.model or 'demo target'}, {args.samples} x {args.tokens} tokens, {args.device}"
    columns = "method", "seconds", "of CPUs", "peak / BF16 model", "median SQNR, dB", "one block, s", "all, s"
    shown = Table(*columns, title=title)
    whole = targets.SHAPES[args.shape]["num_hidden_layers"] if args.shape else 0
    for row in rows:
        cells = [row["method"], f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}", "-", f"{row['sqnr_db']:.1f}"]
        cells += "-", "-"
        if (peak := row["peak_over_model"]) is not None:
            cells[3] = f"{peak:.2f}"
        if (each := row.get("seconds_per_block")) is not None:
            cells[5:] = f"{each:.2f}", f"{row['seconds'] + each * (whole - row['blocks']):.0f}"
        shown.add_row(*cells)
    return shown


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    rows = list(bench(args))
    if args.json:
        said = {"machine": machine.card(args.device), "shape": args.shape, "device": args.device}
        lines = [json.dumps({**said, **row}) for row in rows]
        args.json.write_text("\n".join(lines) + "\n", encoding="utf-8")
    Console().print(table(rows, args))


if __name__ == "__main__":
    main()
