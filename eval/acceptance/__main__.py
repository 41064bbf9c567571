"""How many of the tokens that each level drafts are accepted, at which place in a draft, with which draft lengths?

    python -m eval.acceptance PLAN.toml --models FOLDER --data FOLDER     # decode, record, count
    python -m eval.acceptance PLAN.toml ... --report                      # the tables of what is done so far
    python -m eval.acceptance --trace eval/traces/*.json                  # of traces recorded earlier; nothing decoded

A plan (eval/configs/acceptance_*.toml; Python 3.11 or later) names systems, one per chain and draft length, and data.
Counted are real runs, nothing is teacher-forced: accepted is what the level above kept, tested what it got to judge.
Its [[pairs]] are another question, whether one draft agrees with the target as often as another: token by token on the
target's own text, with the lower bound of the difference (eval/acceptance/pairs.py). Exit status 1 where a bound falls
below the pair's margin.
Every finished batch of prompts is on disk at once (RESULTS/NAME/*.jsonl), a finished chain one line a level in
RESULTS/NAME.jsonl; a run that was killed goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eval.acceptance.pairs import CONFIDENCE, PairUnit, compare_drafts
from eval.acceptance.plan import Plan, Unit, read_plan, record, units, units_of_pairs
from eval.plans.options import parse_options, places_of
from eval.plans.places import Places
from eval.plans.tables import PlanError
from eval.records.fields import ordinal
from eval.records.progress import Bars
from eval.records.writer import OTHER_RESULTS, Results, ResultsError
from hf_mlspec.evaluation import Trace, level_acceptance, read_trace

_POSITIONS = 8  # columns of the table; the lines hold all


def lines_of(trace: Trace) -> list[dict[str, Any]]:
    """One result of kind "acceptance" per level."""
    packed = trace.target.activation_bits is not None
    about = {
        "target": trace.target.name + (f" {trace.target.weights}" if packed else ""),
        "levels": [level.name for level in trace.levels], "data": trace.data, "batch": trace.batch_size,
        "num_draft_tokens": [level.num_draft_tokens for level in trace.levels],
        "confidence_threshold": [level.confidence_threshold for level in trace.levels], "prompts": len(trace.rows),
        "new_tokens": trace.new_tokens, "max_new_tokens": trace.max_new_tokens,
    }
    return [{**about, **found.to_dict()} for found in level_acceptance(trace)]


def table(lines: Iterable[dict[str, Any]]) -> Table:
    """Acceptance per level, then of the 1st, 2nd ... drafted token: kept of those all before which were kept.

    Tokens per pass count all passes of the level above, that of the target which reads the prompt among them.
    """
    places = [ordinal(position) for position in range(_POSITIONS)]
    out = Table("chain", "data", "K, threshold", "level", "drafted", "tested", "acceptance", "mean draft",
                "tokens / pass", *places, title="acceptance a token, greedy, in real runs; then of the "
                "1st, 2nd ... drafted token", caption="tokens / pass: the pass that reads the prompt is counted")
    for line in lines:
        made = sum(line["draft_lengths"][1:])
        settings = ", ".join(f"{k} {t:g}" for k, t in zip(line["num_draft_tokens"], line["confidence_threshold"],
                                                          strict=True))
        at = [f"{one['accepted'] / one['tested']:.2f}" if one["tested"] else "-" for one in line["by_position"]]
        at += ["-"] * _POSITIONS
        share = "-" if line["acceptance"] is None else f"{line['acceptance']:.4f}"
        out.add_row(f"{line['target']} <- {' <- '.join(line['levels'])}", line["data"], settings, line["level"],
                    f"{line['drafted']:,}", f"{line['tested']:,}", share,
                    f"{line['drafted'] / made:.2f}" if made else "-", f"{line['tokens_per_pass']:.3f}",
                    *at[:_POSITIONS])
    return out


def pairs_table(lines: Iterable[dict[str, Any]]) -> Table:
    """Acceptance of both drafts of every pair, and the bound of their difference."""
    out = Table("target", "data", "draft", "against", "prompts", "tokens", "acceptance", "of the other", "difference",
                "lower bound", "required", title="acceptance a token, greedy, on the target's own text, and its "
                f"difference, at {CONFIDENCE:.0%} one-sided over prompts")
    for line in lines:
        draft = f"{line['draft']} {line['codebook']}" if line["draft"] != "mxfp4" else line["draft"]
        out.add_row(line["target"], line["data"], draft, line["against"], f"{line['prompts']:,}",
                    f"{line['tokens']:,}", f"{line['acceptance']:.4f}", f"{line['acceptance_against']:.4f}",
                    f"{line['difference']:+.4f}", f"{line['lower_bound']:+.4f}",
                    f">= {-line['margin']:g}: {'met' if line['met'] else 'MISSED'}")
    return out


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.acceptance", description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path, nargs="?", help="TOML file: systems and data")
    parser.add_argument("--trace", type=Path, nargs="+", default=[], metavar="FILE", help="traces instead of a plan")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the results (%(default)s)")
    parser.add_argument("--report", action="store_true", help="print the tables of what is done, compute nothing")
    args = parse_options(parser, argv)
    if (args.plan is None) == (not args.trace):
        parser.error("give a plan, or --trace with files, and not both")
    return args


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of the plan: those of earlier runs, then, each as soon as it is there, what was left to do."""
    plan = read_plan(args.plan)
    places = places_of(args)
    every, pairs = units(plan, places, args.plan), units_of_pairs(plan, places, args.plan)
    file = args.results / f"{plan.name}.jsonl"
    with Results(file, plan.name, args.device, elsewhere=OTHER_RESULTS) as results:
        todo = [unit for unit in every if len(_done(unit, results)) < len(unit.system.levels)]
        if todo and not args.report:
            _measure(todo, places, args, results, args.results / plan.name)
        if not args.report:
            _compare(pairs, places, args, results, plan)
        for unit in every:
            yield from _done(unit, results)
        yield from (line for unit in pairs if (line := _pair_line(unit, results)) is not None)


