"""What does QSpec win on a CPU: one int4 model that drafts with coarse activations and verifies with 16-bit ones?

    python -m eval.bench_qspec --model PATH --prompts FILE --prompts FILE --draft PATH --draft PATH@mxfp4 \\
        --json out.jsonl --plot out.png
    python -m eval.bench_qspec --model PATH --prompts FILE --acceptance    # this part only, over all prompts
    python -m eval.bench_qspec --report out.jsonl --plot out.png           # tables and picture of lines already there
    python -m eval.bench_qspec --quick                                     # the demo pair, few tokens

Contenders, all in one compiled loop: the BF16 model; its int4 form at 16 activation bits through the fused kernel
(w4a16) and as systems without one do, dequantize to 16 bits and then a GEMM (w4a16 dequant); w4a8; w4a4; QSpec over
both; QSpec whose draft keeps a cache of its own, so that nothing is overwritten (the paper's Table 2); other drafts.
Each batch is decoded by every contender in turn. Numbers are decode-only: without the pass that reads the prompts.
Ratios are of tokens a second on one batch, their geometric mean over batches and repeats. Exit status 1 if one id of a
drafting contender is not its target's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track

import hf_mlspec
from eval.bench_qspec import acceptance as accepting
from eval.bench_qspec import memory
from eval.bench_qspec import plot as plotting
from eval.bench_qspec import report as reporting
from eval.bench_qspec.contenders import ALONE, DEQUANT, LIKE_ALONE, Contender, Target, contenders, measure, typical
from eval.plans.options import counts
from eval.records import machine
from eval.targets import why_not_prepared
from hf_mlspec.evaluation import read_prompts

QUICK = {"batch": [1, 2], "gamma": [2, 3], "count": 2, "batches": 1, "repeats": 1, "max_new_tokens": 12,
         "parts": ["decode"]}
FULL = {"batch": [1, 2, 4, 8, 16, 32], "gamma": [2, 3, 4, 5, 6], "count": None, "batches": None, "repeats": 3,
        "max_new_tokens": 128, "parts": ["decode", "memory"]}
PARTS = {"decode": "throughput, latency, acceptance by batch size and gamma",
         "memory": "weights, caches and peaks by batch size, a fresh process each",
         "acceptance": "acceptance at w4a4 and w4a8 over all prompts, in batches of the largest size"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_qspec", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of the BF16 model, quantized while loading (the demo pair's), or of a "
                        "model that `mlspec quantize` wrote, whose BF16 form is then not measured")
    parser.add_argument("--prompts", type=Path, action="append", default=[], metavar="FILE",
                        help="text with one prompt a line, .jsonl or .json of HumanEval, GSM8K ...; may be repeated")
    parser.add_argument("--draft", action="append", default=[], metavar="PATH[@mxfp4]", help="an ordinary draft")
    parser.add_argument("--draft-threshold", type=float, default=0.3, help="of ordinary drafts (%(default)s)")
    parser.add_argument("--batch", type=counts, help="(1,2,4,8,16,32)")
    parser.add_argument("--gamma", type=counts, help="tokens per draft (2,3,4,5,6)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME",
                        help=f"contenders whose name holds this, and {ALONE} and {DEQUANT}; may be repeated")
    parser.add_argument("--group-size", type=int, default=128, choices=(32, 64, 128))
    parser.add_argument("--asymmetric", action="store_true", help="codes with a zero point per group")
    parser.add_argument("--count", type=int, help="prompts to read of each file (all)")
    parser.add_argument("--batches", type=int, help="different batches per batch size (4; 2 of 16 rows, 1 of 32)")
    parser.add_argument("--repeats", type=int, help="(3)")
    parser.add_argument("--max-new-tokens", type=int, help="(128)")
    parser.add_argument("--threads", type=int, default=2)
    for part, text in PARTS.items():
        parser.add_argument(f"--{part}", dest="parts", action="append_const", const=part, help=f"only {text}")
    parser.add_argument("--report", type=Path, action="append", default=[], metavar="FILE",
                        help="tables of the JSON lines of earlier runs, nothing else; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line a contender, gamma and batch size")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture (.png); needs matplotlib")
    parser.add_argument("--quick", action="store_true", help="few tokens of few prompts")
    args = parser.parse_args(argv)
    missing = next((path for path in (args.model, *args.prompts) if path and not Path(path).exists()), None)
    if missing:
        parser.error(f"{missing} does not exist")
    args.quantized = bool(args.model) and is_quantized(Path(args.model))
    if args.quantized and (args.asymmetric or args.group_size != 128):
        parser.error(f"{args.model} is quantized already: leave --group-size and --asymmetric out")
    args.draft = [str(Path(word).resolve()) if "/" in word else word for word in args.draft]
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def is_quantized(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and "quantization_config" in json.loads(config.read_text(encoding="utf-8"))


def encoded(args: argparse.Namespace, folder: str) -> dict[str, list[list[int]]]:
    """The token ids of each file's prompts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    files = args.prompts or [Path(hf_mlspec.demo_pair()[0]).parent / "prompts.json"]
    return {file.stem: [tokenizer(text).input_ids for text in read_prompts(file, args.count)] for file in files}


