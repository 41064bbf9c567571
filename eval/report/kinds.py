"""What does a line of results say? Every kind of line that a program writes, in the one form the report reads.

A line names its kind; lines of programs that do not are told by the fields only they have. Every function here takes
one line and gives records: dicts with "kind", "key" (what the record is about: a later record of the same key replaces
it) and the fields of that kind. KeyError, TypeError and ValueError mean a line that is not what its kind promises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eval.records.fields import chain, drafts, number, words
from eval.report.kinds_speed import ablation, acceptance, decode, decode_one_prompt

Row = dict[str, Any]


def kind_of(entry: Row) -> str | None:
    """The kind of a line; None for one that nothing here reads."""
    if "kind" in entry:
        return entry["kind"] if isinstance(entry["kind"], str) and entry["kind"] in _READERS else None
    return next((kind for kind, names in _TELLING.items() if names <= entry.keys()), None)


def records_of(kind: str, entry: Row) -> list[Row]:
    """The records of a line of that kind."""
    return _READERS[kind](entry)


def _task(entry: Row) -> list[Row]:
    task, metric = str(entry["task"]), str(entry["metric"])
    return [{"kind": "task", "key": (entry["system"], task, metric, entry.get("items")), "label": str(entry["system"]),
             "task": task, "metric": metric, "value": number(entry, "value"),
             "stderr": number(entry, "stderr", none=True), "items": number(entry, "items", none=True),
             "seconds": number(entry, "seconds", none=True),
             "identical_items": number(entry, "identical_items", none=True)}]


def _fidelity(entry: Row) -> list[Row]:
    data = str(entry["data"]) + ("" if entry.get("batch") is None else f", batch {entry['batch']}")
    return [{"kind": "fidelity", "key": (entry["system"], entry["reference"], data, entry.get("max_new_tokens")),
             "label": str(entry["system"]), "reference": str(entry["reference"]), "data": data,
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
             "tokens": int(number(entry, "tokens")), "pearson_r": number(entry, "pearson_r", none=True),
             "points": points}]


def _memory(entry: Row) -> list[Row]:
    """Of eval.bench_decode (weights_bytes, peak_bytes) and eval.bench_qspec (weight_bytes, rss_peak_bytes)."""
    weights = number(entry, "weights_bytes" if "weights_bytes" in entry else "weight_bytes")
    peak = number(entry, "peak_bytes" if "peak_bytes" in entry else "rss_peak_bytes", none=True)
    batch, length = int(number(entry, "batch")), drafts(entry)
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
    """One finished batch of eval/lossless."""
    levels = words(entry["chain"])
    return [{"kind": "lossless", "key": (chain(levels), entry["data"], entry["batch_size"], entry["batch"]),
             "label": chain(levels), "data": str(entry["data"]), "batch": int(number(entry, "batch_size")),
             "prompts": int(number(entry, "prompts")), "tokens": int(number(entry, "tokens_compared")),
             "differing": len(entry["differences"])}]


def _pair(entry: Row) -> list[Row]:
    """Two drafts on one target's text, of eval.acceptance."""
    names = "acceptance", "acceptance_against", "difference", "lower_bound", "margin"
    draft, against = str(entry["draft"]), str(entry["against"])
    return [{"kind": "paired acceptance", "key": (entry["pair"], entry["data"]), "label": str(entry["target"]),
             "data": str(entry["data"]), "draft": draft, "against": against, "codebook": str(entry["codebook"]),
             "prompts": int(number(entry, "prompts")), "tokens": int(number(entry, "tokens")),
             **{name: number(entry, name) for name in names}}]


def _nested(entry: Row) -> list[Row]:
    """A tensor of a nested model, or all its linears, of eval.nested_quality."""
    errors = {str(draft): number({"error": error}, "error") for draft, error in entry["relative_errors"].items()}
    return [{"kind": "nested", "key": (entry["model"], entry["tensor"]), "label": str(entry["model"]),
             "tensor": str(entry["tensor"]), "weights": int(number(entry, "weights")),
             "escapes": int(number(entry, "escapes")), "errors": errors, "identical": entry["identical"] is True,
             **{name: number(entry, name) for name in ("bytes_ratio", "run_time_ratio")}}]


_READERS: dict[str, Callable[[Row], list[Row]]] = {
    "task": _task, "fidelity": _fidelity, "perplexity": _perplexity, "probabilities": _probabilities,
    "decode": decode, "decode of one prompt": decode_one_prompt, "acceptance": acceptance, "ablation": ablation,
    "memory": _memory, "memory of one way": _memory_of_way, "kernel": _kernel, "stream": _stream,
    "quantize": _quantize, "average": _average, "lossless": _lossless, "paired acceptance": _pair, "nested": _nested,
}
_TELLING: dict[str, set[str]] = {
    "kernel": {"op", "n", "contender", "m", "k"},
    "decode of one prompt": {"contender", "runs", "runs_without_decode", "tokens_per_second"},
    "stream": {"contender", "levels", "requests", "mean_wait_seconds"},
    "quantize": {"benchmark", "format", "quantize_seconds", "packed"},
    "lossless": {"asked", "chain", "batch_size", "tokens_compared", "differences"},
    "memory of one way": {"way", "shape", "weights", "peak"},
}
