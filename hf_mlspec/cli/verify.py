"""Does a chain of levels write what the target alone writes, on the user's own prompts?"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ..integration.compare import compare
from ..integration.comparison import Comparison
from .request import add_chain_options, chain_config, load_target, positive, read_prompts
from .tables import describe, say, show_comparison


def add_verify(commands: Any) -> None:
    parser = commands.add_parser("verify", help="compare a chain with the target alone on any prompts",
                                 description="Decode prompts with a chain of levels and with the target alone; exit "
                                             "status 1 if any id differs.")
    parser.add_argument("model", help="folder of the target")
    parser.add_argument("--prompts", required=True, metavar="FILE",
                        help='text with one prompt a line, or .jsonl with "prompt" or "question" (HumanEval, GSM8K)')
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts")
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N",
                        help="prompts decoded together (default %(default)s)")
    parser.add_argument("--reference", choices=["ours", "stock"], default="ours",
                        help="the target alone through our loop or through transformers' own (default %(default)s)")
    parser.add_argument("--tolerate-ties", type=_gap, metavar="GAP",
                        help="float32 only: a difference whose two best float64 logits lie closer than GAP is listed, "
                             "but does not fail")
    add_chain_options(parser, max_new_tokens=128)
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    if args.tolerate_ties is not None and args.dtype != "float32":
        raise ValueError(f"--tolerate-ties is for float32, where sums may break ties either way, not {args.dtype}")
    if not args.levels:
        raise ValueError("no --level given; name at least one, as in --level mxfp4")
    config, prompts = chain_config(args), read_prompts(args.prompts, args.limit)
    model, tokenizer = load_target(args.model, args)
    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=args.json or not screen.is_terminal) as progress:
        task = progress.add_task("chain, then target alone", total=2 * len(prompts))
        found = compare(model, tokenizer, prompts, args.levels, max_new_tokens=args.max_new_tokens,
                        batch_size=args.batch_size, speculation_config=config, reference=args.reference,
                        on_item=lambda item, comparison: progress.advance(task))
    failing = found.beyond_ties(args.tolerate_ties or 0.0)
    if args.json:
        asked = {name: getattr(args, name) for name in ("model", "levels", "prompts", "dtype", "device", "batch_size",
                                                        "max_new_tokens", "reference", "tolerate_ties")}
        print(json.dumps({**found.to_dict(), "asked": asked, "failing": len(failing)}))
    else:
        _show(Console(), found, args.tolerate_ties)
    return 1 if failing else 0


def _gap(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no distance of two logits, a finite number of 0 or more")
    return value


_gap.__name__ = "number"  # argparse: "invalid number value"


def _show(console: Console, found: Comparison, tolerance: float | None) -> None:
    show_comparison(console, found, "levels, all prompts")
    for item in found.items:
        if item.difference is not None:
            tie = tolerance is not None and item.difference.gap_float64 < tolerance
            say(console, ("a tie, tolerated: " if tie else "different: ") + describe(item.index, item.difference))
    say(console, f"tokens compared: {found.tokens_compared}")
    say(console, f"ids identical: {found.identical} of {len(found.items)} prompts")
