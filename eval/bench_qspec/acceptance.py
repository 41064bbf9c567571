"""How many drafted tokens does the target keep, over whole data sets? Counted in real runs, nothing teacher-forced."""

from __future__ import annotations

from typing import Any

from rich.progress import track
from rich.table import Table

import hf_mlspec
from eval.bench_qspec.contenders import ALONE, Contender, Target
from eval.rows import padded

WORDS = ("w4a4", "w4a8")


def acceptance(
    target: Target, data: str, prompts: list[list[int]], *, gamma: int, batch: int, max_new_tokens: int
) -> list[dict[str, Any]]:
    """A row per activation width: every prompt of `data` decoded once, `batch` at a time."""
    return [_of(target, data, Contender(word, ALONE, (word,), gamma), prompts, batch, max_new_tokens)
            for word in WORDS]


def _of(target: Target, data: str, one: Contender, prompts: list[list[int]], batch: int, max_new_tokens: int):
    total = hf_mlspec.LevelStats(one.name)
    tokens = passes = 0
    for start in track(range(0, len(prompts), batch), description=f"{data} {one.name}"):
        stats = target.decode(one, padded(prompts[start : start + batch]), max_new_tokens).stats
        tokens, passes = tokens + stats.new_tokens, passes + stats.row_passes
        for level in stats.levels:
            total.drafted, total.accepted = total.drafted + level.drafted, total.accepted + level.accepted
            total.tested += level.tested
    return {"kind": "acceptance", "data": data, "level": one.name, "gamma": one.gamma, "batch": batch,
            "prompts": len(prompts), "new_tokens": tokens, "drafted": total.drafted, "tested": total.tested,
            "accepted": total.accepted, "acceptance": total.acceptance,
            "accepted_share": total.accepted / max(total.drafted, 1), "tokens_per_pass": tokens / passes}


def table(rows: list[dict[str, Any]]) -> Table:
    """Acceptance: accepted of the drafted tokens whose verdict is known, which are those before the first rejected
    one of a round and that one; kept: accepted of all drafted."""
    out = Table("data", "level", "gamma", "prompts", "tokens", "drafted", "tested", "acceptance", "kept of drafted",
                "tokens/pass", title="acceptance a token, greedy, in real runs")
    for row in rows:
        counts = [f"{row[name]:,}" for name in ("prompts", "new_tokens", "drafted", "tested")]
        shares = [f"{row[name]:.4f}" for name in ("acceptance", "accepted_share")]
        out.add_row(row["data"], row["level"], str(row["gamma"]), *counts, *shares, f"{row['tokens_per_pass']:.3f}")
    return out
