"""Does a call that chooses its plans itself keep up with the target alone and with the best fixed plan, in every cell?

    python -m eval.bench_auto PLAN.toml --models FOLDER --data FOLDER                # every cell
    python -m eval.bench_auto PLAN.toml --models FOLDER --data FOLDER --shard 0/4    # every fourth (then 1/4 ...)
    python -m eval.bench_auto PLAN.toml --models FOLDER --data FOLDER --only b8 --only n32 --quick --minutes 3
    python -m eval.bench_auto PLAN.toml --table                                      # of what is done so far

A cell of the plan (eval/configs/auto_*.toml; Python 3.11 or later) names levels, a data set, rows, new tokens, greedy
or sampled, and short or long prompts. In each repeat the same fresh prompts are decoded by every contender in turn, in
one process: the target alone (no levels), auto (levels, nothing else), fixed plans (num_draft_tokens 2, 4, 8 for every
subset of the levels), and for one row transformers' assisted generation with its heuristic schedule. On a GPU they
decode all prompts one after another, as graphs of only two chains are kept, each behind a call that counts for nothing
(auto, which learns, behind as many as count). Speeds are of whole calls, the prompt included; ratios are medians over
repeats of two contenders on the same prompts. Every cell begins with an empty cache of costs: the first call of auto
probes them, which counts in no speed and has a column. Sampled rows do not end early, so that all contenders write
equally many tokens.

With model = "shape:NAME" the target is made on the device, and drafts of it are right as often as the plan says
(shapes.py): such a plan needs no folders.

A finished cell is a line of RESULTS/NAME-I-of-N.jsonl; the same command goes on. Exit status 1 where a greedy row of
auto differs from what the target alone wrote.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

import hf_mlspec
from eval.bench_auto.cell import measure
from eval.bench_auto.contenders import Level, Levels
from eval.bench_auto.lines import differing, ratios, report
from eval.bench_auto.plan import Cell, Plan, check, chosen, read_plan
from eval.bench_auto.shapes import make_target, target_shape
from eval.plans.identity import digest, fingerprint, level_weights
from eval.plans.models import Loaded, Models
from eval.plans.options import parse_options, places_of
from eval.plans.places import Places
from eval.plans.tables import PlanError
from eval.records import machine
from eval.records.progress import Bars
from eval.records.writer import OTHER_RESULTS, Results, ResultsError, read_results

KIND = "auto"
Row = dict[str, Any]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_auto", description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path, help="TOML file: target, chains, data, cells")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the lines (%(default)s)")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="only every N-th cell, from the I-th")
    parser.add_argument("--only", metavar="TEXT", action="append", default=[],
                        help="only cells whose names hold this; repeat it for others")
    parser.add_argument("--minutes", type=float, metavar="N", help="begin no cell after so many; the next run goes on")
    parser.add_argument("--quick", action="store_true", help="1 repeat")
    parser.add_argument("--table", action="store_true", help="print the Markdown of what is done, measure nothing")
    args = parse_options(parser, argv)
    shard = re.fullmatch(r"(\d+)/(\d+)", args.shard)
    if shard is None or not int(shard[1]) < int(shard[2]):
        parser.error(f"--shard is {args.shard!r}, it must be I/N with I from 0 to N - 1")
    args.shard = int(shard[1]), int(shard[2])
    return args


def asked_of(plan: Plan, places: Places, prompts: dict[str, list[str]], device: str) -> Row:
    """What every line depends on beside its cell: another of these is another run."""
    card = {name: value for name, value in machine.card(device).items() if name != "time"}
    weights = [fingerprint(Path(places.fill(plan.model)))]
    weights += [level_weights(plan.system(chain), places) for chain in plan.chains]
    settings = {name: value for name, value in asdict(plan).items() if name != "cells"}
    return {"plan": settings, "machine": card, "weights": weights, "prompts": digest(prompts)}


def run(args: argparse.Namespace) -> int:
    """Measure the cells that are not done yet; -> 1 where ids of any cell differ."""
    disable_progress_bar()
    plan, places = read_plan(args.plan), places_of(args)
    if args.quick:
        plan = dataclasses.replace(plan, repeats=1)
    cells = chosen(plan, args.only, *args.shard)
    prompts = check(plan, places, args.plan)
    asked = asked_of(plan, places, prompts, args.device)
    shard, shards = args.shard
    file = args.results / f"{plan.name}-{shard}-of-{shards}.jsonl"
    with Results(file, plan.name, args.device, elsewhere=OTHER_RESULTS) as results:
        left = [cell for cell in cells if results.find(KIND, asked, cell=cell.name) is None]
        if left:
            end = math.inf if args.minutes is None else time.monotonic() + 60 * args.minutes
            _measure_cells(plan, places, left, prompts, results, asked, args.device, end)
    return show(plan, args)


def _measure_cells(plan: Plan, places: Places, left: list[Cell], prompts: dict[str, list[str]], results: Results,
                   asked: Row, device: str, end: float) -> None:
    """end: by the clock of `time.monotonic`, from when on no cell begins."""
    target = _target(plan, places, device)
    with tempfile.TemporaryDirectory() as folder, Bars() as progress:
        known = Levels(places, target, Path(folder), plan.seed)
        levels = {chain.name: known.of(chain) for chain in plan.chains
                  if any(cell.chain == chain.name for cell in left)}
        for name, those in levels.items():
            _check_levels(name, target, those)
        task = progress.add_task("cells", total=len(left))
        for cell in left:
            if time.monotonic() >= end:
                break
            found = measure(plan, cell, target, levels[cell.chain], prompts[cell.data])
            about = {"cell": cell.name, **asdict(cell), "levels": [level.name for level in levels[cell.chain]]}
            results.add(KIND, {**about, **ratios(found), **found}, asked=asked)
            progress.advance(task)


def _target(plan: Plan, places: Places, device: str) -> Loaded:
    """The folder's model, or one of the shape that the plan names."""
    if plan.is_shape:
        return make_target(target_shape(plan.model, plan.name), device, getattr(torch, plan.dtype), plan.seed)
    return Models(places, device).load(plan.system(plan.chains[0]))


