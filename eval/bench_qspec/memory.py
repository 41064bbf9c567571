"""How much memory does a contender of the QSpec benchmark need? A fresh process, its peak while it decodes a batch.

`python -m eval.bench_qspec.memory` is that process: it reads one request as JSON and prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import hf_mlspec
from eval.bench_qspec.contenders import Contender, Target
from eval.records import machine
from eval.records.fresh_process import in_fresh_process
from eval.rows import padded


def request(one: Contender, target: Target, saved: str, rows: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
    """What the fresh process is asked; `saved` holds the quantized model: quantizing is no part of the peak."""
    return {"contender": asdict(one), "folder": saved if one.quantized else target.folder, "rows": rows,
            "max_new_tokens": max_new_tokens, "threads": torch.get_num_threads()}


def ask(asked: dict[str, Any]) -> dict[str, Any]:
    """What a fresh process measures."""
    return in_fresh_process(asked, "eval.bench_qspec.memory")


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Bytes of weights and of keys and values, resident bytes before and at the peak, seconds of loading."""
    one = Contender(**{**asked["contender"], "levels": tuple(asked["contender"]["levels"])})
    target, begin = Target(asked["folder"], None), time.perf_counter()
    model = target.int4 if one.quantized else target.bfloat16
    load_seconds = time.perf_counter() - begin
    model.generation_config.eos_token_id = None  # no row ends early: all contenders hold the same tokens
    with machine.PeakMemory() as memory:
        take = target.decode(one, padded(asked["rows"]), asked["max_new_tokens"])
    kept = take.stats.target_cache_bytes + sum(level.cache_bytes for level in take.stats.levels)
    weights = hf_mlspec.resident_bytes(model) + sum(map(level_bytes, one.levels))
    return {"kind": "memory", "contender": one.name, "gamma": one.gamma, "batch": len(asked["rows"]),
            "weight_bytes": weights, "kv_bytes": kept, "rss_before_bytes": memory.before,
            "rss_peak_bytes": memory.peak, "load_seconds": load_seconds}


def level_bytes(word: str) -> int:
    """Bytes that a level adds to the target's: those of a model in a folder, or of its cast; of other words none."""
    folder = word.removesuffix("@mxfp4")
    if not Path(folder).is_dir():
        return 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if folder == word:
        return hf_mlspec.resident_bytes(model)
    return hf_mlspec.resident_bytes(hf_mlspec.direct_cast(model, "mxfp4"))


def main() -> int:
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    print(json.dumps(measure(asked)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
