"""What did calibration make of a model: how exact are its layers, and what did it cost?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections import defaultdict

from rich.console import Console

from ..calibration.pipeline import LayerReport
from ..integration.quantizer.calibrated_folder import CalibratedFolder, calibrate_folder
from ..integration.quantizer.calibration_request import AUTO
from ..integration.quantizer.config import MLSpecConfig
from .picture import require_picture
from .tables import say, show

WORST = 5  # layers that are named one by one
_OPTIONS = ("samples", "tokens", "seed", "act_order", "damping", "search_bits", "rotations", "evaluate",
            "evaluate_tokens", "device")


def require_no_method(args: argparse.Namespace) -> None:
    """ValueError for options of calibration without a method."""
    names = "calibration", "plot", "learn_rotation", *_OPTIONS
    given = next((name for name in names if getattr(args, name) is not None), None)
    if given is not None:
        raise ValueError(f"--{given.replace('_', '-')} goes with --method, which chooses codes on a text: add one")


def run_calibrated(args: argparse.Namespace, config: MLSpecConfig) -> int:
    """`mlspec quantize --method`."""
    if args.calibration is None:
        raise ValueError("--method chooses codes on a text: name its file with --calibration")
    if args.plot is not None:
        require_picture(args.plot)
    if args.evaluate is None and args.evaluate_tokens is not None:
        raise ValueError("--evaluate-tokens counts tokens of a text: name its file with --evaluate")
    if args.learn_rotation and args.rotations is None:
        raise ValueError("--learn-rotation writes a file: name it with --rotations R.bin")
    options = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    if args.activation_clip == AUTO:
        options["activation_clip"] = AUTO
    found = calibrate_folder(args.model, args.out, args.method, config, calibration=args.calibration,
                             max_shard_size=args.max_shard_size, dtype=args.dtype, overwrite=args.overwrite,
                             learn=bool(args.learn_rotation), **options)
    if args.plot is not None:
        from .calibrate_plot import draw  # matplotlib is optional

        draw(found.calibrated.layers, found.calibrated.method, args.plot)
    if args.json:
        asked = {name: getattr(args, name) for name in ("model", "out", "plot")}
        print(json.dumps({**dataclasses.asdict(found), "asked": asked}))
    else:
        _show(Console(), args, found)
    return 0


def _least_and_median(sqnr: list[float]) -> tuple[str, str]:
    return (f"{min(sqnr):.1f}", f"{statistics.median(sqnr):.1f}") if sqnr else ("-", "-")


def _worst(layers: list[LayerReport]) -> list[tuple[str, str]]:
    """The layers with the most noise, the worst first."""
    noisy = sorted((layer for layer in layers if layer.sqnr is not None), key=lambda layer: layer.sqnr)
    return [(f"block {layer.block}, {layer.name}", f"{layer.sqnr:.1f}") for layer in noisy[:WORST]]


def _show(console: Console, args: argparse.Namespace, found: CalibratedFolder) -> None:
    layers, sizes, record = found.calibrated.layers, found.quantized, found.calibrated.record
    peak = found.calibrated.peak_bytes
    kinds = defaultdict(list)
    for layer in layers:
        kinds[layer.name].append(layer)
    show(console, f"{args.model} by {found.calibrated.method}: signal to noise of a layer's outputs, dB",
         ("layer", "least", "median", "scaled"),
         [(name, *_least_and_median([own.sqnr for own in same if own.sqnr is not None]),
           f"{sum(own.alpha is not None for own in same)} of {len(same)}") for name, same in kinds.items()])
    show(console, "layers with the most noise", ("", "dB"), _worst(layers))
    learned = "" if found.learning_seconds is None else f"{found.learning_seconds:.1f} to learn the rotation, "
    rows = [("calibrated on", f"{record['tokens']} tokens in {record['samples']} samples"),
            ("seconds", f"{learned}{found.calibrated.seconds:.1f} to calibrate, {sizes.save_seconds:.2f} to save"),
            ("peak memory of the process", "unknown" if peak is None else f"{peak / 1e6:.0f} MB"),
            ("size", f"{sizes.wide_bytes / 1e6:.1f} MB before, {sizes.packed_bytes / 1e6:.1f} after"),
            ("kept wide", f"{len(sizes.kept)} linear layers")]
    if (searched := record.get("clip_search")) is not None:
        told = ", ".join(f"{clip}: {divergence:.4f}" for clip, divergence in searched.items())
        rows += [("divergence of 4-bit activations by clip", f"{told} nats a token; the least is taken")]
    rows += [(f"perplexity {word}", f"{value:.3f}") for word, value in found.perplexity.items()]
    rows += [("perplexity is of", f"{found.evaluated} tokens of {args.evaluate}")] if found.perplexity else []
    show(console, "calibration", ("", "value"), rows)
    say(console, f"written to {args.out}")
    if args.plot is not None:
        say(console, f"picture written to {args.plot}")
