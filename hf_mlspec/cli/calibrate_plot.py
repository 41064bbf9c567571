"""Which layers of a calibrated model have the most noise? A picture over the blocks, a line for each kind of layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..calibration.pipeline import LayerReport

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_INK, _GRID = "#333333", "#dddddd"


def draw(layers: Sequence[LayerReport], method: str, path: str) -> None:
    """Write the picture, in the format that the suffix of `path` names; OSError where that cannot be done."""
    noise(layers, method).savefig(path, dpi=150, facecolor="white", format=Path(path).suffix[1:].lower())


def noise(layers: Sequence[LayerReport], method: str) -> Figure:
    """Signal to noise of the layers' outputs in dB over the number of the block; a gap where a layer has none."""
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for layer in layers:
        lines[layer.name].append((layer.block, math.nan if layer.sqnr is None else layer.sqnr))
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for at, (name, points) in enumerate(lines.items()):
        axes.plot([block for block, _ in points], [sqnr for _, sqnr in points], label=name.rpartition(".")[2],
                  color=_COLOURS[at % len(_COLOURS)], marker=_MARKERS[at % len(_MARKERS)], markersize=4)
    axes.set_title(f"{method}: signal to noise of a layer's outputs", fontsize=10, color=_INK, loc="left")
    axes.set_xlabel("block", fontsize=9, color=_INK)
    axes.set_ylabel("dB", fontsize=9, color=_INK)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8, labelcolor=_INK)
    return figure