def mixed(prompts: dict[str, list[list[int]]]) -> list[list[int]]:
    """The files' prompts by turns, so that a batch holds rows of every file, and of very different lengths."""
    longest = max(map(len, prompts.values()))
    return [rows[place] for place in range(longest) for rows in prompts.values() if place < len(rows)]


def batches_of(rows: list[list[int]], sizes: list[int], most: int | None) -> dict[int, list[list[list[int]]]]:
    """At most so many batches of each size, all of them whole; ValueError where there is not one."""
    number = {size: most or max(1, min(4, 32 // size)) for size in sizes}
    if len(rows) < max(sizes):
        raise ValueError(f"a batch of {max(sizes)} needs as many prompts, and {len(rows)} were read: raise --count, "
                         "give more --prompts, or leave this batch size out")
    return {size: [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)][: number[size]]
            for size in sizes}


def chosen(args: argparse.Namespace, target: Target) -> list[Contender]:
    """The contenders asked for, without what a folder that is quantized does not have: BF16 weights, or a product of
    weights that are dequantized first (of format int4 alone)."""
    drafts = args.draft or ([] if args.model else [str(hf_mlspec.demo_pair()[1])])
    found = contenders(args.gamma, drafts, args.draft_threshold)
    multiplies = hf_mlspec.precision_switch(target.int4).record.multiplies
    found = [one for one in found if (one.quantized or not args.quantized) and one.multiply in multiplies]
    names = args.only or [""]
    return [one for one in found if one.name in (ALONE, DEQUANT) or any(name in one.name for name in names)]


class Lines:
    """What is measured, kept for the report and appended to the JSON file at once."""

    def __init__(self, file: Path | None, common: dict[str, Any]):
        self.file, self.common, self.rows = file, common, []
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)

    def add(self, rows: list[dict[str, Any]], **more: Any) -> None:
        self.rows += [{**row, **more} for row in rows]
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps({**row, **more, **self.common}) + "\n" for row in rows)


def bench_decoding(args: argparse.Namespace, target: Target, by_size: dict[int, list], lines: Lines, show) -> None:
    found, probe = chosen(args, target), machine.ReadProbe()
    for size, batches in by_size.items():
        takes, reads = measure(target, found, batches, max_new_tokens=args.max_new_tokens, repeats=args.repeats,
                               probe=probe)
        lines.add(reporting.summaries(size, takes, args.repeats), probe_bytes_per_second=statistics.median(reads))
        show(reporting.table(size, [row for row in lines.rows if row["batch"] == size], statistics.median(reads)))


