"""What does QSpec win on this GPU: int4 weights at 16 and at 8 activation bits, and both at once?

The argument beside the table: both widths read the same weights. A round of K drafted tokens and a check costs K
steps at 8 bits and one pass over K + 1 tokens a row at 16 bits, and settles at most K + 1 tokens. Where a step takes
the time of its bytes, all of these cost the same, and K + 1 passes for K + 1 tokens gain nothing; QSpec gains where a
16-bit step is bound by arithmetic, and no more than (K + 1) t16(batch) / (K t8(batch) + t16((K + 1) batch)). `bound`
is that number, from the measured products of a layer at these many rows, all drafts accepted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import cache

import torch
from transformers import PreTrainedModel

from eval.bench_gpu.chain import rate
from eval.bench_gpu.decoding import decode_rate, rows_that_differ
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.models import real_model, without_end
from eval.bench_gpu.prompts import folders, texts, tokenizer_of
from eval.gpu_timing import time_rotating
from eval.plans.places import TRACES
from eval.random_packed import random_int4_model
from eval.rows import padded
from eval.targets import SHAPES
from hf_mlspec import ops, precision_switch
from hf_mlspec.evaluation import read_trace, reschedule

GAMMA = 3  # tokens of a draft
BATCHES = (1, 4, 8, 16, 32, 64)
NEW_TOKENS = 64
PROMPT_TOKENS = 128  # of the random model


class WrongTokens(Exception):
    """QSpec that writes other ids than its 16-bit mode alone."""


def qspec(bench: Bench) -> Iterator[Finding]:
    """Tokens a second of w4a16, w4a8 and QSpec at each batch, on the real small model and on the 8B shape."""
    folder, _ = folders(bench)
    model, tokenizer = without_end(real_model(folder, bench.device, quantized=True)), tokenizer_of(folder)
    rows = [tokenizer(text).input_ids for text in next(iter(texts(bench).values()))]
    yield from _of_model(bench, folder.name, model, rows)
    del model
    bench.free()
    shape = "tiny" if bench.quick else "llama-3-8b"
    yield from _replayed(bench, shape, random_int4_model(shape, bench.device))
    if not bench.quick:
        yield from _bounds(bench, shape)


def _of_model(bench: Bench, name: str, model: PreTrainedModel, rows: list[list[int]]) -> Iterator[Finding]:
    """Real weights: what QSpec writes is compared with what its 16-bit mode writes."""
    new_tokens = 8 if bench.quick else NEW_TOKENS
    for batch in (1, 2) if bench.quick else BATCHES:
        inputs, what = padded(rows[:batch], bench.device), f"{name}, batch {batch}"
        wide = decode_rate(model, inputs, [], new_tokens, repeats=2)
        yield Finding("qspec", what, "w4a16 tokens/s", wide.tokens_per_second, "", more={"batch": batch})
        with precision_switch(model).at("w4a8"):
            narrow = decode_rate(model, inputs, [], new_tokens, repeats=2)
        yield Finding("qspec", what, "w4a8 tokens/s", narrow.tokens_per_second, "", more={"batch": batch})
        both = decode_rate(model, inputs, ["w4a8"], new_tokens, repeats=2, num_draft_tokens=GAMMA)
        if differing := rows_that_differ(both.ids, wide.ids):
            raise WrongTokens(f"QSpec, {what}: {differing} of {batch} rows differ from w4a16 alone")
        yield Finding("qspec", what, "QSpec tokens/s", both.tokens_per_second, "",
                      more={"batch": batch, "over_w4a16": both.tokens_per_second / wide.tokens_per_second,
                            **both.counts})


def _replayed(bench: Bench, shape: str, model: PreTrainedModel) -> Iterator[Finding]:
    """Random weights accept by chance: what QSpec keeps comes from a trace of code-76m, all modes over its rows."""
    recorded = read_trace(TRACES / "code-76m-int4-w4a8-humaneval.json")
    trace = reschedule(recorded, GAMMA, prompt_tokens=8 if bench.quick else PROMPT_TOKENS)
    for batch in (1, 2) if bench.quick else BATCHES:
        rows = [number % len(trace.rows) for number in range(batch)]
        what = f"{shape}, random, batch {batch}"
        wide = rate(model, trace.alone(), [], batch, rows)
        with precision_switch(model).at("w4a8"):
            narrow = rate(model, trace.alone(), [], batch, rows)
        both = rate(model, trace, ["w4a8"], batch, rows)
        more = {"batch": batch, "rescheduled": trace.origin["rescheduled"], "over_w4a16": both / wide}
        yield Finding("qspec", what, "w4a16 tokens/s", wide, "", more={"batch": batch})
        yield Finding("qspec", what, "w4a8 tokens/s", narrow, "", more={"batch": batch})
        yield Finding("qspec", what, "QSpec (replayed) tokens/s", both, "", more=more)


def _bounds(bench: Bench, shape: str) -> Iterator[Finding]:
    """The most that QSpec can gain by the products of one layer."""
    timed = cache(_layer_seconds)
    for batch in BATCHES:
        wide, narrow = timed(bench.device, shape, batch, 16), timed(bench.device, shape, batch, 8)
        check = timed(bench.device, shape, (GAMMA + 1) * batch, 16)
        bound = (GAMMA + 1) * wide / (GAMMA * narrow + check)
        yield Finding("qspec", f"{shape}, random, batch {batch}", "bound of QSpec over w4a16", bound, "x",
                      more={"layer_us": {"w4a16": wide * 1e6, "w4a8": narrow * 1e6, "check": check * 1e6}})
    _tiles.cache_clear()


def _layer_seconds(device: torch.device, shape: str, tokens: int, bits: int) -> float:
    """Seconds of the four products of a layer, weights drawn, going round through more than the L2 cache holds."""
    return sum(_product_seconds(device, *size, tokens, bits) for size in _sizes(shape))


def _sizes(shape: str) -> list[tuple[int, int]]:
    """(out, in) of q|k|v, o, gate|up and down."""
    sizes = SHAPES[shape]
    hidden, inner, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    rows = hidden + 2 * (hidden // heads) * sizes["num_key_value_heads"]
    return [(rows, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]


def _product_seconds(device: torch.device, out_features: int, in_features: int, tokens: int, bits: int) -> float:
    tiles = _tiles(device, out_features, in_features)
    x = torch.randn(tokens, in_features, device=device).to(torch.bfloat16)
    calls = [lambda one=one: ops.int4_linear(x, *one, out_features, group_size=128, activation_bits=bits)
             for one in tiles]
    return statistics.median(time_rotating(calls, device, 2 * len(tiles), repeats=5).median for _ in range(2))


@cache
def _tiles(device: torch.device, out_features: int, in_features: int) -> list[tuple]:
    codes = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, device=device)
    scale = torch.full((out_features, in_features // 128), 0.004, dtype=torch.float16, device=device)
    copies = max(2, -(-(256 << 20) // codes.nbytes))
    return [ops.prepack_int4(codes, scale) for _ in range(copies)]
