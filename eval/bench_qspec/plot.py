"""How do the lines of the QSpec benchmark look? One picture: throughput, speedup, where a token's time goes,
acceptance."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from eval.bench_qspec.contenders import DEQUANT, PAPER_GAMMA

Row = dict[str, Any]


def require_matplotlib() -> None:
    """ModuleNotFoundError that says how to get it, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("a plot needs matplotlib: pip install 'hf-mlspec[eval]', or leave out --plot")


def plot(rows: list[Row], path: Path) -> None:
    """Write the picture of "decode" rows; ValueError where there are none."""
    rows = [row for row in rows if row["kind"] == "decode"]
    if not rows:
        raise ValueError(f"nothing to plot into {path}: no line is of kind 'decode'")
    from matplotlib.figure import Figure  # only a plot needs it, and it takes a second

    figure = Figure(figsize=(15, 11), layout="constrained")
    ((rates, speedups), (split, accepted)) = figure.subplots(2, 2)
    gammas = sorted({row["gamma"] for row in rows if row["gamma"] is not None})
    shown = PAPER_GAMMA if PAPER_GAMMA in gammas else next(iter(gammas), None)
    chosen = [row for row in rows if row["gamma"] in (None, shown)]
    _throughput(rates, chosen, shown)
    _speedup(speedups, chosen, shown)
    _latency(split, chosen)
    _acceptance(accepted, rows)
    figure.savefig(path, dpi=130)


def _series(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of every contender, by batch size."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["batch"]):
        found.setdefault(row["contender"], []).append(row)
    return found


def _by_batch(axes, title: str, label: str) -> None:
    axes.set(title=title, xlabel="batch", ylabel=label, xscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _throughput(axes, rows: list[Row], gamma: int | None) -> None:
    for name, line in _series(rows).items():
        style = "o-" if line[0]["gamma"] is not None else "s--"
        axes.plot([row["batch"] for row in line], [row["tokens_per_second"] for row in line], style, label=name)
    _by_batch(axes, f"throughput, gamma {gamma}", "tokens a second, decode-only")


def _speedup(axes, rows: list[Row], gamma: int | None) -> None:
    drafting = [row for row in rows if row["gamma"] is not None]
    for name, line in _series(drafting).items():
        reference = line[0]["reference"]
        label = f"{name} over {reference}"
        axes.plot([row["batch"] for row in line], [row["over"][reference] for row in line], "o-", label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    _by_batch(axes, f"speedup over the same target alone, gamma {gamma}", "ratio")


def _latency(axes, rows: list[Row]) -> None:
    """Stacked bars of the batch size in the middle (QSpec, Figure 4)."""
    batches = sorted({row["batch"] for row in rows})
    batch = batches[len(batches) // 2]
    bars = [row for row in rows if row["batch"] == batch and row["ms_per_token"]["draft"] is not None]
    names, bottom = [row["contender"] for row in bars], [0.0] * len(bars)
    for part in ("draft", "verify", "other"):
        heights = [row["ms_per_token"][part] for row in bars]
        axes.barh(names, heights, left=bottom, label=part)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set(title=f"time of a valid token, batch {batch}", xlabel="ms")
    axes.invert_yaxis()
    axes.legend(fontsize=8)


def _acceptance(axes, rows: list[Row]) -> None:
    """By gamma, the mean over batch sizes; the dequantizing target accepts what the fused one does, so it is left
    out."""
    drafting = [row for row in rows if row["gamma"] is not None and row["reference"] != DEQUANT]
    for name in dict.fromkeys(row["contender"] for row in drafting):
        by_gamma: dict[int, list[float]] = {}
        for row in (row for row in drafting if row["contender"] == name):
            by_gamma.setdefault(row["gamma"], []).append(row["acceptance"])
        gammas = sorted(by_gamma)
        axes.plot(gammas, [sum(by_gamma[g]) / len(by_gamma[g]) for g in gammas], "o-", label=name)
    axes.set(title="acceptance of a drafted token", xlabel="gamma", ylabel="accepted / tested",
             xticks=sorted({row["gamma"] for row in drafting}))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
