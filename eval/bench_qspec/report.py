"""What do the numbers of the QSpec benchmark say: throughput, speedups, where a token's time goes, memory?"""

from __future__ import annotations

import statistics
from typing import Any

from rich.markup import escape
from rich.table import Table

from eval.bench_qspec.contenders import ALONE, DEQUANT, Contender, Take
from eval.records import machine
from eval.records.markdown import geometric_mean

SMALL_BATCHES = 4  # "batch 1-4", where decoding waits for memory
Row = dict[str, Any]


def summaries(batch: int, takes: dict[Contender, list[Take]], rounds: int) -> list[Row]:
    """A row per contender of one batch size; `rounds`: how often all batches were decoded."""
    alone = {one.name: found for one, found in takes.items() if one.gamma is None}
    return [_summary(batch, one, found, alone, rounds) for one, found in takes.items()]


def _summary(batch: int, one: Contender, takes: list[Take], alone: dict[str, list[Take]], rounds: int) -> Row:
    tokens = sum(take.tokens for take in takes)
    row = {"kind": "decode", "batch": batch, "contender": one.name, "gamma": one.gamma, "reference": one.reference,
           "takes": len(takes), "tokens": tokens, "tokens_per_second": _rate(takes, rounds),
           "over": {name: _ratio(takes, alone[name]) if name in alone else None for name in (ALONE, DEQUANT)},
           "tokens_per_pass": tokens / max(sum(take.row_passes for take in takes), 1),
           "rows_per_pass": sum(take.row_passes for take in takes) / max(sum(take.passes for take in takes), 1),
           "target_pass_ms": _per(takes, "target_seconds", sum(take.passes for take in takes)),
           "prefill_ms": 1e3 * statistics.median(take.stats.prefill_seconds for take in takes),
           "target_cache_bytes": max(take.stats.target_cache_bytes for take in takes),
           "draft_cache_bytes": max(sum(level.cache_bytes for level in take.stats.levels) for take in takes),
           "ms_per_token": _split(takes, tokens)}
    if one.gamma is not None:
        row |= _of_draft(takes, alone[one.reference])
    if one.reference is not None:
        row |= differences(takes, alone[one.reference])
    return row


def _of_draft(takes: list[Take], alone: list[Take]) -> Row:
    levels = [level for take in takes for level in take.stats.levels]
    accepted, forwards = sum(level.accepted for level in levels), sum(take.forwards for take in takes)
    step = _per(takes, "draft_seconds", forwards)
    whole = _per(alone, "target_seconds", sum(take.passes for take in alone))
    return {"acceptance": accepted / max(sum(level.tested for level in levels), 1),
            "accepted_share": accepted / max(sum(level.drafted for level in levels), 1),
            "draft_step_ms": step, "draft_step_over_step_alone": step / whole if step and whole else None}


def differences(takes: list[Take], alone: list[Take]) -> Row:
    """Rows and tokens compared with the target alone, and how many of them differ."""
    pairs = [pair for take, peer in zip(takes, alone, strict=True) for pair in _rows(take.ids, peer.ids)]
    wrong = [sum(a != b for a, b in zip(got, expected, strict=True)) for got, expected in pairs]
    return {"rows_compared": len(pairs), "tokens_compared": sum(take.stats.new_tokens for take in alone),
            "rows_differing": sum(map(bool, wrong)), "tokens_differing": sum(wrong)}


