"""What do QSpec's chains win on models whose codes were chosen by different methods, beside the first of them?

    python -m eval.bench_methods FOLDER FOLDER ... --prompts HumanEval.jsonl --batch 1,8,32 --threads 4

Folders of `mlspec quantize`: name the one that rounds to nearest first. Each model writes greedily alone and with one
level (--level, "w4a4") that drafts three tokens a round, in turns in which all models and both ways take part. Tokens
a second: of all batches of a size, each in the least time of its turns, prompts included. Two ratios: of the chain to
the same model alone, and to the chain of the first model. Exit status 1 if an id of a chain is not its model's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec
from eval.plans.options import counts
from eval.records import machine
from eval.refused import refused
from eval.rows import padded
from eval.scored import GREEDY
from hf_mlspec.evaluation import read_prompts

MOST_ROWS = 8  # of all batches of a size, where one batch has fewer
Batch = dict[str, torch.Tensor]


@dataclass
class Turns:
    """Of one model and batch size. alone, chain: the least seconds of each batch."""

    alone: list[float]
    chain: list[float]
    ids: list[torch.Tensor | None]
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    tokens: int = 0
    row_passes: int = 0
    compared: int = 0
    differing: int = 0

    @classmethod
    def of(cls, batches: int) -> Turns:
        return cls([math.inf] * batches, [math.inf] * batches, [None] * batches)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_methods", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="FOLDER", help="of mlspec quantize, the base first")
    parser.add_argument("--prompts", type=Path, action="append", required=True, metavar="FILE", help="may be repeated")
    parser.add_argument("--level", default="w4a4", help="(%(default)s)")
    parser.add_argument("--draft", type=int, default=3, help="tokens a round (%(default)s)")
    parser.add_argument("--batch", type=counts, default=[1, 8, 32], help="(1,8,32)")
    parser.add_argument("--tokens", type=int, default=128, help="new ones of a row (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns that count, behind one that does not")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--threads", type=int, help="of the CPU (torch's own choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a line a model and batch size")
    args = parser.parse_args(argv)
    if min(args.draft, args.tokens, args.repeats, args.threads or 1) < 1:
        parser.error("--draft, --tokens, --repeats and --threads are at least 1")
    models = [("FOLDER", folder) for folder in args.models]
    if reason := refused(args.device, models, [("--prompts", file) for file in args.prompts], [("--json", args.json)]):
        parser.error(reason)
    return args


def method_of(model: PreTrainedModel, folder: Path) -> str:
    """The word that its config.json records, else the folder's name."""
    settings = getattr(model.config, "quantization_config", None)
    return (getattr(settings, "calibration", None) or {}).get("method", folder.name)


def loaded(folder: Path, device: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    return hf_mlspec.prepare(model)


def batches_of(prompts: list[list[int]], size: int, device: str) -> list[Batch]:
    """Of so many rows each; ValueError for too few prompts."""
    if len(prompts) < size:
        raise ValueError(f"a batch of {size} needs as many prompts, and {len(prompts)} were read: give more")
    number = min(max(1, MOST_ROWS // size), len(prompts) // size)
    return [padded(prompts[first * size : (first + 1) * size], device) for first in range(number)]


def timed(model: PreTrainedModel, inputs: Batch, tokens: int, **options: Any) -> tuple[float, torch.Tensor]:
    """Seconds of a call, and its ids on the CPU."""
    began = time.perf_counter()
    ids = model.generate(**inputs, max_new_tokens=tokens, **GREEDY, **options).cpu()
    return time.perf_counter() - began, ids


def turn(args: argparse.Namespace, model: PreTrainedModel, batches: list[Batch], told: Turns, counted: bool) -> None:
    """Both ways, once. counted: whether the times are."""
    chain = {"assistant_models": [args.level], "speculation_config": {"num_draft_tokens": args.draft}}
    for at, inputs in enumerate(batches):
        for best, options in ((told.alone, {"assistant_models": []}), (told.chain, chain)):
            seconds, ids = timed(model, inputs, args.tokens, **options)
            best[at] = min(best[at], seconds) if counted else best[at]
            if best is told.alone:
                told.ids[at] = ids
                continue
            told.compared += ids.numel() - inputs["input_ids"].numel()
            told.differing += int((ids != told.ids[at]).sum())
            stats = hf_mlspec.last_stats(model)
            level = stats.levels[0]
            for name in ("drafted", "tested", "accepted"):
                setattr(told, name, getattr(told, name) + getattr(level, name))
            told.tokens, told.row_passes = told.tokens + stats.new_tokens, told.row_passes + stats.row_passes


def lines_of(size: int, args: argparse.Namespace, told: dict[str, Turns]) -> list[dict[str, Any]]:
    """A line a model."""
    lines, base = [], None
    for name, own in told.items():
        written = size * args.tokens * len(own.alone)
        alone, chain = written / sum(own.alone), written / sum(own.chain)
        base = base or chain
        lines.append({
            "method": name, "batch": size, "alone_tokens_per_second": alone, "chain_tokens_per_second": chain,
            "of_alone": chain / alone, "of_first_chain": chain / base, "of_drafted": own.accepted / own.drafted,
            "of_tested": own.accepted / own.tested, "tokens_per_pass": own.tokens / own.row_passes,
            "compared": own.compared, "differing": own.differing,
        })  # fmt: skip
    return lines


def shown(size: int, args: argparse.Namespace, lines: list[dict[str, Any]]) -> Table:
    table = Table("method", "alone", args.level, "x alone", "x first", "of drafted", "of tested", "tokens / pass",
                  "differ", title=f"tokens a second, {size} rows")  # fmt: skip
    for line in lines:
        rates = [f"{line[way]:,.0f}" for way in ("alone_tokens_per_second", "chain_tokens_per_second")]
        table.add_row(line["method"], *rates, f"{line['of_alone']:.3f}", f"{line['of_first_chain']:.3f}",
                      f"{line['of_drafted']:.3f}", f"{line['of_tested']:.3f}", f"{line['tokens_per_pass']:.2f}",
                      f"{line['differing']} of {line['compared']:,}")  # fmt: skip
    return table


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.models[0])
    most = max(*args.batch, MOST_ROWS)
    by_turns = zip_longest(*[read_prompts(file, most) for file in args.prompts])
    prompts = [tokenizer(text).input_ids for texts in by_turns for text in texts if text is not None][:most]
    try:
        batches = {size: batches_of(prompts, size, args.device) for size in args.batch}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    models: dict[str, PreTrainedModel] = {}
    for folder in args.models:
        model = loaded(folder, args.device)
        name = method_of(model, folder)
        models[name if name not in models else str(folder)] = model
    card, console, differing = machine.card(args.device), Console(width=None if Console().is_terminal else 140), 0
    for size, own in batches.items():
        told = {name: Turns.of(len(own)) for name in models}
        for number in range(args.repeats + 1):
            for name, model in models.items():
                turn(args, model, own, told[name], counted=number > 0)
        lines = lines_of(size, args, told)
        console.print(shown(size, args, lines))
        differing += sum(line["differing"] for line in lines)
        if args.json:
            with args.json.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps({**line, "machine": card}) + "\n" for line in lines)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
