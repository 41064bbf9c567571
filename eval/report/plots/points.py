"""Where do kernels lie under the memory's roof, and how do two precisions' probabilities agree? Points."""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullFormatter

from eval.records.markdown import distinct, groups
from eval.report.plots.figure import COLOURS, INK, panels, styles

Row = dict[str, Any]
ACTIVATION_BYTES = 4  # float32 rows, read once and written once, are what eval.bench_kernels hands over


def roofline(rows: list[Row]) -> Figure | None:
    """A panel per op and shape: GFLOP/s against FLOPs per byte, under the roof of a plain read of memory measured in
    turns with the calls (its median; the band spans the slowest and the fastest). Numbers at points are rows."""
    rows = [row for row in rows if row["missing"] is None and row["ms"] and row["probe"]]
    found = list(groups(rows, "op", "m", "k"))
    if not found:
        return None
    figure, axes = panels([f"{op} [{m}, {k}]" for (op, m, k), _ in found], width=5.2, height=5.2)
    for one, (_, shape) in zip(axes, found, strict=True):
        looks = styles(distinct(shape, "label"))
        for (label,), line in groups(shape, "label"):
            points = sorted((_intensity(row), _flops(row) / row["ms"] / 1e6, row["n"]) for row in line)
            one.plot([x for x, _, _ in points], [y for _, y, _ in points], label=label, **looks[label])
        _rows_at_points(one, shape)
        _roof(one, shape)
        one.set(xscale="log", yscale="log")
        for axis in (one.xaxis, one.yaxis):
            axis.set_major_formatter(FormatStrFormatter("%g"))
            axis.set_minor_formatter(NullFormatter())
        one.set_xlabel("FLOP / byte read and written", fontsize=9, color=INK)
        one.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False, fontsize=8,
                   labelcolor=INK)
    axes[0].set_ylabel("GFLOP / s", fontsize=9, color=INK)
    return figure


def _flops(row: Row) -> float:
    return 2.0 * row["m"] * row["k"] * row["n"]


def _intensity(row: Row) -> float:
    return _flops(row) / (row["weight_bytes"] + ACTIVATION_BYTES * row["n"] * (row["m"] + row["k"]))


def _rows_at_points(axes, shape: list[Row]) -> None:
    """The number of rows, at the points of the first of our kernels only: others have theirs straight above."""
    ours = next((row["label"] for row in shape if row["ours"]), shape[0]["label"])
    for row in (row for row in shape if row["label"] == ours):
        axes.annotate(str(row["n"]), (_intensity(row), _flops(row) / row["ms"] / 1e6), (4, -10),
                      textcoords="offset points", fontsize=7, color=INK)


def _roof(axes, shape: list[Row]) -> None:
    ends = [min(map(_intensity, shape)) / 1.3, max(map(_intensity, shape)) * 1.3]
    probes = [row["probe"] for row in shape]
    middle = statistics.median(probes)
    low, high = ([reads * x / 1e9 for x in ends] for reads in (min(probes), max(probes)))
    axes.fill_between(ends, low, high, color=INK, alpha=0.12, linewidth=0)
    axes.plot(ends, [middle * x / 1e9 for x in ends], color=INK, linewidth=1.5, label="read of memory")
    axes.annotate(f"{middle / 1e9:.1f} GB/s", (ends[1], middle * ends[1] / 1e9), (-2, 4), fontsize=8, color=INK,
                  textcoords="offset points", ha="right")


def probabilities(rows: list[Row]) -> Figure | None:
    """A panel per pair of systems: what both say of the same token in the same place (QSpec, Figure 2)."""
    rows = [row for row in rows if row["points"]]
    if not rows:
        return None
    correlations = ["unknown" if row["pearson_r"] is None else f"{row['pearson_r']:.4f}" for row in rows]
    figure, axes = panels([f"{row['data']}\nr = {r}, {row['tokens']:,} tokens"
                           for r, row in zip(correlations, rows, strict=True)], width=3.9, height=4.3)
    for one, row in zip(axes, rows, strict=True):
        one.plot([0, 1], [0, 1], color=INK, linewidth=0.8, zorder=1)
        one.scatter(*zip(*row["points"], strict=True), s=9, alpha=0.35, linewidths=0, color=COLOURS[0], zorder=2)
        one.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        one.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
        one.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
        one.set_xlabel(f"probability, {row['reference']}", fontsize=9, color=INK)
        one.set_ylabel(f"probability, {row['label']}", fontsize=9, color=INK)
    return figure
