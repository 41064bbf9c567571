"""How fast is a chain of one level, by acceptance and by the cost of a draft? A picture, as in ML-SpecQD's figures 2
and 3, with the costs of a check as they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..speculation.costs import PassCosts
from ..speculation.estimates import PairEstimate
from ..speculation.forecast import Expectations
from ..speculation.memory import LevelCosts, Memory
from ..speculation.plans import LENGTHS, TARGET, Plan, off

RATIOS, RATES = (0.02, 0.05, 0.1, 0.2, 0.5), (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_INK, _GRID = "#333333", "#dddddd"
_POINTS = 40
_FLAT = 1024  # tokens up to which a pass of an imagined draft costs the same
_CERTAIN = 1e9


def draw(
    target: PassCosts, levels: Mapping[str, PassCosts | None], path: str, accepted: Mapping[str, float] | None = None
) -> None:
    """Write the picture, in the format that the suffix of `path` names; OSError where that cannot be done.

    accepted: as of `curves`.
    """
    figure = curves(target, ratios_of(target, levels), accepted)
    figure.savefig(path, dpi=150, facecolor="white", format=Path(path).suffix[1:].lower())


def ratios_of(target: PassCosts, levels: Mapping[str, PassCosts | None]) -> dict[str, float]:
    """Per level with a model the seconds of its pass over one token, over those of the target's."""
    return {name: costs.of(1) / target.of(1) for name, costs in levels.items() if costs is not None}


def speedup(target: PassCosts, ratio: float, acceptance: float) -> float:
    """Of one row over the target alone, at the best length, where a pass of the draft costs `ratio` of the target's
    and each drafted token is kept with the chance `acceptance`."""
    each = ratio * target.of(1)
    level = LevelCosts("draft", PassCosts((1, _FLAT), (each, each), (0.0, 0.0)), acceptance)
    memory = Memory({(0, TARGET): PairEstimate(acceptance, _CERTAIN)})
    known = Expectations(target, [level], memory, corrected=False)
    alone = known.of(off(1), 1, 0, 0.0).speed
    return max(known.of(Plan((length,)), 1, 1, 0.0).speed for length in LENGTHS) / alone


def curves(target: PassCosts, measured: Mapping[str, float], accepted: Mapping[str, float] | None = None) -> Figure:
    """Speedup over acceptance, a line for each cost ratio, and over the cost ratio, a line for each acceptance; the
    ratios of the given levels are marked in both. measured: by the levels' names. accepted: by the names of levels
    that drafted before, the share of their tokens that was kept: a point in both."""
    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = [0.98 * i / _POINTS for i in range(_POINTS + 1)]
    for colour, ratio in zip(_COLOURS, RATIOS, strict=False):
        left.plot(rates, [speedup(target, ratio, rate) for rate in rates], color=colour, label=f"cost {ratio:g}")
    for at, (name, ratio) in enumerate(measured.items()):
        left.plot(rates, [speedup(target, ratio, rate) for rate in rates], color=_INK, linestyle=_dash(at),
                  linewidth=2.2, label=f"{name}: cost {ratio:.2g}")
    low, high = min([0.01, *measured.values()]), max([1.0, *measured.values()])
    ratios = [low * (high / low) ** (i / _POINTS) for i in range(_POINTS + 1)]
    for colour, rate in zip(_COLOURS, RATES, strict=True):
        right.plot(ratios, [speedup(target, ratio, rate) for ratio in ratios], color=colour,
                   label=f"acceptance {rate:g}")
    for at, (name, ratio) in enumerate(measured.items()):
        right.axvline(ratio, color=_INK, linestyle=_dash(at), linewidth=1.4, label=name)
    for name, rate in (accepted or {}).items():
        if name in measured:
            speed = speedup(target, measured[name], rate)
            left.plot([rate], [speed], "o", color=_INK, label=f"{name}: {rate:.0%} kept so far")
            right.plot([measured[name]], [speed], "o", color=_INK)
    right.set_xscale("log")
    _finish(left, "by acceptance", "chance that a drafted token is kept")
    _finish(right, "by cost", "pass of the draft / pass of the target")
    return figure


def _finish(axes: Axes, title: str, across: str) -> None:
    axes.axhline(1.0, color=_INK, linewidth=0.8)
    axes.set_title(f"one row, best length, {title}", fontsize=10, color=_INK, loc="left")
    axes.set_xlabel(across, fontsize=9, color=_INK)
    axes.set_ylabel("speed over the target alone", fontsize=9, color=_INK)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.legend(frameon=False, fontsize=8, labelcolor=_INK)


def _dash(at: int) -> str:
    return ("-", "--", "-.", ":")[at % 4]
