"""Does a chain of levels write what the target alone writes, on the user's own prompts?"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ..evaluation.certificate import Certificate, check_place
from ..evaluation.certificate_badge import check_place as check_badge
from ..evaluation.certificate_run import attest
from ..integration.compare import Comparison, compare
from .request import add_chain_options, chain_config, load_target, positive, positives, read_prompts
from .tables import describe, say, show_comparison


def add_verify(commands: Any) -> None:
    parser = commands.add_parser("verify", help="compare a chain with the target alone on any prompts",
                                 description="Decode prompts with a chain of levels and with the target alone; exit "
                                             "status 1 if any id differs. With --check: is a certificate that an "
                                             "earlier call wrote still one of this model and these kernels?")
    parser.add_argument("model", help="folder of the target")
    parser.add_argument("--prompts", metavar="FILE",
                        help='text with one prompt a line, or .jsonl with "prompt", "question", "turns" ... '
                             "(HumanEval, GSM8K, MT-Bench, Spec-Bench, ARC, MATH)")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts")
    parser.add_argument("--batch-size", type=positives, default=[1], metavar="N[,N...]",
                        help="prompts decoded together; several numbers: one comparison each (default 1)")
    parser.add_argument("--reference", choices=["ours", "stock"], default="ours",
                        help="the target alone through our loop or through transformers' own (default %(default)s)")
    parser.add_argument("--tolerate-ties", type=_gap, metavar="GAP",
                        help="float32 only: a difference whose two best float64 logits lie closer than GAP is listed, "
                             "but does not fail")
    parser.add_argument("--certificate", metavar="FILE", help="write all that was found, and of what, as JSON")
    parser.add_argument("--badge", metavar="FILE",
                        help="put the outcome into a Markdown file, such as the README.md of the model")
    parser.add_argument("--check", metavar="CERTIFICATE", help="compare nothing, hash weights and kernels anew")
    add_chain_options(parser, max_new_tokens=128)
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    if args.check is not None:
        return _check(args)
    _require_input(args)
    config, prompts = chain_config(args), read_prompts(args.prompts, args.limit)
    model, tokenizer = load_target(args.model, args)
    screen = Console(stderr=True)
    runs = {}
    with Progress(console=screen, transient=True, disable=args.json or not screen.is_terminal) as progress:
        task = progress.add_task("chain, then target alone", total=2 * len(prompts) * len(args.batch_size))
        for size in args.batch_size:
            runs[size] = compare(model, tokenizer, prompts, args.levels, max_new_tokens=args.max_new_tokens,
                                 batch_size=size, speculation_config=config, reference=args.reference,
                                 on_item=lambda item, comparison: progress.advance(task))
    _show(args, runs)
    if args.certificate or args.badge:
        found = attest(model, tokenizer, prompts, args.levels, runs, max_new_tokens=args.max_new_tokens,
                       reference=args.reference, speculation_config=config, tolerate_ties=args.tolerate_ties,
                       folder=args.model if Path(args.model).is_dir() else None,
                       prompts_name=args.prompts)
        _write(args, found)
    return 1 if _failing(args, runs) else 0


def _require_input(args: argparse.Namespace) -> None:
    """What can be known to be wrong before a model is loaded."""
    if args.prompts is None:
        raise ValueError("no --prompts FILE given; verify compares on the prompts in it")
    if args.tolerate_ties is not None and args.dtype != "float32":
        raise ValueError(f"--tolerate-ties is for float32, where sums may break ties either way, not {args.dtype}")
    if not args.levels:
        raise ValueError("no --level given; name at least one, as in --level mxfp4")
    _require_different_files({"--prompts": args.prompts, "--certificate": args.certificate, "--badge": args.badge})
    if args.certificate is not None:
        check_place(args.certificate)
    if args.badge is not None:
        check_badge(args.badge)


def _require_different_files(named: dict[str, str | None]) -> None:
    seen: dict[Path, str] = {}
    for option, file in named.items():
        if file is not None and seen.setdefault(Path(file).resolve(), option) != option:
            raise ValueError(f"{seen[Path(file).resolve()]} and {option} both name {file!r}, and one would overwrite "
                             "the other; name two files")


def _write(args: argparse.Namespace, found: Certificate) -> None:
    console = Console(stderr=True)
    if args.certificate is not None:
        found.save(args.certificate)
        say(console, f"certificate written to {args.certificate}")
    if args.badge is not None:
        found.save_badge(args.badge)
        say(console, f"badge written to {args.badge}")


def _check(args: argparse.Namespace) -> int:
    given = {"--certificate": args.certificate, "--badge": args.badge}
    if any(given.values()):
        raise ValueError(f"--check compares nothing, so there is nothing to write with "
                         f"{' and '.join(name for name, value in given.items() if value)}; leave it out")
    certificate = Certificate.load(args.check)
    prompts = read_prompts(args.prompts, args.limit) if args.prompts is not None else None
    found = certificate.check(args.model, args.levels or [], prompts)
    holds = bool(found) and certificate.lossless
    if args.json:
        print(json.dumps({"statement": certificate.statement, **vars(found), "holds": holds}))
        return 0 if holds else 1
    console = Console()
    say(console, certificate.statement)
    for word, lines in (("same", found.same), ("not checked", found.unchecked), ("DIFFERENT", found.different)):
        for line in lines:
            say(console, f"  {word}: {line}")
    say(console, "the certificate is of this model and these kernels" if found
        else f"the certificate is not of this model and these kernels: {len(found.different)} differences")
    return 0 if holds else 1


def _gap(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no distance of two logits, a finite number of 0 or more")
    return value


_gap.__name__ = "number"  # argparse: "invalid number value"


def _failing(args: argparse.Namespace, runs: dict[int, Comparison]) -> int:
    return sum(len(found.beyond_ties(args.tolerate_ties or 0.0)) for found in runs.values())


def _show(args: argparse.Namespace, runs: dict[int, Comparison]) -> None:
    if not args.json:
        for size, found in runs.items():
            title = "levels, all prompts" + (f", batch size {size}" if len(runs) > 1 else "")
            _show_run(Console(), found, args.tolerate_ties, title)
        return
    asked = {name: getattr(args, name) for name in ("model", "levels", "prompts", "dtype", "device",
                                                    "max_new_tokens", "reference", "tolerate_ties")}
    told = [{**found.to_dict(), "asked": {**asked, "batch_size": size},
             "failing": len(found.beyond_ties(args.tolerate_ties or 0.0))} for size, found in runs.items()]
    print(json.dumps(told[0] if len(told) == 1 else {"runs": told, "failing": _failing(args, runs)}))


def _show_run(console: Console, found: Comparison, tolerance: float | None, title: str) -> None:
    show_comparison(console, found, title)
    for item in found.items:
        if item.difference is not None:
            tie = tolerance is not None and item.difference.gap_float64 < tolerance
            say(console, ("a tie, tolerated: " if tie else "different: ") + describe(item.index, item.difference))
    say(console, f"tokens compared: {found.tokens_compared}")
    say(console, f"ids identical: {found.identical} of {len(found.items)} prompts")
