"""Which pictures show the records of a report?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.figure import Figure

from eval.report.plots import bars, curves, points

Row = dict[str, Any]


def figures(heading: str, rows: list[Row]) -> Iterator[tuple[str, str, Figure]]:
    """The pictures under a heading of the report: a name for the file, what it shows, the figure."""
    drawers: dict[str, list[tuple[str, str, Callable[[list[Row]], Figure | None]]]] = {
        "Throughput": [("speed", "Tokens a second by batch", curves.speed_by_batch),
                       ("speedup", "Speedup by batch", curves.speedup_by_batch)],
        "Where the time goes": [("latency", "Where a token's time goes", bars.latency_split)],
        "Acceptance": [("acceptance", "Acceptance by position in the draft", curves.acceptance_by_position)],
        "Draft length": [("draft-length", "Speed by draft length", curves.ablation)],
        "Memory": [("memory", "Weights, keys and values, peak", bars.memory)],
        "Kernels": [("roofline", "Kernels under the roof of the memory", points.roofline)],
        "Token probabilities of two precisions": [
            ("probabilities", "Probabilities of the same tokens", points.probabilities)],
        "Fidelity": [("fidelity", "Prompts written as the reference writes them", bars.fidelity)],
    }
    for name, what, draw in drawers.get(heading, []) if rows else []:
        figure = draw(rows)
        if figure is not None:
            yield name, what, figure
