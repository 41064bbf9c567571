"""Does a nested target write the ids of the plain BF16 model on the GPU, alone and with its own draft, at every batch?

The reference is another model: the plain target, which was never nested, alone and captured at batch 8.
"""

from __future__ import annotations

from collections.abc import Iterator

import hf_mlspec
from eval.bench_gpu.exact import Case, Differences, of_target
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.models import real_model
from eval.bench_gpu.prompts import folders, texts, tokenizer_of

BATCHES = (8, 1)  # at batch 1 as many prompts as a few seconds allow


def nested_exact(bench: Bench) -> Iterator[Finding]:
    """The nested target alone, ["nested"] and ["nested", draft]; Differences at the end where there were any."""
    folder, draft_folder = folders(bench)
    prompts = [text for found in texts(bench).values() for text in found]
    tokenizer, wrong, reference = tokenizer_of(folder), [], {}
    plain, draft = real_model(folder, bench.device), real_model(draft_folder, bench.device)
    yield from of_target(bench, (plain, tokenizer), prompts, [Case("plain BF16 alone", [], {})], wrong, reference,
                         BATCHES[:1], "nested_exact")
    del plain
    bench.free()
    own = hf_mlspec.nest(real_model(folder, bench.device))
    cases = [Case("nested alone", [], {}), Case('["nested"]', ["nested"], {"num_draft_tokens": 8}),
             Case('["nested", draft]', ["nested", draft], {"num_draft_tokens": [8, 3]})]
    yield from of_target(bench, (own, tokenizer), prompts, cases, wrong, reference, BATCHES, "nested_exact")
    if wrong:
        raise Differences("; ".join(wrong))
