"""Is a nested target on the GPU as fast as a plain one with a separate MXFP4 draft? Steps, chains, a real pair.

The draft inside the target reads 4.25 bits a weight as the MXFP4 cast does, and a check reads 16.25 where the plain
target reads 16. Chains on the 8B shape are replayed from the traces of the MXFP4 chains on both sides: what a check
keeps is then the same, and their speeds differ by what passes cost. Both sides choose their own draft lengths. The
nested draft of the real pair accepts what it accepts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

import hf_mlspec
from eval.bench_gpu.chain import Chain, recorded_trace, tuned
from eval.bench_gpu.decoding import decode_rate, rows_that_differ
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.models import random_model, real_model, without_end
from eval.bench_gpu.prompts import folders, texts, tokenizer_of
from eval.bench_gpu.step import KEPT, Case, Step, WrongStep, cache_bytes, read_bytes
from eval.rows import padded
from hf_mlspec.engines.choose import decoder_of

CHAINS = (
    Chain("word", "code-76m-mxfp4-long", 1, ((6,), (7,), (8,))),
    Chain("word, tiny", "code-76m-mxfp4-code-4m-long", 2, ((18, 5), (24, 5))),
)
ROWS = 16  # of each trace; draft lengths are chosen on fewer
OVER_CAST = 0.93  # of the speed of the same chain with a separate MXFP4 draft
STEPS = (Case("batch 1, 1 token", 1, 1, None), Case("batch 1, 9 tokens", 1, 9, None), Case("batch 8", 8, 1, None))
DRAFT_BITS, EXACT_BITS = 4 + 8 / 32, 16 + 8 / 32  # a weight, its share of the exponent byte included
NEW_TOKENS, PROMPTS = 256, 6  # of the real pair, HumanEval
PAIR_LENGTHS = {1: (6, 8), 2: ([8, 3], [12, 4])}


class WrongTokens(Exception):
    """A nested target that writes other ids than the plain one."""


def nested(bench: Bench) -> Iterator[Finding]:
    """Steps and replayed chains of the 8B shape, then code-21m with code-4m."""
    shape, small = ("tiny", "tiny") if bench.quick else ("llama-3-8b", "tiny-2x512")
    plain = random_model(shape, bench.device)
    own = hf_mlspec.nest(random_model(shape, bench.device))
    bench.say(f"nested: {shape} made twice, one of them nested")
    yield from _steps(bench, shape, plain, own)
    bench.free()
    yield from _chains(bench, {"mxfp4": plain, "nested": own}, random_model(small, bench.device, 1))
    del plain, own
    bench.free()
    yield from _pair(bench)


def _steps(bench: Bench, shape: str, plain: PreTrainedModel, own: PreTrainedModel) -> Iterator[Finding]:
    """Milliseconds: the plain target, its MXFP4 cast, the nested target exactly, and its draft."""
    wide = read_bytes(plain)
    weights = sum(module.weight.numel() for module in plain.modules() if isinstance(module, nn.Linear))
    yield from _timed(bench, shape, "BF16", plain, wide)
    yield from _timed(bench, shape, "nested, exact", own, wide + weights * (EXACT_BITS - 16) / 8)
    cast = hf_mlspec.direct_cast(plain, "mxfp4")
    narrow = wide - weights * (16 - DRAFT_BITS) / 8
    yield from _timed(bench, shape, "MXFP4 cast", cast, narrow)
    with hf_mlspec.precision_switch(own).at("nested4"):
        yield from _timed(bench, shape, "nested, draft", own, narrow)


def _timed(bench: Bench, shape: str, name: str, model: PreTrainedModel, weights: float) -> Iterator[Finding]:
    decoder = decoder_of(model, "cuda")
    if decoder is None:
        raise WrongStep(f"{name}: there is no decoder for this model here; the warning above says why")
    kept = 24 if bench.quick else KEPT
    for case in STEPS:
        found = Step(decoder, case, kept).timed()
        nbytes = weights + cache_bytes(decoder, case, kept)
        yield Finding("nested", f"{shape}, {case.name}", name, found.median * 1e3, "ms",
                      share=nbytes / found.median / bench.probe,
                      more={"batch": case.batch, "width": case.width, "kept": kept, "bytes": nbytes,
                            "least_ms": found.least * 1e3, "extra_bytes": decoder.extra_bytes})


def _chains(bench: Bench, sides: dict[str, PreTrainedModel], tiny: PreTrainedModel) -> Iterator[Finding]:
    """Tokens a second of both sides, each chain on both data sets, and the ratio."""
    for data in ("humaneval", "gsm8k"):
        for one in CHAINS:
            title, speeds = recorded_trace(bench, one, data)[0].data, {}
            what = f"[{one.name}], {title}, batch 1 (replayed)"
            for word, model in sides.items():
                named = Chain(one.name.replace("word", word), one.trace, one.levels, one.lengths)
                lengths = one.lengths[:1] if bench.quick else one.lengths
                found = tuned(bench, model, named, data, [word, tiny][: one.levels], 1, lengths, ROWS)
                speeds[word] = found.speed
                yield Finding("nested", what, f"{word}, tokens/s", found.speed, "", more=found.more)
            yield Finding("nested", what, "nested x mxfp4", speeds["nested"] / speeds["mxfp4"], "x",
                          None if bench.quick else OVER_CAST, at_least=True)


def _pair(bench: Bench) -> Iterator[Finding]:
    """A real target, plain with its cast and nested with its own draft, with the tiny model below and without;
    WrongTokens where one of them does not write the plain target's ids."""
    folder, draft_folder = folders(bench)
    rows, new_tokens = next(iter(texts(bench).values()))[:PROMPTS], NEW_TOKENS
    if bench.quick:
        rows, new_tokens = rows[:1], 12
    tokenizer, draft = tokenizer_of(folder), real_model(draft_folder, bench.device)
    inputs = [padded([tokenizer(text).input_ids], bench.device) for text in rows]
    sides = {"mxfp4": without_end(real_model(folder, bench.device)),
             "nested": hf_mlspec.nest(without_end(real_model(folder, bench.device)))}
    alone = [decode_rate(sides["mxfp4"], one, [], new_tokens).ids for one in inputs]
    for levels, lengths in PAIR_LENGTHS.items():
        what = f"{folder.name}, [{', '.join(['word', draft_folder.name][:levels])}], batch 1"
        speeds = {}
        for length in lengths[:1] if bench.quick else lengths:
            for word, found in _rates(sides, inputs, alone, [draft][: levels - 1], length, new_tokens).items():
                speeds.setdefault(word, {})[str(length)] = found
        best = {word: max(found.values(), key=lambda one: one["tokens_per_second"]) for word, found in speeds.items()}
        for word, found in best.items():
            yield Finding("nested", what, f"{word}, tokens/s", found["tokens_per_second"], "",
                          more={**found, "by_length": {k: v["tokens_per_second"] for k, v in speeds[word].items()}})
        ratio = best["nested"]["tokens_per_second"] / best["mxfp4"]["tokens_per_second"]
        yield Finding("nested", what, "nested x mxfp4", ratio, "x", None if bench.quick else OVER_CAST, at_least=True)


def _rates(
    sides: dict[str, PreTrainedModel], inputs: list, alone: list, below: list, length: Any, new_tokens: int
) -> dict[str, dict[str, Any]]:
    """By word: geometric mean of the rates over the prompts, each prompt by both sides in turn."""
    rates: dict[str, list] = {word: [] for word in sides}
    for one, expected in zip(inputs, alone, strict=True):
        for word, model in sides.items():
            rates[word].append(decode_rate(model, one, [word, *below], new_tokens, num_draft_tokens=length,
                                           confidence_threshold=0.0))
            if rows_that_differ(rates[word][-1].ids, expected):
                raise WrongTokens(f"[{word}] of {length}: the ids are not those of the plain target alone")
    return {word: {"tokens_per_second": statistics.geometric_mean(one.tokens_per_second for one in found),
                   "num_draft_tokens": length, **found[0].counts} for word, found in rates.items()}
