"""What does a target in 8 bit-planes win on the GPU by drafting with its first four? Steps and replayed chains.

Weights of the 8B shape are random codes in groups of 128; the head stays BF16, as MLSpecConfig leaves it. What a check
keeps comes from traces of code-76m as such a target. Rates are over the target's own captured greedy decoding and over
that of the BF16 model of the same shape, in the same process and on the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel

import hf_mlspec
from eval.bench_gpu.chain import Chain, few_rows, rate, recorded_trace, tuned
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.models import random_model
from eval.bench_gpu.step import KEPT, Case, Step, WrongStep, cache_bytes, read_bytes
from eval.random_packed import random_planes_model
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.evaluation import reschedule

PLANES, DRAFT_PLANES = 8, 4
CHAINS = (
    Chain('["planes4"]', "code-76m-planes8-planes4-long", 1, ((2,), (3,), (4,), (5,))),
    Chain('["planes4", tiny]', "code-76m-planes8-planes4-code-4m-long", 2, ((8, 4), (12, 4), (12, 5), (18, 5))),
)
ROWS = 16  # of each trace; draft lengths are chosen on fewer
OVER_OWN = {'["planes4"]': 1.28, '["planes4", tiny]': 2.0}  # the target's own greedy decoding
OVER_BF16 = {'["planes4", tiny]': 2.3}
STEP = Case("batch 1, 1 token", 1, 1, None)


def planes(bench: Bench) -> Iterator[Finding]:
    """BF16 greedy, then the target in planes: its steps at 8, 4 and 2 planes, its greedy rate, its chains."""
    shape, small = ("tiny", "tiny") if bench.quick else ("llama-3-8b", "tiny-2x512")
    plain = random_model(shape, bench.device)
    yield from _steps(bench, shape, "BF16", plain)
    wide = _greedy(bench, plain)
    del plain
    bench.free()
    model = random_planes_model(shape, bench.device, PLANES)
    bench.say(f"planes: {shape} in {PLANES} planes made")
    for count in (PLANES, DRAFT_PLANES, 2):
        with hf_mlspec.precision_switch(model).at(f"planes{count}"):
            yield from _steps(bench, shape, f"{count} planes", model, count)
    own, tiny = _greedy(bench, model), random_model(small, bench.device, 1)
    for data in ("humaneval", "gsm8k"):
        for one in CHAINS:
            lengths = one.lengths[:1] if bench.quick else one.lengths
            title = recorded_trace(bench, one, data)[0].data
            found = tuned(bench, model, one, data, ["planes4", tiny][: one.levels], 1, lengths, ROWS)
            what = f"{one.name}, {title}, batch 1 (replayed)"
            yield Finding("planes", what, "tokens/s", found.speed, "", more=found.more)
            for name, alone, targets in (("own greedy", own[data], OVER_OWN), ("BF16 greedy", wide[data], OVER_BF16)):
                yield Finding("planes", what, f"{name}, tokens/s", alone, "")
                yield Finding("planes", what, f"x {name}", found.speed / alone, "x",
                              None if bench.quick else targets.get(one.name), at_least=True)


def _greedy(bench: Bench, model: PreTrainedModel) -> dict[str, float]:
    """Tokens a second of the model alone, by data set; it takes a step a token on any row, so a few rows serve."""
    found = {}
    for data in ("humaneval", "gsm8k"):
        recorded, prompt = recorded_trace(bench, CHAINS[0], data)
        trace = reschedule(recorded, list(CHAINS[0].lengths[0]), prompt_tokens=prompt).alone()
        found[data] = rate(model, trace, [], 1, few_rows(bench, recorded, 1))
    return found


def _steps(bench: Bench, shape: str, name: str, model: PreTrainedModel, count: int = PLANES) -> Iterator[Finding]:
    """Milliseconds, with the share of the bytes that so many planes take."""
    decoder = decoder_of(model, "cuda")
    if decoder is None:
        raise WrongStep(f"{name}: there is no decoder for this model here; the warning above says why")
    kept = 24 if bench.quick else KEPT
    nbytes = read_bytes(model) - plane_bytes(model) * (PLANES - count) // PLANES + cache_bytes(decoder, STEP, kept)
    found = Step(decoder, STEP, kept).timed()
    yield Finding("planes", f"{shape}, {STEP.name}", name, found.median * 1e3, "ms",
                  share=nbytes / found.median / bench.probe,
                  more={"kept": kept, "bytes": nbytes, "least_ms": found.least * 1e3,
                        "extra_bytes": decoder.extra_bytes})


def plane_bytes(model: PreTrainedModel) -> int:
    """Bytes of all planes, without scales."""
    layers = [module for module in model.modules() if getattr(module, "format", None) == "planes"]
    return sum(layer.out_features * layer.in_features * PLANES // 8 for layer in layers)
