"""What does a line of results say? Every kind of line that a program writes, in the one form the report reads.

A line names its kind; lines of programs that do not are told by the fields only they have. Every function here takes
one line and gives records: dicts with "kind", "key" (what the record is about: a later record of the same key replaces
it) and the fields of that kind. KeyError, TypeError and ValueError mean a line that is not what its kind promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def kind_of(entry: Row) -> str | None:
    """The kind of a line; None for one that nothing here reads."""
    if "kind" in entry:
        return entry["kind"] if isinstance(entry["kind"], str) and entry["kind"] in _READERS else None
    return next((kind for kind, names in _TELLING.items() if names <= entry.keys()), None)


def records_of(kind: str, entry: Row) -> list[Row]:
    """The records of a line of that kind."""
    return _READERS[kind](entry)


def number(entry: Row, name: str, *, none: bool = False) -> float | None:
    """A finite number of a line; with `none`, None where it is missing or null."""
    value = entry.get(name) if none else entry[name]
    if value is None and none:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, no finite number")
    return value


def words(levels: Any) -> list[str]:
    """Levels as tables name them: the last part of a path."""
    if not isinstance(levels, list) or not all(isinstance(level, str) for level in levels):
        raise TypeError(f"levels is {levels!r}, no list of words")
    return [Path(level).name if "/" in level else level for level in levels]


def chain(levels: list[str]) -> str:
    return " <- ".join(levels) or "target alone"


def drafts(value: Any) -> str:
    """Tokens per draft, one number for all levels or one per level, as tables write them."""
    numbers = value if isinstance(value, list) else [value]
    return ", ".join("-" if one is None else str(one) for one in numbers)


def _task(entry: Row) -> list[Row]:
    task, metric = str(entry["task"]), str(entry["metric"])
    return [{"kind": "task", "key": (entry["system"], task, metric, entry.get("items")), "label": str(entry["system"]),
             "task": task, "metric": metric, "value": number(entry, "value"),
             "stderr": number(entry, "stderr", none=True), "items": entry.get("items"),
             "seconds": number(entry, "seconds", none=True),
             "identical_items": number(entry, "identical_items", none=True)}]


def _fidelity(entry: Row) -> list[Row]:
    return [{"kind": "fidelity", "key": (entry["system"], entry["reference"], entry["data"],
                                         entry.get("max_new_tokens")),
             "label": str(entry["system"]), "reference": str(entry["reference"]), "data": str(entry["data"]),
             "prompts": int(number(entry, "prompts")), "equal": int(number(entry, "equal")),
             "mean_first_difference": number(entry, "mean_first_difference", none=True),
             "tokens": number(entry, "tokens", none=True),
             "max_new_tokens": number(entry, "max_new_tokens", none=True)}]


def _perplexity(entry: Row) -> list[Row]:
    return [{"kind": "perplexity", "key": (entry["system"], entry["data"]), "label": str(entry["system"]),
             "data": str(entry["data"]), "tokens": int(number(entry, "tokens")),
             **{name: number(entry, name, none=True)
                for name in ("token_perplexity", "word_perplexity", "bits_per_byte")}}]


def _probabilities(entry: Row) -> list[Row]:
    points = [(number({"p": p}, "p"), number({"p": q}, "p")) for p, q in entry["points"]]
    return [{"kind": "probabilities", "key": (entry["system"], entry["reference"], entry["data"]),
             "label": str(entry["system"]), "reference": str(entry["reference"]), "data": str(entry["data"]),
             "tokens": int(number(entry, "tokens")), "pearson_r": number(entry, "pearson_r"), "points": points}]


def _decode(entry: Row) -> list[Row]:
    """Lines of eval.bench_decode with a plan, and of eval.bench_qspec, whose draft length is "gamma"."""
    data, batch = str(entry.get("data", "mixed prompts")), int(number(entry, "batch"))
    length = drafts(entry.get("num_draft_tokens", entry.get("gamma")))
    contender = str(entry["contender"])
    return [{"kind": "decode", "key": (contender, data, batch, length), "label": contender, "data": data,
             "batch": batch, "num_draft_tokens": length,
             "tokens_per_second": number(entry, "tokens_per_second", none=True),
             "with_prefill": number(entry, "tokens_per_second_with_prefill", none=True),
             "over": {str(peer): number({"ratio": ratio}, "ratio", none=True)
                      for peer, ratio in entry.get("over", {}).items()},
             "split": _split(entry), "bandwidth_share": number(entry, "bandwidth_share", none=True),
             "tokens_per_pass": number(entry, "tokens_per_pass", none=True),
             "rows_compared": number(entry, "rows_compared", none=True),
             "rows_differing": number(entry, "rows_differing", none=True)}]


def _split(entry: Row) -> list[tuple[str, float]] | None:
    """Where a token's time went, as parts of 1: the target, each level, the rest."""
    if "seconds" in entry and entry["seconds"] is not None:
        spent, levels = entry["seconds"], words(entry["levels"])
        if len(spent["levels"]) != len(levels):
            raise ValueError(f"seconds of {len(spent['levels'])} levels for {len(levels)} levels")
        parts = [("target", number(spent, "target"))]
        parts += [(f"level {at}: {name}", number({"s": s}, "s"))
                  for at, (name, s) in enumerate(zip(levels, spent["levels"], strict=True), 1)]
        parts.append(("other", number(spent, "other")))
    elif isinstance(entry.get("ms_per_token"), dict) and entry.get("gamma") is not None:
        spent = entry["ms_per_token"]
        if spent["draft"] is None:
            return None
        parts = [("target", number(spent, "verify")), ("level 1: draft", number(spent, "draft")),
                 ("other", number(spent, "other"))]
    else:
        return None
    whole = sum(seconds for _, seconds in parts)
    return [(name, seconds / whole) for name, seconds in parts] if whole > 0 else None


