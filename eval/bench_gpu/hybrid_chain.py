"""What does a chain gain on all layers of a hybrid shape, and what does it cost to take back the tokens of a check?

Acceptance is replayed as in chain.py, all passes are those of captured rounds. A check leaves the states behind the
tokens before it, and the next one runs its tokens again: its time over that of a check behind which states are moved,
after which nothing is run again. A card without room for all layers and their cast gets half of them, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from eval.bench_gpu.chain import CHAINS, rate, recorded_trace, spread
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.models import random_model
from eval.bench_gpu.step import KEPT, Case, Step, WrongStep, cache_bytes, delta_states, read_bytes
from eval.targets import HYBRIDS
from eval.targets import random_model as model_of
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.evaluation import reschedule
from hf_mlspec.ops.delta import AT_END, AT_START

SHAPE, TINY, ROWS = "qwen3.5-27b", "tiny-2x512", 2
ROOM = 100e9  # bytes of a card for 27B parameters in BF16, their cast, and what is between
LENGTHS = {1: ((7,),), 2: ((12, 5), (18, 5))}  # by the number of levels
STEPS = (Case("batch 1, 1 token", 1, 1, None), Case("batch 8, 1 token", 8, 1, None))
CHECKS = (Case("batch 1, 9 tokens", 1, 9, None), Case("batch 8, 9 tokens", 8, 9, None))
OVER_BYTES, GAIN, TAKEN_BACK = 1.35, 2.8, 0.03  # what is to be reached


def hybrid_chain(bench: Bench) -> Iterator[Finding]:
    """Steps and checks of the target, then chains over it."""
    shape, tiny = ("hybrid-tiny", "tiny") if bench.quick else (SHAPE, TINY)
    layers = HYBRIDS[shape]["num_hidden_layers"]
    if not bench.quick and torch.cuda.get_device_properties(bench.device).total_memory < ROOM:
        layers //= 2
    model = model_of(shape, str(bench.device), num_hidden_layers=layers)
    name = f"{shape}, {layers} layers"
    bench.say(f"hybrid_chain: {name} made")
    decoder, kept = decoder_of(model, "cuda"), 24 if bench.quick else KEPT
    if decoder is None:
        raise WrongStep("there is no decoder for this model here; the warning above says why")
    for case in STEPS[:1] if bench.quick else STEPS:
        found = Step(decoder, case, kept).timed().median
        states, _ = delta_states(decoder, case.batch)
        nbytes = read_bytes(model) + cache_bytes(decoder, case, kept) + 2 * states.states.nbytes
        over = found * bench.probe / nbytes
        yield Finding("hybrid_chain", f"{name}, {case.name}", "a step", found * 1e3, "ms", more={"bytes": nbytes})
        yield Finding("hybrid_chain", f"{name}, {case.name}", "over its bytes", over, "x",
                      None if bench.quick else OVER_BYTES)
    for case in CHECKS[:1] if bench.quick else CHECKS:
        seconds = {how: Step(decoder, case, kept, how).timed().median for how in (AT_END, AT_START)}
        yield Finding("hybrid_chain", f"{name}, {case.name}", "a step", seconds[AT_START] * 1e3, "ms")
        yield Finding("hybrid_chain", f"{name}, {case.name}", "of which tokens run again",
                      1 - seconds[AT_END] / seconds[AT_START], "", None if bench.quick else TAKEN_BACK)
    bench.free()
    yield from _chains(bench, model, tiny, name)


def _chains(bench: Bench, model: PreTrainedModel, tiny: str, name: str) -> Iterator[Finding]:
    draft = random_model(tiny, bench.device, 1)
    for data in ("humaneval", "gsm8k"):
        base = None
        for one in reversed(CHAINS):
            recorded, prompt = recorded_trace(bench, one, data)
            rows, found = spread(len(recorded.rows), 2 if bench.quick else ROWS), {}
            for lengths in LENGTHS[one.levels][: 1 if bench.quick else None]:
                trace = reschedule(recorded, list(lengths), prompt_tokens=prompt)
                base = base or rate(model, trace.alone(), [], 1, rows)
                found[lengths] = rate(model, trace, ["mxfp4", draft][: one.levels], 1, rows)
                bench.say(f"{one.name} {list(lengths)}, {data}: {found[lengths]:.1f} tokens/s, alone {base:.1f}")
            best = max(found, key=found.get)
            what = f"{name}, {one.name}, {recorded.data} (replayed)"
            yield Finding("hybrid_chain", what, "alone, tokens/s", base, "")
            yield Finding("hybrid_chain", what, "tokens/s", found[best], "", more={"lengths": list(best)})
            yield Finding("hybrid_chain", what, "x alone", found[best] / base, "x", at_least=True,
                          target=GAIN if one.levels == 2 and not bench.quick else None)
            yield Finding("hybrid_chain", what, "draft tokens", best[0], "", more={"lengths": list(best)})

