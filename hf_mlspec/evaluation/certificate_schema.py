"""Is this JSON document a whole certificate, and does it agree with itself?"""

from __future__ import annotations

import json
import math
from typing import Any

SCHEMA = "mlspec-certificate/1"
HEAD = "trained head"  # the kind of a level that is read from a folder and is no model
_ABSENT = object()
_NUMBER, _NONE = (int, float), type(None)
# What every reader of a certificate relies on. A type, the entries of an object, or those of each item of a list.
_NEEDED: dict[str, Any] = {
    "schema": str, "created": str, "sha256": str,
    "result": {"lossless": bool, "prompts": int, "identical": int, "tokens_compared": int, "mismatches": int,
               "tolerated": int},
    "target": {"name": str, "parameters_sha256": str, "configuration_sha256": str, "decoding": {"how": str},
               "weights_sha256": (str, _NONE), "configuration_files": list, "format": (dict, _NONE)},
    "levels": [{"name": str, "kind": str}],
    "runs": [{"batch_size": int, "prompts": int, "tokens_compared": int, "mismatches": int, "tolerated": int,
              "tokens_per_pass": _NUMBER, "levels": [{"name": str, "acceptance": _NUMBER}],
              "differences": [{"prompt": int, "position": int, "tolerated": bool}]}],
    "machine": {"processor": str},
    "kernels": {"library": str, "sha256": (str, _NONE), "instruction_set": str, "ops": dict},
    "versions": {"hf_mlspec": str, "torch": str, "transformers": str, "python": str},
    "prompts": {"name": (str, _NONE), "count": int, "sha256": str, "ids_sha256": str},
    "settings": {"dtype": str, "max_new_tokens": int, "reference": str, "tolerate_ties": (*_NUMBER, _NONE)},
}


def read_json(text: str) -> Any:
    """The document in a text; ValueError for numbers that JSON has not, and for an entry that occurs twice."""
    return json.loads(text, parse_constant=_no_number, parse_float=_float, object_pairs_hook=_each_once)


def result_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all batch sizes; a prompt is identical where it is with each of them."""
    different = {item["prompt"] for run in runs for item in run["differences"]}
    total = {name: sum(run[name] for run in runs) for name in ("tokens_compared", "mismatches", "tolerated")}
    prompts = max((run["prompts"] for run in runs), default=0)
    return {"lossless": total["mismatches"] == total["tolerated"], "prompts": prompts,
            "identical": prompts - len(different), **total}


def agrees_with_itself(document: dict[str, Any]) -> bool:
    """Is the result that of the runs, every difference that a run counted in its list, and a tie only tolerated where
    that was asked for?"""
    asked = document["settings"]["tolerate_ties"] is not None or not document["result"]["tolerated"]
    return asked and document["result"] == result_of(document["runs"]) and all(map(_counts_agree, document["runs"]))


def _counts_agree(run: dict[str, Any]) -> bool:
    """Is every difference that was counted there?"""
    tolerated = sum(item["tolerated"] for item in run["differences"])
    return (run["mismatches"], run["tolerated"]) == (len(run["differences"]), tolerated)


def require_whole(document: dict[str, Any], said: str) -> None:
    """Raise ValueError, beginning with `said`, unless everything is there that readers rely on, and something was
    compared."""
    _require(document, _NEEDED, said)
    if not document["levels"] or not document["runs"] or any(run["tokens_compared"] < 1 for run in document["runs"]):
        raise ValueError(f"{said} certifies nothing: {len(document['levels'])} levels, {len(document['runs'])} runs, "
                         f"{document['result']['tokens_compared']} tokens compared; one of each at least is needed")


def _require(value: Any, needed: Any, said: str, place: str = "it") -> None:
    kind = type(needed) if isinstance(needed, dict | list) else needed
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        is_what = "not there" if value is _ABSENT else type(value).__name__
        raise ValueError(f"{said} is not a complete certificate: {place} is {is_what}, expected {wanted}")
    if isinstance(needed, dict):
        for name, inner in needed.items():
            where = name if place == "it" else f"{place}.{name}"
            _require(value.get(name, _ABSENT), inner, said, where)
    elif isinstance(needed, list):
        for index, item in enumerate(value):
            _require(item, needed[0], said, f"{place}[{index}]")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of an entry that occurs twice readers disagree which one counts."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return entries


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text:.40} is beyond what a number can be")
    return value


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")
