"""What is a checkpoint, in tables: how its layers are stored, what they become here, and what runs them?"""

from __future__ import annotations

import argparse
import dataclasses
import json

from rich.console import Console

from ..integration.quantizer.examine import Examined, examine
from .tables import show

_DEVICES = {"cpu": "on the CPU", "cuda": "on a GPU"}


def run_inspect(args: argparse.Namespace) -> int:
    found = examine(args.folder)
    if args.json:
        layers = [{**dataclasses.asdict(own), "bits_per_weight": own.bits_per_weight} for own in found.layers]
        print(json.dumps({**dataclasses.asdict(found), "layers": layers}))
    else:
        _show(Console(), found)
    return 0


def _show(console: Console, found: Examined) -> None:
    columns = ("stored as", "layers", "bits per weight", "here")
    rows = [(own.stored_as, str(own.count), f"{own.bits_per_weight:.4g}",
             own.becomes + (f": {own.why_dense}" if own.why_dense else "")) for own in found.layers]
    show(console, f"{found.folder}: {found.model_class}, {found.title}", columns, rows)
    _show_high_parts(console, found.high_zeros)
    dense, more = found.dense[:4], len(found.dense) - 4
    size = f"{found.stored_bytes / 1e6:.1f} MB in {found.files} file{'s' if found.files > 1 else ''}"
    show(console, "the model", ("", "value"), [
        ("size", f"{size}, {found.stored_bytes * 8 / found.weights:.4g} bits per weight"),
        ("weights", f"{found.weights / 1e6:.1f} million"),
        ("dense linear layers", (", ".join(dense) or "none") + (f" and {more} more" if more > 0 else "")),
        ("dtype of what is not packed", found.dtype),
        ("keys and values in the cache", found.kv_cache or "as they are computed"),
        *((f"runs {_DEVICES[word]}", told) for word, told in found.engines.items()),
        ("kernels", ", ".join(f"{op} {kernel}" for op, kernel in found.kernels.items()) or "none"),
        ("stock transformers loads it", found.stock),
        ("levels without another model", ", ".join(found.levels)),
    ])


def _show_high_parts(console: Console, zeros: dict[str, float]) -> None:
    """By kind of layer, over the blocks; nothing for other weights."""
    kinds: dict[str, list[float]] = {}
    for name, own in zeros.items():
        kinds.setdefault(name.rpartition(".")[2], []).append(own)
    if kinds:
        rows = [(kind, f"{sum(own) / len(own):.4f}", f"{min(own):.4f}") for kind, own in kinds.items()]
        show(console, "weights whose high part is 0", ("layer", "mean of the blocks", "least"), rows)
