"""What do the finished units of a throughput plan say? Lines of kind "decode", "acceptance" and "ablation"."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from eval.bench_decode.plan import ALONE, ASSISTED, STOCK, Contender
from eval.records.fields import words
from eval.records.markdown import geometric_mean

PEERS = (STOCK, ASSISTED, ALONE)
Row = dict[str, Any]


def lines(one: Contender, data: str, size: int, found: list[Row], bytes_read: list[int],
          peers: Sequence[str] = PEERS) -> list[tuple[str, Row]]:
    """(kind, values) of one contender at one batch size of one data file.

    found: finished units, each with a take of every contender. bytes_read: by one pass of the target and of each
    level. peers: names of those it is compared with. Ratios are of takes of the same unit, so that both met the same
    state of the machine.
    """
    takes = [unit["takes"][one.name] for unit in found]
    levels = words(one.system.levels) if one.way != "alone" else []
    about = {"levels": levels, "data": data, "batch": size, "num_draft_tokens": one.system.num_draft_tokens,
             "confidence_threshold": one.system.confidence_threshold, "model": words([one.system.model])[0],
             "format": one.system.format, "precision": one.system.precision}
    speed = {"tokens_per_second": _rate(takes), "over": over(one.name, found, peers),
             "over_with_prefill": over(one.name, found, peers, "tokens", "seconds")}
    if one.ablation is not None:
        return [("ablation", {"system": one.ablation, **about, **speed, "tokens_per_pass": _per_pass(takes),
                              "acceptance": [_acceptance(takes, at) for at in range(len(levels))]})]
    made = [("decode", {"contender": one.name, **about, **speed, "tokens_per_second_with_prefill":
                        _sum(takes, "tokens") / _sum(takes, "seconds"), "tokens_per_pass": _per_pass(takes),
                        "seconds": split(takes), "bandwidth_share": _share(takes, found, bytes_read),
                        "probe_bytes_per_second": statistics.median(u["probe_bytes_per_second"] for u in found),
                        "units": len(found), **_differing(takes, found)})]
    if one.way == "chain":
        made += [("acceptance", {"system": one.name, "level": name, "level_index": at, **about, **_counts(takes, at),
                                 "acceptance": _acceptance(takes, at), "by_position": [],
                                 # of the target's passes: those of inner levels are not counted apart
                                 "tokens_per_pass": None if at else _per_pass(takes)})
                 for at, name in enumerate(levels)]
    return made


def over(name: str, found: list[Row], peers: Sequence[str] = PEERS, tokens: str = "decode_tokens",
         seconds: str = "decode_seconds") -> Row:
    """Geometric means of the speed over that of every peer in the same unit."""
    def rate(take: Row) -> float | None:
        return take[tokens] / take[seconds] if take[tokens] and take[seconds] else None

    ratios: Row = {}
    for peer in peers:
        pairs = [(rate(unit["takes"][name]), rate(unit["takes"][peer])) for unit in found if peer in unit["takes"]]
        if known := [mine / its for mine, its in pairs if mine and its]:
            ratios[peer] = geometric_mean(known)
    return ratios


def split(takes: list[Row]) -> Row | None:
    """Decode-only seconds: in the target's passes, in those of each level, in neither. None of stock generate."""
    if "target_seconds" not in takes[0]:
        return None
    whole, target = _sum(takes, "decode_seconds"), _sum(takes, "target_seconds")
    by_level = zip(*(take["levels"] for take in takes), strict=True)
    levels = [sum(level["seconds"] for level in same) for same in by_level]
    return {"total": whole, "target": target, "levels": levels, "other": whole - target - sum(levels)}


def _sum(takes: list[Row], name: str) -> float:
    return sum(take[name] for take in takes)


def _rate(takes: list[Row]) -> float | None:
    seconds = _sum(takes, "decode_seconds")
    return _sum(takes, "decode_tokens") / seconds if seconds else None


def _per_pass(takes: list[Row]) -> float | None:
    """Tokens that a row gains with a pass of the target, after the pass that read the prompt."""
    if "row_passes" not in takes[0]:
        return None
    passes = _sum(takes, "row_passes")
    return _sum(takes, "decode_tokens") / passes if passes else None


def _counts(takes: list[Row], at: int) -> dict[str, int]:
    return {name: sum(take["levels"][at][name] for take in takes) for name in ("drafted", "tested", "accepted")}


def _acceptance(takes: list[Row], at: int) -> float | None:
    counts = _counts(takes, at)
    return counts["accepted"] / counts["tested"] if counts["tested"] else None


def _share(takes: list[Row], found: list[Row], bytes_read: list[int]) -> float | None:
    """Bytes of weights read a second, by target and levels, over the probe's: 1 where nothing but memory limits."""
    seconds = _sum(takes, "decode_seconds")
    if "target_passes" not in takes[0] or not seconds:
        return None
    passes = [_sum(takes, "target_passes"), *(sum(take["levels"][at]["forwards"] for take in takes)
                                              for at in range(len(bytes_read) - 1))]
    nbytes = sum(count * each for count, each in zip(passes, bytes_read, strict=True))
    return nbytes / seconds / statistics.median(unit["probe_bytes_per_second"] for unit in found)


def _differing(takes: list[Row], found: list[Row]) -> dict[str, int]:
    if "rows_differing" not in takes[0]:
        return {}
    return {"rows_compared": sum(unit["rows"] for unit in found), "rows_differing": int(_sum(takes, "rows_differing")),
            "tokens_compared": int(sum(unit["takes"][ALONE]["tokens"] for unit in found))}