def bench_memory(args: argparse.Namespace, target: Target, by_size: dict[int, list], lines: Lines) -> None:
    """With the typical gamma, at every batch size; without w4a8 and w4a4 alone, which hold what w4a16 holds."""
    gammas = None, typical(args.gamma)
    found = [one for one in chosen(args, target) if one.gamma in gammas and one.name not in LIKE_ALONE]
    with tempfile.TemporaryDirectory() as folder:
        target.int4.save_pretrained(folder)
        for size, batches in by_size.items():
            for one in track(found, description=f"memory, batch {size}"):
                asked = memory.request(one, target, folder, batches[0], args.max_new_tokens)
                lines.add([memory.ask(asked)])


def bench_acceptance(args: argparse.Namespace, target: Target, prompts: dict[str, list], lines: Lines, show) -> None:
    for data, rows in prompts.items():
        lines.add(accepting.acceptance(target, data, rows, gamma=typical(args.gamma), batch=max(args.batch),
                                       max_new_tokens=args.max_new_tokens))
    show(accepting.table(lines.rows))


def report(rows: list[dict[str, Any]], plot: Path | None, show) -> int:
    """Averages, memory and picture; -> 1 where an id differs from the target's, else 0."""
    decoded = [row for row in rows if row["kind"] == "decode"]
    found, held = reporting.averages(decoded), [row for row in rows if row["kind"] == "memory"]
    if found:
        show(reporting.average_table(found))
    if held:
        show(reporting.memory_table(held))
    if plot is not None:
        plotting.plot(decoded, plot)
    if not decoded:
        return 0
    differing = sum(row.get("rows_differing", 0) for row in decoded)
    compared = [row for row in decoded if row["gamma"] is not None]
    show(f"{sum(row['rows_compared'] for row in compared):,} rows, "
         f"{sum(row['tokens_compared'] for row in compared):,} tokens held against the target alone: "
         f"{differing} rows differ")
    return 1 if differing else 0


def reread(args: argparse.Namespace, show) -> int:
    """The tables of lines that earlier runs left."""
    rows = [json.loads(line) for file in args.report for line in file.read_text(encoding="utf-8").splitlines()]
    decoded = [row for row in rows if row["kind"] == "decode"]
    for size in sorted({row["batch"] for row in decoded}):
        same = [row for row in decoded if row["batch"] == size]
        show(reporting.table(size, same, statistics.median(row["probe_bytes_per_second"] for row in same)))
    if accepted := [row for row in rows if row["kind"] == "acceptance"]:
        show(accepting.table(accepted))
    return report(rows, args.plot, show)


def common(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """What every line carries."""
    reason = why_not_prepared(target.int4)
    return {"machine": machine.card(), "not_prepared": reason, "quantize_seconds": target.quantize_seconds,
            "asked": {name: str(value) for name, value in vars(args).items()}}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    show = Console(width=None if Console().is_terminal else 200).print
    if args.plot is not None:
        plotting.require_matplotlib()
    if args.report:
        return reread(args, show)
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    folder = str(Path(args.model).resolve()) if args.model else str(hf_mlspec.demo_pair()[0])
    prompts = encoded(args, folder)
    try:
        by_size = batches_of(mixed(prompts), args.batch, args.batches) if args.parts != ["acceptance"] else {}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    settings = {"group_size": args.group_size, "symmetric": not args.asymmetric}
    target = Target(folder, None if args.quantized else settings)
    lines = Lines(args.json, common(args, target))
    if lines.common["not_prepared"] is not None:
        show(f"NOT PREPARED, nothing here runs compiled steps: {lines.common['not_prepared']}", markup=False)
    if "acceptance" in args.parts:
        bench_acceptance(args, target, prompts, lines, show)
    if "decode" in args.parts:
        bench_decoding(args, target, by_size, lines, show)
    if "memory" in args.parts:
        bench_memory(args, target, by_size, lines)
    status = report(lines.rows, args.plot, show)
    lines.add(reporting.averages(lines.rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
