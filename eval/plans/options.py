"""Which options do all programs that take a plan have, and how are lists of numbers read?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from eval.plans.places import Places


def parse_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Add --models, --data, --device and --threads to a program's own options, and parse."""
    parser.add_argument("--models", type=Path, default=Path("models"), help="what {models} stands for (%(default)s)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="what {data} stands for (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="threads of this process (torch's own choice)")
    args = parser.parse_args(argv)
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads is {args.threads}, it must be at least 1")
    return args


def places_of(args: argparse.Namespace) -> Places:
    """What {models}, {data} and {demo} stand for."""
    return Places.of(args.models, args.data)


def counts(text: str) -> list[int]:
    """An argparse type: `1,2,4` -> [1, 2, 4]."""
    found = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive numbers such as 1,2,4")
    return found
