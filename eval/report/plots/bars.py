"""How much of each: time per level, memory, prompts that agree? Bars."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from eval.records.markdown import distinct
from eval.report.plots.figure import COLOURS, HATCHES, INK, legend, panels
from eval.report.quality import in_paper_order
from eval.report.speed import named

Row = dict[str, Any]
TARGET, REST = "#0072B2", "#BBBBBB"
LEVELS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9")


def latency_split(rows: list[Row]) -> Figure | None:
    """Milliseconds of a token, a bar per contender with a draft, a panel per data set and batch size."""
    rows = [row for row in rows if row["split"] and row["tokens_per_second"]]
    if not any(len(row["split"]) > 2 for row in rows):
        return None
    cases = list(dict.fromkeys((row["data"], row["batch"]) for row in rows))
    labels = list(dict.fromkeys(map(named, rows)))
    figure, axes = panels([f"{data}, batch {batch}" for data, batch in cases], height=1.0 + 0.34 * len(labels),
                          sharey=True)
    depth = max(len(row["split"]) for row in rows) - 2
    for one, case in zip(axes, cases, strict=True):
        found = {named(row): row for row in rows if (row["data"], row["batch"]) == case}
        left = [0.0] * len(labels)
        for part, colour, hatch in _parts(depth):
            widths = [_milliseconds(found.get(label), part) for label in labels]
            one.barh(labels, widths, left=left, color=colour, hatch=hatch, label=part, height=0.68, edgecolor="white",
                     linewidth=0.6)
            left = [at + width for at, width in zip(left, widths, strict=True)]
        one.grid(visible=False)
        one.set_xlabel("ms / token", fontsize=9, color=INK)
    axes[0].invert_yaxis()
    legend(figure, axes)
    return figure


def _parts(depth: int) -> list[tuple[str, str, str]]:
    levels = [(f"level {at + 1}", LEVELS[at % len(LEVELS)], HATCHES[at % len(HATCHES)]) for at in range(depth)]
    return [("target", TARGET, ""), *levels, ("outside the models", REST, "")]


def _milliseconds(row: Row | None, part: str) -> float:
    if row is None:
        return 0.0
    split = row["split"]
    if part == "target":
        share = split[0][1]
    elif part == "outside the models":
        share = split[-1][1]
    else:
        at = int(part.removeprefix("level "))
        share = split[at][1] if at <= len(split) - 2 else 0.0
    return max(share, 0.0) * 1e3 / row["tokens_per_second"]


def memory(rows: list[Row]) -> Figure | None:
    """Weights and keys and values of target and levels as one bar, the peak of the process as a line across it."""
    batches = sorted(distinct(rows, "batch"))
    labels = distinct(rows, "label")
    figure, axes = panels([f"batch {batch}" for batch in batches], height=1.0 + 0.34 * len(labels), sharey=True,
                          sharex=True)
    for one, batch in zip(axes, batches, strict=True):
        found = {row["label"]: row for row in rows if row["batch"] == batch}
        weights, kept = ([(found[label][what] or 0.0) / 1e6 if label in found else 0.0 for label in labels]
                         for what in ("weights", "kv"))
        one.barh(labels, weights, color=TARGET, label="weights", height=0.68)
        one.barh(labels, kept, left=weights, color=LEVELS[0], hatch="///", edgecolor="white", linewidth=0.6,
                 label="keys and values", height=0.68)
        peaks = [(row["peak"] / 1e6, labels.index(label)) for label, row in found.items() if row["peak"] is not None]
        if peaks:
            one.scatter(*zip(*peaks, strict=True), marker="|", s=180, linewidths=2, color=INK,
                        label="peak of the process")
        one.grid(visible=False)
        one.set_xlabel("MB", fontsize=9, color=INK)
    axes[0].set_xlim(left=0)  # of all panels, and fixed only when the last one has its bars
    axes[0].invert_yaxis()
    legend(figure, axes)
    return figure


def fidelity(rows: list[Row]) -> Figure | None:
    """Share of prompts written to the last token as the reference writes them, a panel per reference."""
    rows = [row for row in rows if row["prompts"]]
    references = distinct(rows, "reference")
    if not references:
        return None
    data = distinct(rows, "data")
    systems = {name: in_paper_order(distinct([row for row in rows if row["reference"] == name], "label"))
               for name in references}
    figure, axes = panels([f"against {name}" for name in references], width=6.0, columns=2,
                          height=1.0 + 0.24 * max(map(len, systems.values())) * len(data), sharex=True)
    thick = 0.8 / len(data)
    for one, (reference, labels) in zip(axes, systems.items(), strict=True):
        for at, name in enumerate(data):
            found = {row["label"]: row["equal"] / row["prompts"] for row in rows
                     if (row["reference"], row["data"]) == (reference, name)}
            places = [y + (at - (len(data) - 1) / 2) * thick for y, label in enumerate(labels) if label in found]
            bars = one.barh(places, [found[label] for label in labels if label in found], height=thick * 0.9,
                            color=COLOURS[at % len(COLOURS)], hatch=HATCHES[at % len(HATCHES)], edgecolor="white",
                            linewidth=0.6, label=name)
            one.bar_label(bars, fmt=lambda share: f"{100 * share:.0f} %", padding=3, fontsize=8, color=INK)
        one.set_yticks(range(len(labels)), labels)
        one.set_ylim(len(labels) - 0.5, -0.5)
        one.set_xlim(0, 1.12)
        one.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
        one.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        one.grid(visible=False)
        one.set_xlabel("prompts with equal ids", fontsize=9, color=INK)
    legend(figure, axes)
    return figure
