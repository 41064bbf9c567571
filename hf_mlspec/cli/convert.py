"""What came of converting a checkpoint, and where was it written?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from rich.console import Console

from ..integration.levels.load import hide_progress_bars
from ..integration.quantizer.convert import GGUF, Converted, convert_folder
from .tables import say, show


def run_convert(args: argparse.Namespace) -> int:
    if args.json or not sys.stderr.isatty():
        hide_progress_bars()
    found = convert_folder(args.source, args.target, args.to, max_shard_size=args.max_shard_size,
                           overwrite=args.overwrite)
    if args.json:
        asked = {name: getattr(args, name) for name in ("source", "target", "to")}
        print(json.dumps({**dataclasses.asdict(found), "asked": asked}))
    else:
        _show(Console(), args, found)
    return 0


def _show(console: Console, args: argparse.Namespace, found: Converted) -> None:
    kept, more = found.kept[:4], len(found.kept) - 4
    before = "unknown" if found.source_bytes is None else f"{found.source_bytes / 1e6:.1f} MB"
    show(console, f"{args.source}: {found.source} to {found.to}", ("", "value"), [
        *((f"{count} layers", kind) for kind, count in found.layers.items()),
        ("size before", before),
        ("size after", f"{found.target_bytes / 1e6:.1f} MB"),
        ("packed", f"{found.packed_weights / 1e6:.1f} of {found.all_weights / 1e6:.1f} million weights"),
        ("kept wide", (", ".join(kept) or "none of the linear layers") + (f" and {more} more" if more > 0 else "")),
        ("files beside the weights", ", ".join(found.copied) or _no_files(found)),
        ("seconds", f"{found.load_seconds:.2f} to load, {found.save_seconds:.2f} to save"),
    ])
    say(console, f"written to {args.target}")


def _no_files(found: Converted) -> str:
    return "none, the tokenizer is in the file" if found.to == GGUF else "none found"