def _rows(got: list[list[int]], expected: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Rows of two decodings side by side; a shorter one is filled with -1, which is no token."""
    width = max(len(got[0]), len(expected[0]))
    return [(a + [-1] * (width - len(a)), b + [-1] * (width - len(b))) for a, b in zip(got, expected, strict=True)]


def _rate(takes: list[Take], rounds: int) -> float | None:
    """Tokens a second of a round over all batches, the median round."""
    size = len(takes) // rounds
    chunks = [takes[size * r : size * (r + 1)] for r in range(rounds)]
    rates = [sum(t.tokens for t in chunk) / seconds for chunk in chunks if (seconds := sum(t.seconds for t in chunk))]
    return statistics.median(rates) or None if rates else None


def _ratio(takes: list[Take], peers: list[Take]) -> float | None:
    pairs = zip(takes, peers, strict=True)
    return geometric_mean([a.rate / b.rate for a, b in pairs if a.rate and b.rate])


def _per(takes: list[Take], what: str, count: float) -> float | None:
    """Milliseconds of each of `count`; None of nothing."""
    return 1e3 * sum(getattr(take, what) for take in takes) / count if count else None


def _split(takes: list[Take], tokens: int) -> dict[str, float | None]:
    """Where the time of a valid token went (QSpec, Figure 4); the three add up to 1000 / tokens per second."""
    draft, verify = (_per(takes, name, tokens) for name in ("draft_seconds", "target_seconds"))
    whole = _per(takes, "seconds", tokens)
    return {"draft": draft, "verify": verify, "other": None if whole is None else whole - draft - verify}


def averages(rows: list[Row]) -> list[Row]:
    """Per contender with a draft: its speedup over its target alone, the geometric mean over batch sizes; for every
    gamma, and for the gamma that was best at each batch size ("best")."""
    found: dict[tuple, dict[int, float]] = {}
    for row in (row for row in rows if row["kind"] == "decode" and row["gamma"] is not None):
        ratio = row["over"][row["reference"]]
        for gamma in (row["gamma"], "best") if ratio else ():
            by_batch = found.setdefault((row["contender"], row["reference"], gamma), {})
            by_batch[row["batch"]] = max(ratio, by_batch.get(row["batch"], 0.0))
    return [{"kind": "average", "contender": name, "reference": reference, "gamma": gamma,
             "batches": sorted(by_batch), "over_reference": geometric_mean(list(by_batch.values())),
             "over_reference_small": geometric_mean([r for b, r in by_batch.items() if b <= SMALL_BATCHES])}
            for (name, reference, gamma), by_batch in sorted(found.items(), key=_gammas_in_order(found))]


def _gammas_in_order(found: dict[tuple, Any]):
    """Contenders as they came, each with its gammas, "best" last."""
    names = list(dict.fromkeys(name for name, _, _ in found))
    return lambda item: (names.index(item[0][0]), item[0][2] == "best", 0 if item[0][2] == "best" else item[0][2])


def table(batch: int, rows: list[Row], reads: float) -> Table:
    """A row per contender and gamma."""
    out = Table("contender", "gamma", "tokens/s", f"x {ALONE}", f"x {DEQUANT}", "acceptance", "tokens/pass",
                "ms/token = draft + verify + rest", "draft step ms (of a step alone)", "pass ms", "differ",
                title=f"batch {batch}: decode-only, tokens of all rows; memory read {reads / 1e9:.1f} GB/s "
                f"({machine.regime(reads)})")
    for row in rows:
        split = row["ms_per_token"]
        whole = None if split["draft"] is None else sum(split.values())
        parts = " + ".join(_number(split[name], 3) for name in ("draft", "verify", "other"))
        step = " ".join(f"({_number(row[name])})" if "over" in name else _number(row[name])
                        for name in ("draft_step_ms", "draft_step_over_step_alone") if name in row)
        differ = f"{row['rows_differing']} of {row['rows_compared']}" if "rows_differing" in row else ""
        out.add_row(
            escape(row["contender"]), str(row["gamma"] or ""), _number(row["tokens_per_second"], 1),
            *(_number(row["over"][name]) for name in (ALONE, DEQUANT)), _number(row.get("acceptance"), 3),
            _number(row["tokens_per_pass"]), f"{_number(whole, 3)} = {parts}", step,
            _number(row["target_pass_ms"]), differ,
        )
    return out


def average_table(rows: list[Row]) -> Table:
    batches = sorted({batch for row in rows for batch in row["batches"]})
    small = [batch for batch in batches if batch <= SMALL_BATCHES]
    out = Table("contender", "over", "gamma", f"batch {_span(small)}", f"batch {_span(batches)}",
                title="speedup over the same target alone, geometric means")
    for row in rows:
        out.add_row(escape(row["contender"]), row["reference"], str(row["gamma"]),
                    _number(row["over_reference_small"]), _number(row["over_reference"]))
    return out


def memory_table(rows: list[Row]) -> Table:
    """Resident memory against the target alone at the same batch size."""
    out = Table("contender", "batch", "weights MB", "KV MB", f"of {ALONE}", "peak RSS MB", f"of {ALONE}", "load s",
                title="memory: a fresh process each; weights and KV of target and draft, peak while decoding")
    alone = {row["batch"]: row for row in rows if row["contender"] == ALONE}
    for row in sorted(rows, key=lambda row: row["batch"]):
        peer = alone[row["batch"]]
        held, peer_held = (sum(one[name] for name in ("weight_bytes", "kv_bytes")) for one in (row, peer))
        peak = row["rss_peak_bytes"]
        out.add_row(escape(row["contender"]), str(row["batch"]), f"{row['weight_bytes'] / 1e6:.2f}",
                    f"{row['kv_bytes'] / 1e6:.2f}", f"{held / peer_held:.4f}",
                    "-" if peak is None else f"{peak / 1e6:,.1f}",
                    "-" if peak is None else f"{peak / peer['rss_peak_bytes']:.4f}", f"{row['load_seconds']:.2f}")
    return out


def _span(batches: list[int]) -> str:
    return "-".join(map(str, sorted({min(batches), max(batches)}))) if batches else "-"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
