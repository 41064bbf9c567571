"""Is what a chain writes as good as what its target writes, and how near do lower precisions come?

    python -m eval.quality PLAN.toml --models FOLDER --data FOLDER              # everything the plan asks for
    python -m eval.quality PLAN.toml ... --only fidelity --only perplexity      # these parts
    python -m eval.quality PLAN.toml ... --report                               # the tables of what is done so far

A plan (eval/configs/quality_*.toml; Python 3.11 or later) names systems and what each is measured on:

tasks           lm-eval tasks, `limit` items each; a chain's answers are compared with its target's, token by token
fidelity        greedy continuations: the share of prompts whose tokens all equal those of the system's reference
perplexity      of a text, in windows that overlap; of systems without levels, as levels do not change it
probabilities   of the reference's own greedy tokens under it and under another precision: Pearson's r and points for
                a scatter plot, in the manner of QSpec's Figure 2, which sets W4A4 against W4A16

In it {models}, {data} and {demo} stand for the two folders and the demo target. Every finished item is on disk at once
(RESULTS/NAME/*.jsonl), every finished result a line of RESULTS/NAME.jsonl with the machine and the commit. A run that
was killed goes on where it was. Exit status: 1 where a system with levels differs from its target alone in one id, 2
for a plan or a folder that cannot be used, said before anything is computed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import transformers

from eval.plans.models import Models
from eval.plans.options import parse_options, places_of
from eval.plans.places import Places
from eval.plans.tables import PlanError
from eval.quality import journals as quality_journals
from eval.quality.plan import PARTS, Plan, check_plan, read_plan
from eval.quality.report import lossy, report
from eval.quality.run import Run
from eval.quality.tasks import documents
from eval.quality.units import Units
from eval.records.writer import OTHER_RESULTS, Results, ResultsError


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.quality", description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path, help="TOML file: systems, and what they are measured on")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the results (%(default)s)")
    parser.add_argument("--only", action="append", choices=sorted(PARTS), metavar="PART",
                        help=f"one of {', '.join(sorted(PARTS))}; may be repeated")
    parser.add_argument("--report", action="store_true", help="print the tables of what is done, compute nothing")
    return parse_options(parser, argv)


def measure(args: argparse.Namespace) -> int:
    """Compute what is left, print the tables; -> the exit status."""
    plan = read_plan(args.plan)
    quality_journals.check(plan, args.plan)
    places = places_of(args)
    material = check_plan(plan, places, args.plan)
    parts = args.only or list(PARTS)
    units = Units(plan, material, places, args.device, _documents(plan, places, args.plan) if "tasks" in parts else {})
    todo = units.of_parts(parts)
    file = args.results / f"{plan.name}.jsonl"
    with Results(file, plan.name, args.device, elsewhere=OTHER_RESULTS) as results:
        if not args.report:
            run = Run(plan, units, material, Models(places, args.device), results, args.results / plan.name)
            run.run(todo, args.plan)
        print("\n".join(report(plan, todo, results)))
        found = [line for unit in todo if (line := unit.line(results))]
    return 1 if any(lossy(plan, line) for line in found) else 0


def _documents(plan: Plan, places: Places, path: Path) -> dict[str, str]:
    try:
        return documents(plan.tasks, places.data)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.utils.logging.disable_progress_bar()
    try:
        return measure(args)
    except (PlanError, ResultsError) as error:
        print(f"eval.quality: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
