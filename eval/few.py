"""What do programs that time requests share of their options? `--quick`, and limits of new tokens at random."""

from __future__ import annotations

import argparse
import random
from typing import Any


def add_quick(parser: argparse.ArgumentParser, what: str) -> None:
    """`--quick`: a run that shows that all works. what: it does then."""
    parser.add_argument("--quick", action="store_true", help=what)


def settle(args: argparse.Namespace, few: dict[str, Any], many: dict[str, Any]) -> None:
    """Options that were not given: `few` with --quick, else `many`."""
    for name, value in (few if args.quick else many).items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def require_limits(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """An error of the parser for limits of new tokens that cannot be."""
    if not 1 <= args.shortest <= args.longest:
        parser.error(f"--shortest {args.shortest} and --longest {args.longest}: 1 <= shortest <= longest is meant")


def limits(args: argparse.Namespace) -> list[int]:
    """A limit of new tokens for every request, log-uniform from args.shortest to args.longest."""
    rng, ratio = random.Random(args.seed), args.longest / args.shortest
    return [round(args.shortest * ratio ** rng.random()) for _ in range(args.requests)]
