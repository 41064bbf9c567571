"""How do speed and acceptance change with the batch, the place in a draft and the draft's length? Lines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from eval.records.markdown import distinct, groups
from eval.report.plots.figure import INK, alike, batches_axis, from_zero, legend, panels, styles
from eval.report.speed import named

Row = dict[str, Any]
FEW = 8  # lines in one panel that an eye can follow


def speed_by_batch(rows: list[Row]) -> Figure | None:
    """A panel per data set, a line per contender."""
    rows = _typical([row for row in rows if row["tokens_per_second"]])
    if not rows:
        return None
    if len(distinct(rows, "batch")) == 1:
        return _speed_bars(rows)
    data = distinct(rows, "data")
    figure, axes = panels(data)
    looks = styles(list(dict.fromkeys(map(named, rows))))
    for one, name in zip(axes, data, strict=True):
        mine = [row for row in rows if row["data"] == name]
        for label in dict.fromkeys(map(named, mine)):
            line = sorted((row["batch"], row["tokens_per_second"]) for row in mine if named(row) == label)
            one.plot(*zip(*line, strict=True), label=label, **looks[label])
        batches_axis(one, sorted(distinct(mine, "batch")))
    _share(axes)
    axes[0].set_ylabel("tokens / s, all rows", fontsize=9, color=INK)
    legend(figure, axes)
    return figure


def _speed_bars(rows: list[Row]) -> Figure:
    """One batch size only: bars, a panel per data set."""
    data, labels = distinct(rows, "data"), list(dict.fromkeys(map(named, rows)))
    figure, axes = panels([f"{name}, batch {rows[0]['batch']}" for name in data], height=0.9 + 0.36 * len(labels),
                          sharey=True)
    for one, name in zip(axes, data, strict=True):
        found = {named(row): row["tokens_per_second"] for row in rows if row["data"] == name}
        bars = one.barh(labels, [found.get(label, 0.0) for label in labels], color="#0072B2", height=0.65)
        one.bar_label(bars, fmt=lambda value: f"{value:,.0f}" if value else "", padding=3, fontsize=8, color=INK)
        one.grid(visible=False)
        one.margins(x=0.14)
        one.set_xlabel("tokens / s", fontsize=9, color=INK)
    axes[0].invert_yaxis()
    return figure


def speedup_by_batch(rows: list[Row]) -> Figure | None:
    """Chains over the first peer their lines name; where there is one batch size only, the table says it all."""
    peers = {peer for row in rows for peer in row["over"]}
    alone = next((peer for row in rows for peer in row["over"] if "alone" in peer or peer == "w4a16"), None)
    if not peers or alone is None or len(distinct(rows, "batch")) == 1:
        return None
    chosen = [row for row in _typical(rows) if row["over"].get(alone) and row["contender"] != alone]
    if not chosen:
        return None
    data = distinct(chosen, "data")
    figure, axes = panels(data)
    looks = styles(list(dict.fromkeys(named(row) for row in _typical(rows))))
    for one, name in zip(axes, data, strict=True):
        mine = [row for row in chosen if row["data"] == name]
        for label in dict.fromkeys(map(named, mine)):
            line = sorted((row["batch"], row["over"][alone]) for row in mine if named(row) == label)
            one.plot(*zip(*line, strict=True), label=label, **looks[label])
        one.axhline(1.0, color=INK, linewidth=1)
        batches_axis(one, sorted(distinct(mine, "batch")))
    _share(axes)
    axes[0].set_ylabel(f"times {alone}", fontsize=9, color=INK)
    legend(figure, axes)
    return figure


def _share(axes: list[Axes]) -> None:
    """One ordinate from zero for all panels, or one each where a panel's lines would lie flat on the ground."""
    from_zero(axes)
    tops = [one.get_ylim()[1] for one in axes]
    for one in axes if alike(tops) else []:
        one.set_ylim(0, max(tops))