def _decode_one_prompt(entry: Row) -> list[Row]:
    """Lines of eval.bench_decode without a plan: prompts one at a time, ratios under "over X"."""
    ratios = {name.removeprefix("over "): value for name, value in entry.items()
              if name.startswith("over ") and not name.endswith("with prefill")}
    levels = [str(level["level"]) for level in entry.get("levels", [])]
    made = _decode({"contender": entry["contender"], "data": entry["data"], "batch": 1, "over": ratios,
                    "num_draft_tokens": None, "tokens_per_second": entry["tokens_per_second"],
                    "tokens_per_second_with_prefill": entry.get("tokens_per_second_with_prefill"),
                    "tokens_per_pass": entry.get("tokens_per_target_pass")})
    for at, level in enumerate(entry.get("levels", [])):
        made.append({"kind": "acceptance", "key": (entry["contender"], at, entry["data"], 1, "-"),
                     "label": chain(levels), "level": levels[at], "level_index": at, "data": str(entry["data"]),
                     "batch": 1, "num_draft_tokens": "-", "drafted": None, "tested": None, "accepted": None,
                     "acceptance": number(level, "acceptance"), "by_position": [],
                     "tokens_per_pass": number(entry, "tokens_per_target_pass", none=True)})
    return made


def _acceptance(entry: Row) -> list[Row]:
    levels = words(entry["levels"]) if "levels" in entry else [str(entry["level"])]
    length, at = drafts(entry.get("num_draft_tokens", entry.get("gamma"))), int(entry.get("level_index", 0))
    batch = int(number(entry, "batch"))
    positions = [(int(number(one, "position")), int(number(one, "tested")), int(number(one, "accepted")))
                 for one in entry.get("by_position") or []]
    return [{"kind": "acceptance", "key": (chain(levels), at, entry["data"], batch, length), "label": chain(levels),
             "level": words([entry["level"]])[0], "level_index": at, "data": str(entry["data"]), "batch": batch,
             "num_draft_tokens": length, **{name: int(number(entry, name))
                                            for name in ("drafted", "tested", "accepted")},
             "acceptance": number(entry, "acceptance", none=True), "by_position": sorted(positions),
             "tokens_per_pass": number(entry, "tokens_per_pass", none=True)}]


def _ablation(entry: Row) -> list[Row]:
    levels, length = words(entry["levels"]), entry["num_draft_tokens"]
    batch = entry.get("batch")
    return [{"kind": "ablation", "key": (chain(levels), entry["data"], batch, drafts(length)), "label": chain(levels),
             "data": str(entry["data"]), "batch": batch, "num_draft_tokens": drafts(length),
             "lengths": [int(one) for one in (length if isinstance(length, list) else [length])],
             "tokens_per_second": number(entry, "tokens_per_second", none=True),
             "acceptance": _one_or_many(entry.get("acceptance")),
             "tokens_per_pass": number(entry, "tokens_per_pass", none=True),
             "over": {str(peer): ratio for peer, ratio in (entry.get("over") or {}).items()}}]


def _one_or_many(value: Any) -> list[float]:
    many = value if isinstance(value, list) else [] if value is None else [value]
    return [number({"acceptance": one}, "acceptance") for one in many]


