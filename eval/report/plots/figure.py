"""How do all pictures of a report look?

Every function that draws returns a matplotlib Figure that no window and no global state knows of. Series differ in
colour (Okabe and Ito's eight, told apart with any colour vision) and in marker and dash, so that grey print works too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "--")
INK, GRID = "#333333", "#dddddd"


def save(figure: Figure, path: Path) -> None:
    """As a PNG that depends on the figure only: no date, no program version."""
    figure.savefig(path, dpi=150, format="png", metadata={"Software": None}, facecolor="white")


def panels(titles: list[str], *, width: float = 4.6, height: float = 3.6, columns: int = 3,
           **more: Any) -> tuple[Figure, list[Axes]]:
    """A figure with a plain panel per title."""
    columns = min(columns, len(titles))
    lines = -(-len(titles) // columns)
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, **more).flatten()
    for unused in axes[len(titles):]:
        unused.remove()
    for one, title in zip(axes, titles, strict=False):
        plain(one)
        one.set_title(title, fontsize=10, color=INK, loc="left")
    return figure, list(axes[: len(titles)])


def plain(axes: Axes) -> None:
    """Data before ink: two spines, a faint horizontal grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def styles(labels: list[str]) -> dict[str, dict[str, Any]]:
    """A look for each series; the same label looks the same in every panel. From the ninth on colours come again, in
    hollow markers of another form."""
    looks = {}
    for at, label in enumerate(dict.fromkeys(labels)):
        turn, place = divmod(at, len(COLOURS))
        looks[label] = {"color": COLOURS[place], "marker": MARKERS[(place + 3 * turn) % len(MARKERS)],
                        "linestyle": DASHES[(turn + place) % len(DASHES)], "markersize": 6.5,
                        "markerfacecolor": "white" if turn else COLOURS[place]}
    return looks


def legend(figure: Figure, axes: list[Axes]) -> None:
    """One legend of all panels, below them, or beside a single one; the figure grows by what it takes."""
    shown = {label: handle for one in axes for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
    if not shown:
        return
    width, height = figure.get_size_inches()
    wide = (max(map(len, shown)) + 7) * 0.083  # inches of one entry
    fit = min(max(1, int(width / wide)), len(shown))
    beside = len(axes) == 1 and len(shown) > 3
    if beside:
        figure.set_size_inches(width + wide, max(height, 0.5 + 0.22 * len(shown)))
    else:
        figure.set_size_inches(width, height + 0.24 * -(-len(shown) // fit))
    figure.legend(list(shown.values()), list(shown), loc="outside right center" if beside else "outside lower center",
                  ncols=1 if beside else fit, frameon=False, fontsize=9, labelcolor=INK)


def from_zero(axes: list[Axes]) -> None:
    """Ordinates that start at zero, with room above the highest marker."""
    for one in axes:
        one.set_ylim(0, one.dataLim.y1 * 1.06 if one.dataLim.y1 > 0 else 1.0)


def alike(peaks: list[float]) -> bool:
    """Whether panels whose highest values are these can share an ordinate: in none would the data vanish."""
    return max(peaks) < 5 * min(peaks)


def batches_axis(axes: Axes, batches: list[int]) -> None:
    """Batch sizes, each doubling as far as the one before."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_xlabel("batch (rows)", fontsize=9, color=INK)
