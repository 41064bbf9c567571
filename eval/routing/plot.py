"""Which planes does a router read, block by block, for each kind of query? One picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure


def draw_kinds(choices: Mapping[str, dict], path: str | Path) -> None:
    """Of a line of the part choices: mean widths of blocks by kind, beside the entropy of each block's choices."""
    means, entropies = choices["mean_widths"], choices["entropy"]
    blocks = list(entropies)
    figure = Figure(figsize=(4.0 + 0.6 * len(means), 1.5 + 0.22 * len(blocks)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    drawn = left.imshow([[means[kind][block] for kind in means] for block in blocks], aspect="auto", cmap="Blues",
                        vmin=1, vmax=8, interpolation="nearest")  # fmt: skip
    left.set_yticks(range(len(blocks)), [" ".join(block.split(".")[-2:]) for block in blocks], fontsize=7)
    told = [f"{kind}\n{choices['bits_by_kind'][kind]:.2f} bits" for kind in means]
    left.set_xticks(range(len(means)), told, fontsize=8)
    right.barh(range(len(blocks)), [entropies[block] for block in blocks], color="#0072B2")
    right.set_xlabel("entropy of the choices, bits", fontsize=8)
    right.spines[["top", "right"]].set_visible(False)
    figure.colorbar(drawn, ax=left, label="mean planes read")
    figure.savefig(path, dpi=150, facecolor="white")
