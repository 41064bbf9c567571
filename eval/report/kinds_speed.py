"""What do lines about speed and acceptance say, whichever program wrote them? As eval/report/kinds.py has it."""

from __future__ import annotations

from typing import Any

from eval.records.fields import chain, drafts, many, number, words

Row = dict[str, Any]


def decode(entry: Row) -> list[Row]:
    """Lines of eval.bench_decode with a plan, and of eval.bench_qspec, whose draft length is "gamma"."""
    data, batch = str(entry.get("data", "mixed prompts")), int(number(entry, "batch"))
    length = drafts(entry)
    contender = str(entry["contender"])
    trace = chain(words(entry["recorded_on"])) if "recorded_on" in entry else None  # of eval.replay
    label = contender if trace is None else f"{contender}, trace of {trace}"
    return [{"kind": "decode", "key": (label, data, batch, length), "label": label, "contender": contender,
             "data": data, "batch": batch, "num_draft_tokens": length,
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


def decode_one_prompt(entry: Row) -> list[Row]:
    """Lines of eval.bench_decode without a plan: prompts one at a time, ratios under "over X"."""
    ratios = {name.removeprefix("over "): value for name, value in entry.items()
              if name.startswith("over ") and not name.endswith("with prefill")}
    levels = [str(level["level"]) for level in entry.get("levels", [])]
    made = decode({"contender": entry["contender"], "data": entry["data"], "batch": 1, "over": ratios,
                    "num_draft_tokens": None, "tokens_per_second": entry["tokens_per_second"],
                    "tokens_per_second_with_prefill": entry.get("tokens_per_second_with_prefill"),
                    "tokens_per_pass": entry.get("tokens_per_target_pass")})
    for at, level in enumerate(entry.get("levels", [])):
        made.append({"kind": "acceptance", "key": (entry["contender"], at, entry["data"], 1, "-"),
                     "label": _over_target(entry, levels), "level": levels[at], "level_index": at,
                     "data": str(entry["data"]), "batch": 1,
                     "num_draft_tokens": "-", "drafted": None, "tested": None, "accepted": None,
                     "acceptance": number(level, "acceptance"), "by_position": [],
                     "tokens_per_pass": number(entry, "tokens_per_target_pass", none=True)})
    return made


def acceptance(entry: Row) -> list[Row]:
    levels = words(entry["levels"]) if "levels" in entry else [str(entry["level"])]
    length, at = drafts(entry), int(number(entry, "level_index", none=True) or 0)
    batch = int(number(entry, "batch"))
    positions = [(int(number(one, "position")), int(number(one, "tested")), int(number(one, "accepted")))
                 for one in entry.get("by_position") or []]
    label = _over_target(entry, levels)
    return [{"kind": "acceptance", "key": (entry.get("system"), label, at, entry["data"], batch, length),
             "label": label,
             "level": words([entry["level"]])[0], "level_index": at, "data": str(entry["data"]), "batch": batch,
             "num_draft_tokens": length, **{name: int(number(entry, name))
                                            for name in ("drafted", "tested", "accepted")},
             "acceptance": number(entry, "acceptance", none=True), "by_position": sorted(positions),
             "tokens_per_pass": number(entry, "tokens_per_pass", none=True)}]


def _over_target(entry: Row, levels: list[str]) -> str:
    """A chain with the target whose tokens it drafts, and the target's format: the same draft serves several."""
    asked = entry.get("asked") if isinstance(entry.get("asked"), dict) else {}
    model = entry.get("target") or entry.get("model") or asked.get("model")
    if not isinstance(model, str) or model == "None":
        return chain(levels)
    how = [entry[name] for name in ("format", "precision") if isinstance(entry.get(name), str)]
    return chain([" ".join([*words([model]), *how]), *levels])


def ablation(entry: Row) -> list[Row]:
    levels, length = words(entry["levels"]), drafts(entry)
    batch = number(entry, "batch", none=True)
    return [{"kind": "ablation", "key": (chain(levels), entry["data"], batch, length), "label": chain(levels),
             "data": str(entry["data"]), "batch": batch, "num_draft_tokens": length,
             "lengths": [int(number({"K": one}, "K")) for one in many(entry["num_draft_tokens"])],
             "tokens_per_second": number(entry, "tokens_per_second", none=True),
             "acceptance": [number({"share": one}, "share", none=True) for one in many(entry.get("acceptance"))],
             "tokens_per_pass": number(entry, "tokens_per_pass", none=True)}]