def _typical(rows: list[Row]) -> list[Row]:
    """Contenders with too many draft lengths to draw keep one of them: 3 where it is there (QSpec), else the first."""
    if len(set(map(named, rows))) <= FEW:
        return rows
    kept: list[Row] = []
    for _, found in groups(rows, "label", "data", "batch"):
        lengths = distinct(found, "num_draft_tokens")
        shown = "3" if "3" in lengths else lengths[0]
        kept += [row for row in found if row["num_draft_tokens"] == shown]
    return kept


def acceptance_by_position(rows: list[Row]) -> Figure | None:
    """A panel per chain, draft length and data set, a line per level: accepted / tested at each place of the draft.

    Of several batch sizes the smallest is drawn: acceptance depends on the text, not on how many rows share a pass.
    """
    rows = [row for row in rows if any(tested for _, tested, _ in row["by_position"])]
    if not rows:
        return None
    found = [(name, _smallest_batch(same)) for name, same in groups(rows, "label", "data", "num_draft_tokens")]
    figure, axes = panels([f"{label}\n{data}, batch {levels[0]['batch']}, K {length}"
                           for (label, data, length), levels in found], sharey=True)
    looks = styles([f"level {row['level_index'] + 1}" for row in sorted(rows, key=lambda row: row["level_index"])])
    for one, (_, levels) in zip(axes, found, strict=True):
        for row in levels:
            line = [(at + 1, accepted / tested) for at, tested, accepted in row["by_position"] if tested]
            label = f"level {row['level_index'] + 1}"
            one.plot(*zip(*line, strict=True), label=label, **looks[label])
        one.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        one.xaxis.get_major_locator().set_params(integer=True)
        one.set_xlabel("drafted token (1: the first)", fontsize=9, color=INK)
    lowest = min(accepted / tested for row in rows for _, tested, accepted in row["by_position"] if tested)
    axes[0].set_ylim(max(0.0, math.floor(10 * lowest - 0.5) / 10), 1.02)
    axes[0].set_ylabel("accepted / tested", fontsize=9, color=INK)
    legend(figure, axes)
    return figure


def _smallest_batch(rows: list[Row]) -> list[Row]:
    batch = min(row["batch"] for row in rows)
    return sorted((row for row in rows if row["batch"] == batch), key=lambda row: row["level_index"])


def ablation(rows: list[Row]) -> Figure | None:
    """Tokens a second, and tokens per pass, by the draft length that varies; a line per chain and data set."""
    lines = [line for name, found in groups(rows, "label", "data", "batch") for line in _varied(name, found)]
    if not lines:
        return None
    figure, axes = panels(["speed", "tokens per pass of the target"], columns=2)
    looks = styles([label for label, _ in lines])
    for one, what in zip(axes, ("tokens_per_second", "tokens_per_pass"), strict=True):
        for label, points in lines:
            drawn = [(length, row[what]) for length, row in points if row[what] is not None]
            if drawn:
                one.plot(*zip(*drawn, strict=True), label=label, **looks[label])
        one.set_xticks(sorted({length for _, points in lines for length, _ in points}))
        one.set_xlabel("tokens per draft, x", fontsize=9, color=INK)
    from_zero(axes)
    axes[0].set_ylabel("tokens / s", fontsize=9, color=INK)
    legend(figure, axes)
    return figure


def _varied(name: tuple, rows: list[Row]) -> Iterator[tuple[str, list[tuple[int, Row]]]]:
    """A line for each level whose length varies while the others' stay: its label, with x for that length, and its
    points."""
    label, data, batch = name
    title = f"{label}, {data}" + (f", batch {batch:g}" if batch else "")
    for at in range(max(len(row["lengths"]) for row in rows)):
        same: dict[str, list[tuple[int, Row]]] = {}
        for row in (row for row in rows if at < len(row["lengths"])):
            pattern = ", ".join("x" if place == at else str(k) for place, k in enumerate(row["lengths"]))
            same.setdefault(pattern, []).append((row["lengths"][at], row))
        for pattern, points in same.items():
            if len(points) > 1:
                yield title + f", K {pattern}" * (pattern != "x"), sorted(points, key=lambda point: point[0])