def _memory(entry: Row) -> list[Row]:
    """Of eval.bench_decode (weights_bytes, peak_bytes) and eval.bench_qspec (weight_bytes, rss_peak_bytes)."""
    weights = number(entry, "weights_bytes" if "weights_bytes" in entry else "weight_bytes")
    peak = number(entry, "peak_bytes" if "peak_bytes" in entry else "rss_peak_bytes", none=True)
    batch, length = int(number(entry, "batch")), drafts(entry.get("num_draft_tokens", entry.get("gamma")))
    return [{"kind": "memory", "key": (entry["contender"], batch, length), "label": str(entry["contender"]),
             "batch": batch, "weights": weights, "kv": number(entry, "kv_bytes", none=True), "peak": peak}]


def _memory_of_way(entry: Row) -> list[Row]:
    """What one process of eval.bench_memory prints."""
    return [{"kind": "memory", "key": (entry["way"], entry["shape"]), "label": f"{entry['way']} ({entry['shape']})",
             "batch": 1, "weights": number(entry, "weights"), "kv": None,
             "peak": number(entry, "peak", none=True)}]


def _kernel(entry: Row) -> list[Row]:
    shape = int(number(entry, "m")), int(number(entry, "k"))
    row = {"kind": "kernel", "key": (entry["op"], *shape, entry["n"], entry["contender"]),
           "label": str(entry["contender"]), "op": str(entry["op"]), "m": shape[0], "k": shape[1],
           "n": int(number(entry, "n")), "ours": entry.get("ours") is True, "missing": entry.get("missing")}
    if row["missing"] is not None:
        return [row]
    return [row | {"ms": number(entry, "ms", none=True), "weight_bytes": number(entry, "weight_bytes"),
                   "probe": number(entry, "probe_bytes_per_second", none=True),
                   "share": number(entry, "share_of_probe", none=True),
                   "not_compiled": bool(entry.get("not_compiled")) and entry.get("ours") is True}]


def _stream(entry: Row) -> list[Row]:
    levels = words(entry["levels"])
    return [{"kind": "stream", "key": (entry["contender"], chain(levels), entry["requests"], entry["max_batch"]),
             "label": str(entry["contender"]), "levels": chain(levels), "requests": int(number(entry, "requests")),
             "max_batch": int(number(entry, "max_batch")), "tokens_per_second": number(entry, "tokens_per_second"),
             "mean_wait": number(entry, "mean_wait_seconds")}]


def _quantize(entry: Row) -> list[Row]:
    return [{"kind": "quantize", "key": (entry["format"],), "label": str(entry["format"]),
             **{name: number(entry, f"{name}_seconds") for name in ("quantize", "save", "reload")},
             "packed": number(entry, "packed"), "peak": number(entry, "peak", none=True),
             "bound": number(entry, "bound"), "identical": entry["identical"] is True}]


def _average(entry: Row) -> list[Row]:
    """Means that eval.bench_qspec made of its own decode lines."""
    return [{"kind": "average", "key": (entry["contender"], entry["reference"], entry["gamma"]),
             "label": str(entry["contender"]), "reference": str(entry["reference"]), "gamma": str(entry["gamma"]),
             "batches": ", ".join(map(str, entry["batches"])), "over": number(entry, "over_reference"),
             "over_small": number(entry, "over_reference_small", none=True)}]


def _lossless(entry: Row) -> list[Row]:
    """One finished batch of eval/lossless.py."""
    levels = words(entry["chain"])
    return [{"kind": "lossless", "key": (chain(levels), entry["data"], entry["batch_size"], entry["batch"]),
             "label": chain(levels), "data": str(entry["data"]), "batch": int(number(entry, "batch_size")),
             "prompts": int(number(entry, "prompts")), "tokens": int(number(entry, "tokens_compared")),
             "differing": len(entry["differences"])}]


_READERS: dict[str, Callable[[Row], list[Row]]] = {
    "task": _task, "fidelity": _fidelity, "perplexity": _perplexity, "probabilities": _probabilities,
    "decode": _decode, "decode of one prompt": _decode_one_prompt, "acceptance": _acceptance, "ablation": _ablation,
    "memory": _memory, "memory of one way": _memory_of_way, "kernel": _kernel, "stream": _stream,
    "quantize": _quantize, "average": _average, "lossless": _lossless,
}
_TELLING: dict[str, set[str]] = {
    "kernel": {"op", "n", "contender", "m", "k"},
    "decode of one prompt": {"contender", "runs", "runs_without_decode", "tokens_per_second"},
    "stream": {"contender", "levels", "requests", "mean_wait_seconds"},
    "quantize": {"benchmark", "format", "quantize_seconds", "packed"},
    "lossless": {"asked", "chain", "batch_size", "tokens_compared", "differences"},
    "memory of one way": {"way", "shape", "weights", "peak"},
}
