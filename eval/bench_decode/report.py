"""What do the decoding benchmark's numbers say: tokens a second, ratios, acceptances, memory?"""

from __future__ import annotations

import statistics
from typing import Any

from rich.markup import escape
from rich.table import Table

from eval.bench_decode.contenders import ALONE, ASSISTED, STOCK, Contender
from eval.records import machine
from eval.records.markdown import geometric_mean

COLUMNS = ("contender", "tokens/s", "x target alone", "x stock", "x assisted", "tokens/pass", "round ms", "outside",
           "acceptance", "peak RSS MB (grew)")


def summary(one: Contender, contenders: list[Contender]) -> dict[str, Any]:
    """Rates of a contender, and its ratios to the target alone and to the two stock ways."""
    compared = [take for take in one.takes if take.rate]
    seconds = sum(take.decode_seconds for take in compared)
    found: dict[str, Any] = {
        "contender": one.name,
        "runs": len(one.takes),
        "runs_without_decode": len(one.takes) - len(compared),
        "tokens_per_second": sum(take.decode_tokens for take in compared) / seconds if compared else None,
        "tokens_per_second_with_prefill": sum(t.tokens for t in one.takes) / sum(t.seconds for t in one.takes),
        "rss_before_bytes": one.rss[0],
        "rss_peak_bytes": one.rss[1],
    }
    for peer in (p for p in contenders if p.name in (STOCK, ASSISTED, ALONE)):
        pairs = list(zip(one.takes, peer.takes, strict=True))
        found[f"over {peer.name}"] = geometric_mean([a.rate / b.rate for a, b in pairs if a.rate and b.rate])
        whole = [a.rate_with_prefill / b.rate_with_prefill for a, b in pairs]
        found[f"over {peer.name} with prefill"] = geometric_mean(whole)
        spread = [statistics.median(whole), min(whole), max(whole)]
        found[f"over {peer.name} with prefill: median, least, most"] = spread
    return found | (_of_counts(one) if one.counts else {})


def _of_counts(one: Contender) -> dict[str, Any]:
    counts = one.counts
    rounds, whole = sum(c.target_passes for c in counts), sum(c.seconds for c in counts)
    levels = []
    for same in zip(*(c.levels for c in counts), strict=True):
        levels.append({
            "level": same[0].name,
            "acceptance": sum(level.accepted for level in same) / max(sum(level.tested for level in same), 1),
            "forwards": sum(level.forwards for level in same),
            "seconds": sum(level.seconds for level in same),
            "cache_bytes": max(level.cache_bytes for level in same),
        })
    return {
        "tokens_per_target_pass": sum(c.new_tokens for c in counts) / sum(c.row_passes for c in counts),
        "round_ms": 1e3 * whole / rounds,
        "outside_compiled_share": sum(c.seconds_outside_forwards for c in counts) / whole,
        "target_cache_bytes": max(c.target_cache_bytes for c in counts),
        "levels": levels,
    }


def table(data: str, rows: list[dict[str, Any]], batches: int, size: int, reads: float) -> Table:
    """A row a contender; ratios are decode-only, in brackets with prefill."""
    prompts = f"{batches} prompts" if size == 1 else f"{batches * size} prompts, batch size {size}"
    out = Table(*COLUMNS, title=f"{data}: {prompts}; decode-only, in brackets with prefill; memory read "
                f"{reads / 1e9:.1f} GB/s ({machine.regime(reads)})")
    for row in rows:
        out.add_row(
            escape(row["contender"]),
            f"{_number(row['tokens_per_second'])} ({_number(row['tokens_per_second_with_prefill'])})",
            *(f"{_number(row.get(f'over {p}'))} ({_number(row.get(f'over {p} with prefill'))})"
              for p in (ALONE, STOCK, ASSISTED)),
            _number(row.get("tokens_per_target_pass")), _number(row.get("round_ms")),
            f"{100 * row['outside_compiled_share']:.1f} %" if "outside_compiled_share" in row else "",
            " ".join(f"{level['acceptance']:.3f}" for level in row.get("levels", [])), _memory(row),
        )
    return out


def _memory(row: dict[str, Any]) -> str:
    before, peak = row["rss_before_bytes"], row["rss_peak_bytes"]
    return "" if peak is None else f"{peak / 1e6:,.0f} ({(peak - before) / 1e6:,.0f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
