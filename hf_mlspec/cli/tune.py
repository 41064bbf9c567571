"""What does a forward pass of every model of a chain cost here, and which draft lengths follow from it?"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ..evaluation.certificate_badge import check_folder
from ..integration.costs.file import cache_folder
from ..integration.costs.survey import ROOM, SLOTS, Example, Survey
from ..speculation.costs import PassCosts
from .picture import require_picture
from .request import chain_config, load_target
from .tables import say, show

BATCHES, ACCEPTANCES = (1, 4, 8, 32), (0.5, 0.7, 0.9)
_BUDGET = 60.0  # seconds for a model, so that one of a second a pass is measured too
_SHOWN_SLOTS = 1000


def run_tune(args: argparse.Namespace) -> int:
    _require_input(args)
    config = chain_config(args)
    model, tokenizer = load_target(args.model, args)
    survey = Survey(model, tokenizer, args.levels, config)
    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=args.json or not screen.is_terminal) as progress:
        task = progress.add_task("forward passes", total=survey.steps)
        kept = survey.measure(budget=_BUDGET, repeats=args.repeats, step=lambda: progress.advance(task))
    examples = [survey.example(rows, acceptance) for rows in BATCHES for acceptance in ACCEPTANCES]
    if args.output is not None:
        survey.write(args.output, Path(args.model).name)
    if args.plot is not None:
        from .tune_plot import draw  # matplotlib is optional

        costs = dict(zip(survey.names, survey.costs[1:], strict=True))
        draw(survey.costs[0], costs, args.plot, survey.accepted)
    where = str(cache_folder() / "costs") if kept else None
    if args.json:
        print(json.dumps(_told(args, survey, examples, where)))
    else:
        _show(args, survey, examples, where)
    return 0


def _require_input(args: argparse.Namespace) -> None:
    """What can be known to be wrong before a model is loaded."""
    if not args.levels:
        raise ValueError("no --level given; name at least one, as in --level mxfp4")
    if args.output is not None:
        check_folder(args.output, "the profile")
    if args.plot is None:
        return
    require_picture(args.plot)
    if args.output is not None and Path(args.output).resolve() == Path(args.plot).resolve():
        raise ValueError(f"--output and --plot both name {args.plot!r}; name two files")


def _told(args: argparse.Namespace, survey: Survey, examples: list[Example], kept: str | None) -> dict:
    asked = {name: getattr(args, name) for name in ("model", "levels", "dtype", "device", "repeats")}
    costs = [None if one is None else one.to_dict() for one in survey.costs]
    return {
        "asked": asked, "machine": survey.machine, "target": costs[0],
        "levels": [{"name": name, "costs": one} for name, one in zip(survey.names, costs[1:], strict=True)],
        "plans": [dataclasses.asdict(one) for one in examples], "accepted": survey.accepted, "chooses": survey.chooses,
        "kept_in": kept, "profile": args.output, "plot": args.plot,
    }


def _show(args: argparse.Namespace, survey: Survey, examples: list[Example], kept: str | None) -> None:
    console = Console()
    machine = survey.machine
    say(console, f"measured on {machine['device']}, {machine['threads']} threads, {args.dtype}")
    timed = {name: costs for name, costs in zip(["target", *survey.names], survey.costs, strict=True)
             if costs is not None}
    lookups = "".join(f"; {name}: a lookup, no costs" for name in survey.names if name not in timed)
    show(console, f"ms of a forward pass: the least of {args.repeats}, and how far the median is above it{lookups}",
         ("tokens", *timed), _cost_rows(list(timed.values())))
    rows = [(str(rows), *(f"{one.plan}: {one.speedup:.2f} x" for one in examples if one.rows == rows))
            for rows in BATCHES]
    show(console, "plan, and expected speed over the target alone, if of all drafted tokens so many are kept "
                  f"({SLOTS} tokens before them, {ROOM} to come)",
         ("rows", *(f"{acceptance:.0%}" for acceptance in ACCEPTANCES)), rows)
    if accepted := survey.accepted:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in accepted.items())
        say(console, f"of the tokens drafted for the target in earlier calls so many were kept: {shares}")
    if not survey.chooses:
        say(console, "a level's generation_config names its draft length or threshold: calls keep to that")
    if survey.replayed:
        say(console, "passes and plans are those of captured rounds; passes that run step by step were measured too")
    if survey.alone:
        say(console, "rounds of these levels cannot be captured: passes run step by step, and plans are compared with "
                     "captured rounds of the target alone")
    if kept:
        say(console, f"costs for the next calls are in {kept}")
    for option, file in (("profile", args.output), ("picture", args.plot)):
        if file is not None:
            say(console, f"{option} written to {file}")


def _cost_rows(costs: list[PassCosts]) -> list[tuple[str, ...]]:
    """A row for each number of tokens, "-" where there was no time to measure it; then the cost of attention."""
    counts = sorted({count for one in costs for count in one.tokens})
    rows = [(f"{count}", *(_cell(one, count) for one in costs)) for count in counts]
    far = [f"{1e3 * _SHOWN_SLOTS * one.attention:.3f}" for one in costs]
    return [*rows, (f"each, to attend to {_SHOWN_SLOTS} more", *far)]


def _cell(costs: PassCosts, count: int) -> str:
    if count not in costs.tokens:
        return "-"
    at = costs.tokens.index(count)
    return f"{1e3 * costs.seconds[at]:.3f} +{costs.spread[at]:.0%}"
