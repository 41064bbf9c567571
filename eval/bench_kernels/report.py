"""What do the kernel benchmark's numbers say on one screen?"""

from __future__ import annotations

import argparse
from typing import Any

from rich.markup import escape
from rich.table import Table


def table(op: str, entries: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    """A row a contender, a column an n; ours with the share of the probe and the ratio to every peer."""
    found = {(e["contender"], e["n"]): e for e in entries}
    names = list(dict.fromkeys(e["contender"] for e in entries))
    rotated = max(e.get("rotated_bytes", 0) for e in entries)
    counted = f"median of up to {args.samples} {'' if args.quick else 'uncontended '}calls"
    out = Table(
        "",
        *(f"n = {n}" for n in args.n),
        title=f"{op} [{args.m}, {args.k}], {args.threads} threads, ms, {counted}"
        f"\n{rotated / 1e9:.2f} GB of weights go round; in brackets: weight bytes a second over the probe's",
    )
    for name in names:
        out.add_row(escape(name), *(_cell(found[name, n]) for n in args.n))
    out.add_section()
    for name in (n for n in names if found[n, args.n[0]]["ours"]):
        peers = dict.fromkeys(peer for n in args.n for peer in found[name, n].get("ratios", {}))
        for peer in peers:
            ratios = [found[name, n].get("ratios", {}).get(peer) for n in args.n]
            out.add_row(escape(f"{name} : {peer}"), *("-" if r is None else f"{r:.2f}" for r in ratios))
    out.add_section()
    out.add_row("probe, GB/s", *(_probe([e for e in entries if e["n"] == n]) for n in args.n))
    return out


def _cell(entry: dict[str, Any]) -> str:
    if "missing" in entry:
        return escape(f"missing: {entry['missing']}")
    if entry["ms"] is None:
        return f"none of {entry['contended']} calls was uncontended"
    share = f" ({entry['share_of_probe']:.2f})" if entry["share_of_probe"] else ""
    few = f" of {entry['samples']}" if entry["contended"] > entry["samples"] else ""
    return f"{entry['ms']:.3f}{share}{few}"


def _probe(entries: list[dict[str, Any]]) -> str:
    read = next((e for e in entries if e.get("probe_bytes_per_second")), None)
    return f"{read['probe_bytes_per_second'] / 1e9:.1f} {read['regime']}" if read else "-"
