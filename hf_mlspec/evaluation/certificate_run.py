"""How is a certificate made: decode with the chain and alone, and write down everything that took part?"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ..integration.compare import Comparison, Item, OnItem, compare
from ..integration.config import SpeculationConfig
from ..integration.levels.resolve import resolve
from ..integration.levels.words import as_words
from ..speculation.shelf import levels_kept
from .certificate import Certificate
from .certificate_identity import kernels
from .certificate_schema import SCHEMA, result_of
from .certificate_subject import chain_of, level_entries, machine, prompts_entry, target_entry, versions


def certify(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[str], levels: Sequence[Any], *,
    max_new_tokens: int = 128, batch_sizes: Sequence[int] = (1,), speculation_config: Any = None,
    assistant_tokenizers: Sequence[Any] | None = None, reference: Literal["ours", "stock"] = "ours",
    tolerate_ties: float | None = None, folder: str | None = None, prompts_name: str | None = None,
    on_item: OnItem | None = None,
) -> Certificate:
    """Decode every prompt greedily with the chain and with the target alone; return the result as a certificate.

    model, tokenizer, prompts, levels, max_new_tokens, speculation_config, assistant_tokenizers, reference, on_item: as
    `hf_mlspec.compare` takes them. batch_sizes: prompts decoded together, one comparison each. tolerate_ties: float32
    only: a difference whose two largest float64 logits are closer than this does not count. folder: what the target
    was loaded from, unchanged since: its files are hashed, too. prompts_name: the file of the prompts; only the last
    part of its path is kept. Raises ValueError as `compare`, for a batch size below 1 or given twice, and for
    tolerate_ties without float32, before anything is decoded.
    """
    if tolerate_ties is not None and model.dtype != torch.float32:
        raise ValueError(f"tolerate_ties is for float32, where sums may break ties either way, not {model.dtype}")
    if not levels:
        raise ValueError("there are no levels to certify; give at least one, as in ['mxfp4']")
    require_batch_sizes(batch_sizes)
    with levels_kept():
        runs = {size: compare(model, tokenizer, prompts, levels, max_new_tokens=max_new_tokens, batch_size=size,
                              assistant_tokenizers=assistant_tokenizers, speculation_config=speculation_config,
                              reference=reference, on_item=on_item) for size in batch_sizes}
    return attest(model, tokenizer, prompts, levels, runs, max_new_tokens=max_new_tokens, reference=reference,
                  speculation_config=speculation_config, assistant_tokenizers=assistant_tokenizers,
                  tolerate_ties=tolerate_ties, folder=folder, prompts_name=prompts_name)


def attest(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[str], levels: Sequence[Any],
    runs: dict[int, Comparison], *, max_new_tokens: int, reference: str = "ours", speculation_config: Any = None,
    assistant_tokenizers: Sequence[Any] | None = None, tolerate_ties: float | None = None,
    folder: str | None = None, prompts_name: str | None = None,
) -> Certificate:
    """The certificate of comparisons that were made: batch size -> what `compare` found; the rest as `certify`."""
    config = SpeculationConfig.of(speculation_config)
    levels = as_words(levels)
    resolved = resolve(model, levels, assistant_tokenizers, config)
    chain = chain_of(model, tokenizer, config, resolved)
    entries = level_entries(levels, resolved, chain, config)
    described = [_run(size, found, tolerate_ties or 0.0, [entry["name"] for entry in entries])
                 for size, found in sorted(runs.items())]
    return Certificate({
        "schema": SCHEMA,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "result": result_of(described),
        "target": target_entry(model, folder, chain, config),
        "levels": entries,
        "kernels": kernels(model.device.type),
        "versions": versions(),
        "machine": machine(model.device),
        "prompts": prompts_entry(tokenizer, prompts, prompts_name),
        "settings": {"dtype": str(model.dtype).removeprefix("torch."), "batch_sizes": sorted(runs),
                     "max_new_tokens": max_new_tokens, "do_sample": False, "reference": reference,
                     "tolerate_ties": tolerate_ties, "speculation_config": dataclasses.asdict(config)},
        "runs": described,
    })


def require_batch_sizes(sizes: Sequence[int]) -> None:
    """Raise ValueError unless there is one, all are 1 or more, and none is there twice."""
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes)
    if not sizes or not whole or len(set(sizes)) < len(sizes):
        raise ValueError(f"batch sizes are {list(sizes)}; give different whole numbers of 1 or more")


def _run(size: int, found: Comparison, tolerated_gap: float, names: list[str]) -> dict[str, Any]:
    """One batch size: counts, speeds and every difference; token ids and logits as they were."""
    stats = found.speculation
    chain_tokens, alone_tokens = (sum(map(len, ids)) for ids in (
        (item.ids for item in found.items), (item.reference_ids or [] for item in found.items)))
    times = alone_tokens * found.chain_seconds
    failing = found.beyond_ties(tolerated_gap)
    return {
        "batch_size": size, "prompts": len(found.items), "identical": found.identical,
        "tokens_compared": found.tokens_compared, "mismatches": len(found.differences),
        "tolerated": len(found.differences) - len(failing),
        "chain_tokens": chain_tokens, "alone_tokens": alone_tokens,
        "chain_seconds": round(found.chain_seconds, 4), "alone_seconds": round(found.alone_seconds, 4),
        "speed_ratio": round(chain_tokens * found.alone_seconds / times, 4) if times else None,
        "tokens_per_pass": round(stats.tokens_per_target_pass, 4),
        "levels": [{"name": name, "drafted": level.drafted, "accepted": level.accepted, "tested": level.tested,
                    "acceptance": round(level.acceptance, 6)} for name, level in
                   zip(names, stats.levels, strict=True)],
        "differences": [_difference(item, tolerated_gap) for item in found.items if item.difference is not None],
    }


def _difference(item: Item, tolerated_gap: float) -> dict[str, Any]:
    found = item.difference
    return {"prompt": item.index, "position": found.position, "expected": found.expected, "got": found.got,
            "top2": _pairs(found.top2), "gap": _number(found.gap),
            "top2_float64": _pairs(found.top2_float64), "gap_float64": _number(found.gap_float64),
            "tolerated": found.gap_float64 < tolerated_gap}


def _pairs(best: list[tuple[int, float]]) -> list[dict[str, Any]]:
    return [{"token": token, "logit": _number(logit)} for token, logit in best]


def _number(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None
