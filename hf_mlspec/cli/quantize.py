"""What does a model's packed form weigh, and where was it written?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from rich.console import Console

from ..calibration.methods import format_of
from ..formats import FORMATS, Option, options
from ..integration.levels.load import hide_progress_bars
from ..integration.quantizer.calibration_request import AUTO
from ..integration.quantizer.config import MLSpecConfig
from ..integration.quantizer.folder import Quantized, quantize_folder
from .calibrate import require_no_method, run_calibrated
from .request import require_dtype
from .tables import say, show


def run_quantize(args: argparse.Namespace) -> int:
    settings = {name: getattr(args, name) for name in options()}
    format = format_of(args.method) if args.format is None and args.method is not None else args.format
    searched = args.method is not None and args.activation_clip == AUTO  # by the method, which a config has not
    settings |= {"format": format, "activation_bits": args.activation_bits, "skip_modules": args.skip,
                 "activation_clip": None if searched else args.activation_clip, "kv_cache": args.kv_cache,
                 "head_and_embedding": args.head_and_embedding or None}
    config = MLSpecConfig(**{name: value for name, value in settings.items() if value is not None})
    require_dtype(args.dtype, "auto")
    if args.json or not sys.stderr.isatty():
        hide_progress_bars()
    if args.method is not None:
        return run_calibrated(args, config)
    require_no_method(args)
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
    show(console, f"{args.model} in {config.format}", ("", "value"), [
        ("size before", f"{found.wide_bytes / 1e6:.1f} MB"),
        ("size after", f"{found.packed_bytes / 1e6:.1f} MB ({change})"),
        ("packed", f"{found.packed_weights / 1e6:.1f} of {found.all_weights / 1e6:.1f} million weights, in "
                   f"{found.packed_modules} modules"),
        ("bits per packed weight", f"{found.bits_per_packed_weight:.4g}"),
        ("bits per weight of the model", f"{found.bits_per_weight:.4g}"),
        ("kept wide", (", ".join(found.kept[:4]) or "none of the linear layers")
                      + (f" and {len(found.kept) - 4} more" if found.kept[4:] else "")),
        ("tokenizer files", ", ".join(found.copied) or "none found"),
        ("seconds", f"{found.quantize_seconds:.2f} to load and quantize, {found.save_seconds:.2f} to save"),
    ])
    say(console, f"written to {args.out}")


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """The settings that formats have, as their records tell them."""
    for option in options().values():
        _add_option(parser, option)


def _add_option(parser: argparse.ArgumentParser, option: Option) -> None:
    """None where it is not given."""
    having = ", ".join(record.written for record in FORMATS.values() if option.name in record.option_names)
    if option.off:
        parser.add_argument(f"--{option.off}", dest=option.name, action="store_const", const=False,
                            help=f"{having}: {option.meaning}")
    else:
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=option.read,
                            help=f"{having}: {option.meaning} (default {option.default})")
