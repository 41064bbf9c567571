"""How fast is a small real pair, code-21m with code-4m, beside what stock transformers makes of the target?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from eval.bench_gpu.decoding import decode_rate, rows_that_differ
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.models import real_model, without_end
from eval.bench_gpu.prompts import folders, texts, tokenizer_of
from eval.bench_gpu.stock import compiled_step, eager_step
from eval.rows import padded

NEW_TOKENS = 256
PROMPTS = 6  # of HumanEval
DRAFT_LENGTHS = (3, 4, 5, 7)
CAPTURED_OVER_STOCK, CAPTURED_OVER_COMPILED, CHAIN_OVER_GREEDY = 40.0, 4.0, 1.3


class WrongTokens(Exception):
    """A chain that writes other ids than its target alone."""


def pair(bench: Bench) -> Iterator[Finding]:
    """Tokens a second at batch 1, decode-only: stock, our captured greedy, [draft] at several lengths."""
    folder, draft_folder = folders(bench)
    prompts, new_tokens = next(iter(texts(bench).values()))[:PROMPTS], NEW_TOKENS
    lengths = DRAFT_LENGTHS
    if bench.quick:
        prompts, new_tokens, lengths = prompts[:1], 12, (3,)
    model, tokenizer = without_end(real_model(folder, bench.device)), tokenizer_of(folder)
    inputs = [padded([tokenizer(text).input_ids], bench.device) for text in prompts]
    stock = {"stock generate": 1 / eager_step(model, inputs[0]["input_ids"])}
    if not bench.quick:
        stock["stock static + compile"] = 1 / compiled_step(model, inputs[0]["input_ids"], 64)
    for name, rate in stock.items():
        yield Finding("pair", name, "tokens/s", rate, "")
    alone = [decode_rate(model, one, [], new_tokens) for one in inputs]
    greedy = statistics.median(rate.tokens_per_second for rate in alone)
    yield Finding("pair", "ours, greedy", "tokens/s", greedy, "")
    for name, target in zip(stock, (CAPTURED_OVER_STOCK, CAPTURED_OVER_COMPILED), strict=False):
        yield Finding("pair", "ours, greedy", f"x {name}", greedy / stock[name], "x",
                      None if bench.quick else target, at_least=True)
    draft = real_model(draft_folder, bench.device)
    yield from _chains(bench, (model, draft), inputs, alone, new_tokens, lengths)


def _chains(bench, models, inputs, alone, new_tokens, lengths) -> Iterator[Finding]:
    """[draft] at each length over our own greedy rate on the same prompts; WrongTokens for other ids."""
    model, draft = models
    ratios = {}
    for length in lengths:
        rates = [decode_rate(model, one, [draft], new_tokens, num_draft_tokens=length, confidence_threshold=0.0)
                 for one in inputs]
        wrong = sum(rows_that_differ(one.ids, base.ids) for one, base in zip(rates, alone, strict=True))
        if wrong:
            raise WrongTokens(f"[draft] of {length}: {wrong} of {len(inputs)} prompts differ from the target alone")
        ratios[length] = statistics.geometric_mean(
            one.tokens_per_second / base.tokens_per_second for one, base in zip(rates, alone, strict=True))
        yield Finding("pair", f"[draft], {length} tokens", "tokens/s",
                      statistics.median(one.tokens_per_second for one in rates), "",
                      more={"num_draft_tokens": length, **rates[0].counts})
    best = max(ratios, key=ratios.get)
    yield Finding("pair", f"[draft], {best} tokens", "x ours, greedy", ratios[best], "x",
                  None if bench.quick else CHAIN_OVER_GREEDY, at_least=True, more={"ratios": ratios})
