"""What do the lines say about speed, acceptance and memory? Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eval.records.fields import ordinal
from eval.records.markdown import count, distinct, fixed, geometric_mean, groups, megabytes, percent, table

Row = dict[str, Any]


def named(row: Row) -> str:
    """A contender with its draft length, where there is one."""
    length = row["num_draft_tokens"]
    return row["label"] if length in ("-", "") else f"{row['label']}, K {length}"


def throughput(rows: list[Row]) -> Iterator[str]:
    """Tokens a second by batch, a table per data set; then the speedups over each peer and their geometric means."""
    for (data,), found in groups(rows, "data"):
        batches = sorted(distinct(found, "batch"))
        cells = {(named(row), row["batch"]): row for row in found}
        yield f"Tokens a second of all rows, decode-only, {data}:\n"
        yield table(["contender", *(f"batch {batch}" for batch in batches), "tokens / pass", "share of bandwidth"], (
            [name, *(fixed(cells[name, b]["tokens_per_second"], 1) if (name, b) in cells else None for b in batches),
             _over_batches(cells, name, batches, "tokens_per_pass"),
             _over_batches(cells, name, batches, "bandwidth_share")]
            for name in dict.fromkeys(map(named, found))))
    for peer in dict.fromkeys(peer for row in rows for peer in row["over"]):
        yield from _speedups(rows, peer)
    compared = [row for row in rows if row["rows_compared"]]
    if compared:
        yield (f"{sum(row['rows_compared'] for row in compared):,.0f} rows held against the target alone: "
               f"{sum(row['rows_differing'] or 0 for row in compared):,.0f} differ.\n")


def _over_batches(cells: dict[tuple[str, int], Row], name: str, batches: list[int], what: str) -> str | None:
    """The range of a number over batch sizes."""
    values = [fixed(cells[name, b][what]) for b in batches if (name, b) in cells and cells[name, b][what] is not None]
    return None if not values else values[0] if len(set(values)) == 1 else f"{min(values)} to {max(values)}"


def _speedups(rows: list[Row], peer: str) -> Iterator[str]:
    compared = [row for row in rows if row["over"].get(peer) and not _is(row, peer)]
    if not compared:
        return
    columns = sorted({(row["data"], row["batch"]) for row in compared},
                     key=lambda column: (distinct(compared, "data").index(column[0]), column[1]))
    cells = {(named(row), row["data"], row["batch"]): row["over"][peer] for row in compared}
    yield f"Speedup over {peer} in the same run, and the geometric mean of the row:\n"
    yield table(["contender", *(f"{data}, batch {batch}" for data, batch in columns), "mean"], (
        [name, *(fixed(cells.get((name, *column))) for column in columns), _mean(name, columns, cells)]
        for name in dict.fromkeys(map(named, compared))))


def _mean(name: str, columns: list[tuple[str, int]], cells: dict[tuple, float]) -> str | None:
    """In brackets over how many columns, where some are empty: such a mean is not comparable with the others."""
    known = [cells[(name, *column)] for column in columns if (name, *column) in cells]
    partly = f" (of {len(known)})" if len(known) < len(columns) else ""
    return f"{geometric_mean(known):.2f}{partly}"


def _is(row: Row, peer: str) -> bool:
    return row["contender"] == peer


def latency(rows: list[Row]) -> Iterator[str]:
    """Shares of a token's time (QSpec, Figure 4); a level that checks spends its time there, too."""
    split = [row for row in rows if row["split"] and len(row["split"]) > 2]
    depth = max((len(row["split"]) - 2 for row in split), default=0)
    if not split:
        return
    yield "Share of decoding time inside the forward passes of target and levels:\n"
    yield table(["contender", "data", "batch", "ms / token", "target", *(f"level {at + 1}" for at in range(depth)),
                 "other"], (
        [named(row), row["data"], row["batch"],
         fixed(1e3 / row["tokens_per_second"], 3) if row["tokens_per_second"] else None,
         percent(row["split"][0][1]), *(percent(row["split"][at][1]) if at <= len(row["split"]) - 2 else None
                                        for at in range(1, depth + 1)), percent(row["split"][-1][1])]
        for row in split), left=2)


def averages(rows: list[Row]) -> Iterator[str]:
    yield table(["contender", "over", "gamma", "batches", "geometric mean", "batch 1 to 4"], (
        [row["label"], row["reference"], row["gamma"], row["batches"], fixed(row["over"]), fixed(row["over_small"])]
        for row in rows), left=2)


