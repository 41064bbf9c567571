"""What does a model's packed form weigh, and where was it written?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from typing import Any

from rich.console import Console

from ..formats import FORMATS, Option, options
from ..integration.levels.load import DTYPES, hide_progress_bars
from ..integration.quantizer.config import MLSpecConfig
from ..integration.quantizer.folder import Quantized, quantize_folder
from .tables import say, show


def add_quantize(commands: Any) -> None:
    parser = commands.add_parser("quantize", help="write a packed form of a model",
                                 description="Quantize a causal language model while it loads, tensor by tensor, and "
                                             "save it with its tokenizer.")
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("out", help="folder to write to")
    names = dict.fromkeys(name for record in FORMATS.values() for name in (record.written, record.word))
    parser.add_argument("--format", choices=list(names), default="int4", help="default %(default)s")
    for option in options().values():
        _add_option(parser, option)
    parser.add_argument("--activation-bits", type=int, default=16, metavar="N",
                        help="what the layers compute with unless told otherwise: 16, 8, or for int4 also 4 "
                             "(default %(default)s)")
    parser.add_argument("--skip", action="append", metavar="NAME",
                        help="a module to keep wide, by the end or start of its name or a pattern; repeat it for more "
                             "(the output head is kept, but in nested-bf16)")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto",
                        help="of what stays wide (default: the model's own)")
    parser.add_argument("--max-shard-size", type=_size, default="5GB", metavar="SIZE",
                        help="such as 500MB or 5GB (default %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run_quantize)


def run_quantize(args: argparse.Namespace) -> int:
    settings = {name: getattr(args, name) for name in options()}
    config = MLSpecConfig(args.format, activation_bits=args.activation_bits, skip_modules=args.skip,
                          **{name: value for name, value in settings.items() if value is not None})
    if args.json or not sys.stderr.isatty():
        hide_progress_bars()
    found = quantize_folder(args.model, args.out, config, max_shard_size=args.max_shard_size, dtype=args.dtype,
                            overwrite=args.overwrite)
    if args.json:
        asked = {name: getattr(args, name) for name in ("model", "out")} | config.to_dict()
        print(json.dumps({**dataclasses.asdict(found), "bits_per_weight": found.bits_per_weight, "asked": asked}))
    else:
        _show(Console(), args, config, found)
    return 0


def _show(console: Console, args: argparse.Namespace, config: MLSpecConfig, found: Quantized) -> None:
    smaller = found.wide_bytes / found.packed_bytes
    change = f"{smaller:.2f} times smaller" if smaller >= 1 else f"{1 / smaller:.3f} times larger"
    show(console, f"{args.model} in {args.format}", ("", "value"), [
        ("size before", f"{found.wide_bytes / 1e6:.1f} MB"),
        ("size after", f"{found.packed_bytes / 1e6:.1f} MB ({change})"),
        ("packed", f"{found.packed_weights / 1e6:.1f} of {found.all_weights / 1e6:.1f} million weights, in "
                   f"{found.packed_modules} modules"),
        ("bits per packed weight", f"{config.bits_per_weight:.4g}"),
        ("bits per weight of the model", f"{found.bits_per_weight:.4g}"),
        ("kept wide", (", ".join(found.kept[:4]) or "none of the linear layers")
                      + (f" and {len(found.kept) - 4} more" if found.kept[4:] else "")),
        ("tokenizer files", ", ".join(found.copied) or "none found"),
        ("seconds", f"{found.quantize_seconds:.2f} to load and quantize, {found.save_seconds:.2f} to save"),
    ])
    say(console, f"written to {args.out}")


def _add_option(parser: argparse.ArgumentParser, option: Option) -> None:
    """None where it is not given."""
    having = ", ".join(record.written for record in FORMATS.values() if option.name in record.option_names)
    if option.off:
        parser.add_argument(f"--{option.off}", dest=option.name, action="store_const", const=False,
                            help=f"{having}: {option.meaning}")
    else:
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=option.read,
                            help=f"{having}: {option.meaning} (default {option.default})")


def _size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text} is no size; write a number with KB, MB, GB or TB, such as 500MB")
    return text