def _check_levels(name: str, target: Loaded, levels: list[Level]) -> None:
    """PlanError for levels that cannot draft for the target: they are built, and nothing is decoded."""
    try:
        hf_mlspec.generate_stream(target.model, [], assistant_models=[level.given for level in levels],
                                  tokenizer=target.tokenizer, speculation_config={"num_draft_tokens": 1},
                                  assistant_tokenizers=[level.tokenizer for level in levels]).close()
    except (OSError, ValueError, TypeError) as error:
        raise PlanError(f"chain {name!r}: {error}") from error


def show(plan: Plan, args: argparse.Namespace) -> int:
    """Print the table of all shards' lines, in the plan's order; -> 1 where ids differ."""
    found: dict[str, Row] = {}
    for file in sorted(args.results.glob(f"{plan.name}-*-of-*.jsonl")):
        for row in read_results(file):
            if row["kind"] == KIND and row["name"] == plan.name:
                before = found.get(row["cell"])
                if before is None or before["machine"]["time"] <= row["machine"]["time"]:
                    found[row["cell"]] = row
    rows = [found[cell.name] for cell in plan.cells if cell.name in found]
    for told in dict.fromkeys(map(_told, rows)):
        print(f"{told}\n")
    print("\n".join(report(rows, len(plan.cells))))
    return 1 if differing(rows) else 0


def _told(row: Row) -> str:
    card = row["machine"]
    return (f"{card['processor']}, {card['cores']} cores, {card['threads']} threads, torch {card['torch']}, "
            f"transformers {card['transformers']}, commit {card['commit']}, "
            f"repeats: {len(row['takes'])}.")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        return show(read_plan(args.plan), args) if args.table else run(args)
    except (PlanError, ResultsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: finished cells are kept in {args.results}; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
