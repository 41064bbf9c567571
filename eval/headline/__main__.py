"""How is the picture of the README drawn from the figures that lie beside it?

    python -m eval.headline                              # docs/figures/one_prompt.json -> docs/figures/one_prompt.png
    python -m eval.headline FIGURES.json PICTURE.png

The figures are those of a table of docs/benchmarks/cpu_chains.md; the file names the table, the commit and the
command that measures them. The same figures give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures" / "one_prompt.json"
COLOURS = {"stock": "#999999", "alone": "#56B4E9", "chain": "#0072B2"}  # Okabe and Ito's
INK = "#333333"


def draw(figures: dict[str, Any]) -> Figure:
    """A panel for each data set, a bar for each system, in the order of the file."""
    systems, data = figures["systems"], figures["data"]
    figure = Figure(figsize=(9.6, 0.9 + 0.3 * len(systems)), layout="constrained")
    figure.suptitle(figures["title"], fontsize=10, color=INK)
    panels = figure.subplots(1, len(data), sharey=True, sharex=True)
    for at, (axes, name) in enumerate(zip(panels, data, strict=True)):
        speeds = [one["tokens_per_second"][at] for one in systems]
        colours = [COLOURS[one["kind"]] for one in systems]
        bars = axes.barh([one["label"] for one in systems], speeds, color=colours, height=0.72)
        axes.bar_label(bars, padding=3, fontsize=9, color=INK)
        axes.set_title(name, fontsize=10, color=INK, loc="left")
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.spines["left"].set_color(INK)
        axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=INK)
        axes.set_xticks([])
    panels[0].set_xlim(0, 1.15 * max(max(one["tokens_per_second"]) for one in systems))
    panels[0].invert_yaxis()
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.headline", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, nargs="?", default=FIGURES)
    parser.add_argument("picture", type=Path, nargs="?", help="(the name of the figures, with .png)")
    args = parser.parse_args(argv)
    picture = args.picture or args.figures.with_suffix(".png")
    figure = draw(json.loads(args.figures.read_text(encoding="utf-8")))
    figure.savefig(picture, dpi=120, format="png", metadata={"Software": None}, facecolor="white")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
