"""How long are steps and prompts of a model whose layers mostly keep a state, and what do its chains gain?

A part of the layers of the Qwen3.5-27B shape, so that it is there soon; from two numbers of layers those of all are
computed. Then code-hybrid, a real model: its chains write what it writes alone, and how fast.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

import hf_mlspec
from eval.bench_gpu.decoding import decode_rate, rows_that_differ
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.models import real_model, without_end
from eval.bench_gpu.pair import WrongTokens
from eval.bench_gpu.prompts import texts, tokenizer_of
from eval.bench_gpu.step import Case, Step, WrongStep, cache_bytes, delta_states, read_bytes
from eval.bench_gpu.stock import eager_step
from eval.gpu_timing import time_each
from eval.rows import padded
from eval.targets import HYBRIDS, random_model
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.engine import prefill
from hf_mlspec.engines.rows import new_kv

SHAPE, LAYERS, FEWER, KEPT, PROMPT = "qwen3.5-27b", 16, 8, 512, 4096
CASES = (Case("batch 1, 1 token", 1, 1, None), Case("batch 1, 9 tokens", 1, 9, None), Case("batch 8", 8, 1, None),
         Case("batch 8, 9 tokens", 8, 9, None), Case("batch 32", 32, 1, None))  # fmt: skip
TARGET, DRAFT, NEW_TOKENS, PROMPTS = "code-hybrid", "code-4m", 128, 4
OVER_BYTES = 1.35  # what a step may take over the time of its bytes


def hybrid(bench: Bench) -> Iterator[Finding]:
    """The shape, then the model."""
    shape, layers, fewer = ("hybrid-tiny", 4, 4) if bench.quick else (SHAPE, LAYERS, FEWER)
    model = random_model(shape, str(bench.device), num_hidden_layers=layers)
    bench.say(f"hybrid: {layers} layers of {shape} made")
    stock = [(batch, eager_step(model, _prompt(model, batch, bench))) for batch in (1, 8)]
    for batch, seconds in stock:
        yield Finding("hybrid", f"{shape}, {layers} layers, batch {batch}", "stock generate", seconds * 1e3, "ms")
    bench.free()
    yield from _steps(bench, model, (shape, layers, fewer), "BF16")
    yield from _read(bench, model, f"{shape}, {layers} layers")
    yield from _steps(bench, hf_mlspec.direct_cast(model, "mxfp4"), (shape, layers, 0), "MXFP4 cast")
    del model
    bench.free()
    if not bench.quick:
        yield from _chains(bench)


def _prompt(model: PreTrainedModel, batch: int, bench: Bench) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (batch, 24 if bench.quick else 128), device=bench.device)


def _decoder(model: PreTrainedModel) -> CudaDecoder:
    decoder = decoder_of(model, "cuda")
    if decoder is None:
        raise WrongStep("there is no decoder for this model here; the warning above says why")
    return decoder


def _steps(bench: Bench, model: PreTrainedModel, sizes: tuple[str, int, int], name: str) -> Iterator[Finding]:
    """Captured steps; of BF16 also what all layers take."""
    shape, layers, fewer = sizes
    kept, decoder, total = 24 if bench.quick else KEPT, _decoder(model), HYBRIDS[shape]["num_hidden_layers"]
    short = _decoder(hf_mlspec.early_exit(model, fewer)) if 0 < fewer < layers else None
    weights = read_bytes(model) if name == "BF16" else hf_mlspec.resident_bytes(model)
    for case in CASES[:1] if bench.quick else CASES if name == "BF16" else CASES[:3]:
        found = Step(decoder, case, kept).timed().median
        states, _ = delta_states(decoder, case.batch)
        nbytes = weights + cache_bytes(decoder, case, kept) + 2 * states.states.nbytes
        share, more = nbytes / found / bench.probe, {"batch": case.batch, "kept": kept, "bytes": nbytes}
        del states
        what = f"{shape}, {layers} layers, {case.name}"
        yield Finding("hybrid", what, name, found * 1e3, "ms", share=share, more=more)
        if name == "BF16":
            yield Finding("hybrid", what, "over its bytes", 1 / share, "x",
                          None if bench.quick or case.width > 1 or case.batch > 8 else OVER_BYTES)
        if short is not None:
            less = Step(short, case, kept).timed().median
            whole = found + (total - layers) * (found - less) / (layers - fewer)
            yield Finding("hybrid", f"{shape}, {total} layers computed, {case.name}", name, whole * 1e3, "ms")
        bench.free()


def _read(bench: Bench, model: PreTrainedModel, shape: str) -> Iterator[Finding]:
    """A prompt of one row."""
    length, decoder = 64 if bench.quick else PROMPT, _decoder(model)
    row = torch.randint(model.config.vocab_size, (length,)).tolist()
    ids, kv = torch.tensor([row], device=bench.device), new_kv(decoder, 1, length)
    states, _ = delta_states(decoder, 1)
    decoder.reserve_positions(length)
    ways: dict[str, Callable[[], object]] = {
        "BF16": lambda: prefill(decoder, kv, [row], [0], states=states),
        "stock": lambda: model(ids, logits_to_keep=1, use_cache=True),
    }
    for name, way in ways.items():
        seconds = time_each(way, bench.device, 3).median
        yield Finding("hybrid", f"{shape}, prompt of {length}", name, seconds * 1e3, "ms")
    bench.free()


def _chains(bench: Bench) -> Iterator[Finding]:
    """Tokens a second of code-hybrid at batch 1, decode-only; WrongTokens where a chain writes others."""
    folder = bench.models / TARGET
    model, tokenizer = without_end(real_model(folder, bench.device)), tokenizer_of(folder)
    draft = real_model(bench.models / DRAFT, bench.device)
    inputs = [padded([tokenizer(text).input_ids], bench.device) for text in texts(bench)["HumanEval"][:PROMPTS]]
    yield Finding("hybrid", TARGET, "stock generate, tokens/s", 1 / eager_step(model, inputs[0]["input_ids"]), "")
    alone = [decode_rate(model, one, [], NEW_TOKENS) for one in inputs]
    greedy = statistics.median(rate.tokens_per_second for rate in alone)
    yield Finding("hybrid", TARGET, "ours, greedy, tokens/s", greedy, "")
    for levels in (["mxfp4"], [draft], ["mxfp4", draft]):
        words = [level if isinstance(level, str) else DRAFT for level in levels]
        how = {"num_draft_tokens": 4, "confidence_threshold": 0.0}
        rates = [decode_rate(model, one, levels, NEW_TOKENS, **how) for one in inputs]
        wrong = sum(rows_that_differ(one.ids, base.ids) for one, base in zip(rates, alone, strict=True))
        if wrong:
            raise WrongTokens(f"{words}: {wrong} of {len(inputs)} prompts differ from the target alone")
        median = statistics.median(one.tokens_per_second for one in rates)
        yield Finding("hybrid", TARGET, f"{words}, tokens/s", median, "", more=rates[0].counts)