def acceptance(rows: list[Row]) -> Iterator[str]:
    """Per level; per position, where the lines know it."""
    yield table(["chain", "level", "data", "batch", "K", "drafted", "tested", "accepted", "acceptance",
                 "tokens / pass"], (
        [row["label"], row["level"], row["data"], row["batch"], row["num_draft_tokens"], count(row["drafted"]),
         count(row["tested"]), count(row["accepted"]), fixed(row["acceptance"], 3), fixed(row["tokens_per_pass"])]
        for row in rows), left=3)
    yield ("Acceptance is accepted / tested: of the tokens whose verdict is known, the accepted ones and the first "
           "rejected one of a draft. Tokens / pass: of eval.acceptance with the pass that reads the prompt, of "
           "eval.bench_decode and eval.replay without.\n")
    placed = [row for row in rows if row["by_position"]]
    if any(":" in row["num_draft_tokens"] for row in rows):
        yield "K: tokens per draft and confidence threshold of each level, from the largest down.\n"
    if placed:
        most = max(place for row in placed for place, _, _ in row["by_position"])
        places = range(min(place for row in placed for place, _, _ in row["by_position"]), most + 1)
        yield "Acceptance of the 1st, 2nd ... drafted token, of those all before which were accepted:\n"
        yield table(["chain", "level", "data", "batch", *map(ordinal, places)], (
            [row["label"], row["level"], row["data"], row["batch"],
             *(_at(row["by_position"]).get(place) for place in places)] for row in placed), left=3)


def _at(positions: list[tuple[int, int, int]]) -> dict[int, str]:
    return {place: f"{accepted / tested:.3f}" for place, tested, accepted in positions if tested}


def ablation(rows: list[Row]) -> Iterator[str]:
    ordered = sorted(rows, key=lambda row: (distinct(rows, "label").index(row["label"]), row["data"],
                                            row["batch"] or 0, row["lengths"]))
    yield table(["chain", "data", "batch", "K", "tokens/s", "acceptance", "tokens / pass"], (
        [row["label"], row["data"], row["batch"], row["num_draft_tokens"], fixed(row["tokens_per_second"], 1),
         ", ".join(fixed(one, 3) or "-" for one in row["acceptance"]), fixed(row["tokens_per_pass"])]
        for row in ordered), left=2)


def memory(rows: list[Row]) -> Iterator[str]:
    yield table(["contender", "batch", "weights MB", "KV MB", "peak of the process MB"], (
        [row["label"], row["batch"], megabytes(row["weights"]), megabytes(row["kv"]), megabytes(row["peak"])]
        for row in sorted(rows, key=lambda row: row["batch"])))


def streams(rows: list[Row]) -> Iterator[str]:
    yield table(["levels", "contender", "requests", "slots", "tokens/s", "mean wait s"], (
        [row["levels"], row["label"], row["requests"], row["max_batch"], fixed(row["tokens_per_second"], 1),
         fixed(row["mean_wait"])] for row in rows), left=2)


def quantizing(rows: list[Row]) -> Iterator[str]:
    yield table(["format", "quantize s", "save s", "reload s", "packed MB", "peak MB", "bound MB", "bit-identical"], (
        [row["label"], *(fixed(row[name]) for name in ("quantize", "save", "reload")),
         *(megabytes(row[name]) for name in ("packed", "peak", "bound")), "yes" if row["identical"] else "**no**"]
        for row in rows))


def kernels(rows: list[Row]) -> Iterator[str]:
    """Milliseconds by rows of activations, in brackets the weight's bytes a second over what the memory gave."""
    for (op, m, k), found in groups(rows, "op", "m", "k"):
        numbers = sorted(distinct(found, "n"))
        cells = {(row["label"], row["n"]): row for row in found}
        yield (f"`{op}` [{m}, {k}], milliseconds by number of rows; in brackets bytes of weight a second over a plain "
               "read of memory:\n")
        yield table(["contender", *map(str, numbers)], (
            [label, *(_kernel(cells.get((label, n))) for n in numbers)] for label in distinct(found, "label")))


def _kernel(row: Row | None) -> str | None:
    if row is None:
        return None
    if row["missing"] is not None:
        return f"missing: {row['missing']}"
    share = f" ({row['share']:.2f})" if row["share"] is not None else ""
    plain = " plain torch" if row["not_compiled"] else ""
    return "no quiet call" if row["ms"] is None else f"{row['ms']:.3f}{share}{plain}"
