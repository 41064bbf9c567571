"""Which options do all programs that take a plan have? Folders behind {places}, device and threads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import hf_mlspec
from eval.plan import Places


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
    return Places(args.models, args.data, str(hf_mlspec.demo_pair()[0]))
