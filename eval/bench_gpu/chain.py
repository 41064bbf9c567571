"""How fast is a chain on the Llama-3-8B shape, where its drafts are accepted as those of a real pair were?

Weights are random, so every pass takes the time it would take; what a check keeps comes from traces of code-76m, put
into drafts of other lengths by `hf_mlspec.evaluation.reschedule`. Everything runs in captured rounds, the target alone
included. Prompts are as long as keeps the cache at about `KEPT` tokens. Rates are of whole batches until their last
row ends, without the pass that reads the prompts. Draft lengths are chosen on a few rows; the rate of the best is that
of all rows of the trace. The target alone takes a step for every token of any row, so a few rows are enough for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.models import random_model
from eval.plans.places import TRACES
from hf_mlspec.evaluation import Trace, read_trace, replay, replay_captured, reschedule

KEPT = 512
FEW_ROWS = 4  # at least; a whole batch of a larger size


@dataclass(frozen=True)
class Chain:
    """trace: how the file's name begins. levels: the first is a word, the second the tiny model. lengths: draft tokens
    of every level to try at batch 1."""

    name: str
    trace: str
    levels: int
    lengths: tuple[tuple[int, ...], ...]


CHAINS = (
    Chain('["mxfp4"]', "code-76m-mxfp4-long", 1, ((5,), (6,), (7,), (8,), (9,))),
    Chain('["mxfp4", tiny]', "code-76m-mxfp4-code-4m-long", 2, ((12, 5), (18, 5), (24, 5), (24, 7))),
)
LARGE_BATCHES = {8: ((3,), (4,), (6,)), 32: ((2,), (3,), (4,))}  # of ["mxfp4"]
RATE_TARGETS = {('["mxfp4"]', "HumanEval"): 470, ('["mxfp4"]', "GSM8K"): 440,
                ('["mxfp4", tiny]', "HumanEval"): 780, ('["mxfp4", tiny]', "GSM8K"): 700}  # fmt: skip
RATIO_TARGETS = {('["mxfp4"]', "HumanEval", 1): 2.0, ('["mxfp4"]', "GSM8K", 1): 2.0,
                 ('["mxfp4", tiny]', "HumanEval", 1): 3.7, ('["mxfp4", tiny]', "GSM8K", 1): 3.3,
                 ('["mxfp4"]', "HumanEval", 8): 1.8, ('["mxfp4"]', "GSM8K", 8): 1.8,
                 ('["mxfp4"]', "HumanEval", 32): 1.35, ('["mxfp4"]', "GSM8K", 32): 1.35}  # fmt: skip


class Bases:
    """Tokens a second of the target alone over the rows of a trace, measured once each."""

    def __init__(self, model):
        self.model, self._found = model, {}

    def rate(self, trace: Trace, batch: int, rows: Sequence[int]) -> float:
        key = trace.data, batch
        if key not in self._found:
            self._found[key] = rate(self.model, trace.alone(), [], batch, rows)
        return self._found[key]


def chain(bench: Bench) -> Iterator[Finding]:
    """Each chain on both data sets: batch 1, then ["mxfp4"] at 8 and 32; the best draft length carries the target."""
    shape, small = ("tiny", "tiny") if bench.quick else ("llama-3-8b", "tiny-2x512")
    model, tiny = random_model(shape, bench.device), random_model(small, bench.device, 1)
    bases = Bases(model)
    for data in ("humaneval", "gsm8k"):
        for one in CHAINS:
            levels = ["mxfp4", tiny][: one.levels]
            yield from _measured(bench, bases, one, data, levels, 1, one.lengths[:1] if bench.quick else one.lengths)
        for batch, lengths in {2: ((2,),)}.items() if bench.quick else LARGE_BATCHES.items():
            yield from _measured(bench, bases, CHAINS[0], data, ["mxfp4"], batch, lengths)


@dataclass(frozen=True)
class Tuned:
    """Tokens a second with the best of several draft lengths. more: what a line keeps beside it."""

    speed: float
    lengths: tuple[int, ...]
    more: dict[str, Any]


def recorded_trace(bench: Bench, one: Chain, data: str) -> tuple[Trace, int]:
    """The trace of a chain, and how long its prompts are to be taken."""
    recorded = read_trace(TRACES / f"{one.trace}-{data}.json")
    return recorded, 8 if bench.quick else KEPT - recorded.max_new_tokens // 2


def few_rows(bench: Bench, recorded: Trace, batch: int) -> list[int]:
    """The rows on which draft lengths are chosen."""
    return spread(len(recorded.rows), max(batch, 2 if bench.quick else FEW_ROWS))


def tuned(
    bench: Bench, model: PreTrainedModel, one: Chain, data: str, levels: list, batch: int,
    lengths: Sequence[Sequence[int]], most_rows: int | None = None,
) -> Tuned:
    """The chain with the draft length that is fastest on a few rows, over all rows of its trace, or `most_rows`."""
    recorded, prompt = recorded_trace(bench, one, data)
    few, found = few_rows(bench, recorded, batch), {}
    for asked in lengths:
        trace = reschedule(recorded, list(asked), prompt_tokens=prompt)
        found[tuple(asked)] = rate(model, trace, levels, batch, few)
        bench.say(f"{one.name} {list(asked)}, {recorded.data}, batch {batch}: {found[tuple(asked)]:.1f} tokens/s")
    best = max(found, key=found.get)
    rows = few if bench.quick else spread(len(recorded.rows), most_rows or len(recorded.rows))
    trace = reschedule(recorded, list(best), prompt_tokens=prompt)
    more = {"batch": batch, "lengths": list(best), "rows": len(rows), "few_rows": few, "prompt_tokens": prompt,
            "tokens_per_second_of_few": {str(list(asked)): value for asked, value in found.items()},
            "rescheduled": trace.origin["rescheduled"]}
    return Tuned(rate(model, trace, levels, batch, rows), best, more)


def _measured(
    bench: Bench, bases: Bases, one: Chain, data: str, levels: list, batch: int, lengths: Sequence[Sequence[int]]
) -> Iterator[Finding]:
    recorded, prompt = recorded_trace(bench, one, data)
    base = bases.rate(reschedule(recorded, list(lengths[0]), prompt_tokens=prompt), batch,
                      few_rows(bench, recorded, batch))
    best = tuned(bench, bases.model, one, data, levels, batch, lengths)
    what = f"{one.name}, {recorded.data}, batch {batch} (replayed)"
    rate_target = RATE_TARGETS.get((one.name, recorded.data)) if batch == 1 else None
    ratio_target = RATIO_TARGETS.get((one.name, recorded.data, batch))
    if bench.quick:
        rate_target = ratio_target = None
    yield Finding("chain", what, "alone, tokens/s", base, "")
    yield Finding("chain", what, "tokens/s", best.speed, "", rate_target, at_least=True, more=best.more)
    yield Finding("chain", what, "x alone", best.speed / base, "x", ratio_target, at_least=True)
    yield Finding("chain", what, "draft tokens", best.lengths[0], "", more={"lengths": list(best.lengths)})


def spread(count: int, wanted: int) -> list[int]:
    """So many numbers below `count`, evenly apart; all of them where there are no more."""
    return list(range(count)) if wanted >= count else [number * count // wanted for number in range(wanted)]


def rate(model, trace: Trace, levels: list, batch: int, rows: Sequence[int]) -> float:
    """Tokens a second, decode-only; rounds are captured before the clock runs. On a CPU, where nothing is captured,
    pass by pass."""
    way = replay_captured if model.device.type == "cuda" else replay
    found = way(model, trace, levels, batch_size=batch, rows=rows)
    if found.tokens_per_second is None:
        raise ValueError(f"{trace.data}: every row ends with the pass that reads its prompt; nothing is left to time")
    return found.tokens_per_second
