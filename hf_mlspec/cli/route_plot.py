"""How does a router learn, and which planes does it read for which prompt? Two pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..integration.route_training import Choice
from ..routing.training import Step

_DISTANCE, _BITS = "#0072B2", "#D55E00"
_INK, _GRID = "#333333", "#dddddd"


def draw_steps(steps: Sequence[Step], target_bits: float, path: str) -> None:
    """Write `learning`, in the format that the suffix of `path` names; OSError where that cannot be done."""
    _write(learning(steps, target_bits), path)


def draw_choices(choices: Sequence[Choice], path: str) -> None:
    """Write `planes`, likewise."""
    _write(planes(choices), path)


def learning(steps: Sequence[Step], target_bits: float) -> Figure:
    """Distance to the teacher, and expected bits of a weight, over the steps."""
    figure = Figure(figsize=(7.2, 5.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    places = [step.step for step in steps]
    above.plot(places, [step.distillation for step in steps], color=_DISTANCE)
    above.set_ylabel("distance to the teacher,\nnats a token", fontsize=9, color=_INK)
    below.plot(places, [step.bits for step in steps], color=_BITS)
    below.axhline(target_bits, color=_INK, linewidth=0.8, linestyle="--")
    below.set_ylabel("expected bits of a weight", fontsize=9, color=_INK)
    below.set_xlabel("step", fontsize=9, color=_INK)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK, labelsize=9)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
    return figure


def planes(choices: Sequence[Choice]) -> Figure:
    """Blocks over prompts, the more planes the darker."""
    names = list(choices[0].widths)
    figure = Figure(figsize=(max(4.0, 2.5 + 0.25 * len(choices)), 1.5 + 0.22 * len(names)), layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow([[one.widths[name] for one in choices] for name in names], aspect="auto", cmap="Blues",
                        vmin=1, vmax=8, interpolation="nearest")
    axes.set_yticks(range(len(names)), [" ".join(name.split(".")[-2:]) for name in names], fontsize=7)
    axes.set_xlabel("prompt", fontsize=9, color=_INK)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(colors=_INK)
    figure.colorbar(drawn, label="planes read")
    return figure


def _write(figure: Figure, path: str) -> None:
    figure.savefig(path, dpi=150, facecolor="white", format=Path(path).suffix[1:].lower())
