"""Which traces does a plan name, and are they recorded? One JSON file a chain and data set, small enough to commit.

    python -m eval.record_traces eval/configs/acceptance_traces.toml --models FOLDER --data FOLDER --out eval/traces

The plan is that of eval.acceptance. A file that holds already what the plan asks for stays; one that holds something
else is refused, unless --overwrite. Finished batches are kept under --journals, so that a killed run goes on.
docs/traces.md describes the files; `hf_mlspec.evaluation.replay` and eval.replay use them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from eval.acceptance.plan import Unit, journal_of, read_plan, record, units
from eval.plans.options import parse_options, places_of
from eval.plans.tables import PlanError
from eval.records.progress import Bars
from hf_mlspec.evaluation import read_trace, what_changed, write_trace


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.record_traces", description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path, help="TOML file: systems and data, as eval.acceptance takes them")
    parser.add_argument("--out", type=Path, default=Path("eval/traces"), help="folder of the traces (%(default)s)")
    parser.add_argument("--journals", type=Path, default=Path("results/traces"), help="(%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="record anew what stands there already")
    return parse_options(parser, argv)


def is_recorded(unit: Unit, file: Path) -> bool:
    """Whether the file holds this trace; PlanError where it holds another one."""
    if not file.exists():
        return False
    origin = read_trace(file).origin
    was, now = dict(origin.get("asked", {})), dict(unit.asked)
    for name, value in unit.material.items():
        if name in origin:  # older files do not say it
            was[name], now[name] = origin[name], value
    if parts := what_changed(was, now):
        raise PlanError(f"{file} holds another trace ({parts}): rename the system, name another folder as --out, or "
                        "pass --overwrite")
    return True


def run(args: argparse.Namespace) -> None:
    places = places_of(args)
    plan = read_plan(args.plan)
    if not plan.systems:
        raise PlanError(f"{args.plan}: no table [[systems]], so there is no chain to record: [[pairs]] are for "
                        "eval.acceptance")
    files = [(unit, args.out / f"{unit.name}.json") for unit in units(plan, places, args.plan)]
    todo = [unit for unit, file in files if args.overwrite or not is_recorded(unit, file)]
    with Bars() as progress:
        for unit, trace in record(todo, places, device=args.device, folder=args.journals, progress=progress,
                                  elsewhere="name another folder as --journals"):
            write_trace(trace, args.out / f"{unit.name}.json")
            journal_of(unit, args.journals).unlink()  # --overwrite records anew
    for unit, file in files:
        print(f"{file}: {'recorded' if unit in todo else 'was there'}, {file.stat().st_size:,} bytes")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        run(args)
    except (PlanError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
