"""At what share of the memory's bandwidth does attention of one token read keys and values on the CPU?"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from eval.records import machine
from eval.targets import SHAPES
from hf_mlspec import ops
from hf_mlspec.formats import cache_format


def caches(shape: str, slots: int, word: str | None, least: int) -> torch.Tensor:
    """Random keys and values `[layers, 2, 1, kv_heads, slots, width]` of as many layers as have `least` bytes."""
    sizes = SHAPES[shape]
    dim, kept = sizes["hidden_size"] // sizes["num_attention_heads"], cache_format(word, "bench_context")
    width, dtype = (kept.width(dim), kept.dtype) if kept else (dim, torch.bfloat16)
    lane = 2 * sizes["num_key_value_heads"] * slots * width * dtype.itemsize
    layers = max(sizes["num_hidden_layers"], -(-least // lane))
    found = torch.empty(layers, 2, 1, sizes["num_key_value_heads"], slots, width, dtype=dtype)
    if kept is None:
        return found.normal_()
    found.view(torch.uint8).random_(0, 64)  # codes, and scales and ends that are finite
    return found


def bench(shape: str, slots: int, repeats: int, word: str | None, least: int) -> dict[str, Any]:
    """Medians of `repeats` turns of all layers, one after the other, beside a probe of `least` bytes."""
    kv, sizes = caches(shape, slots, word, least), SHAPES[shape]
    heads = sizes["num_attention_heads"]
    dim = sizes["hidden_size"] // heads
    q, probe = torch.randn(1, 1, heads, dim), machine.ReadProbe(max(1, least >> 20))
    found: dict[str, list[float]] = {"probe": [], "attention": []}
    for turn in range(repeats + 1):
        begin = time.perf_counter()
        probe()
        middle = time.perf_counter()
        for keys, values in kv:
            ops.ragged_attention(q, keys, values, [slots - 1], dim**-0.5)
        if turn:
            found["probe"].append(middle - begin)
            found["attention"].append(time.perf_counter() - middle)
    reads, seconds = (statistics.median(found[name]) for name in ("probe", "attention"))
    speed = probe.nbytes / reads
    return {"shape": shape, "slots": slots, "cache": word or "bfloat16", "layers": len(kv), "bytes": kv.nbytes,
            "seconds": seconds, "probe_bytes_per_second": speed, "bandwidth_share": kv.nbytes / seconds / speed}


def line(found: dict[str, Any]) -> str:
    return (f"{found['shape']}, {found['cache']} cache, {found['slots']} slots, {found['layers']} layers: "
            f"{1e3 * found['seconds']:.2f} ms, probe {found['probe_bytes_per_second'] / 1e9:.1f} GB/s, "
            f"share {found['bandwidth_share']:.2f}")