def _compare(pairs: list[PairUnit], places: Places, args: argparse.Namespace, results: Results, plan: Plan) -> None:
    todo = [unit for unit in pairs if _pair_line(unit, results) is None]
    if not todo:
        return
    with Bars() as progress:
        for unit, found in compare_drafts(todo, places, device=args.device, folder=args.results / plan.name,
                                          progress=progress):
            results.add("paired acceptance", {"pair": unit.pair.name, "data": unit.data.name, **found,
                                              "met": found["lower_bound"] >= -unit.pair.margin}, asked=unit.identity)


def _pair_line(unit: PairUnit, results: Results) -> dict[str, Any] | None:
    return results.find("paired acceptance", unit.identity, pair=unit.pair.name, data=unit.data.name)


def _measure(todo: list[Unit], places: Places, args: argparse.Namespace, results: Results, folder: Path) -> None:
    with Bars() as progress:
        for unit, trace in record(todo, places, device=args.device, folder=folder, progress=progress):
            for index, line in enumerate(lines_of(trace)):
                if _line(unit, index, results) is None:
                    results.add("acceptance", {"system": unit.system.name, **line}, asked=unit.identity)


def _done(unit: Unit, results: Results) -> list[dict[str, Any]]:
    """The unit's lines that are there already, one a level."""
    found = [_line(unit, index, results) for index in range(len(unit.system.levels))]
    return [line for line in found if line is not None]


def _line(unit: Unit, index: int, results: Results) -> dict[str, Any] | None:
    identity = {"system": unit.system.name, "data": unit.data.name, "level_index": index}
    return results.find("acceptance", unit.identity, **identity)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    console = Console(width=None if Console().is_terminal else 220)
    try:
        if args.trace:
            lines = [line for file in args.trace for line in lines_of(read_trace(file))]
        else:
            lines = list(measured(args))
    except (PlanError, ResultsError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    paired = [line for line in lines if line.get("kind") == "paired acceptance"]
    chains = [line for line in lines if line.get("kind") != "paired acceptance"]
    if chains or not paired:
        console.print(table(chains))
    if paired:
        console.print(pairs_table(paired))
    return 0 if all(line["met"] for line in paired) else 1


if __name__ == "__main__":
    sys.exit(main())
