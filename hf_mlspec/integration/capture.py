"""Is a call of generate decoded in captured rounds? If not, one warning gives the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers.generation import EtaLogitsWarper, LogitsProcessorList

from ..engines.memory import available
from ..nn.shards import is_shared
from ..nn.state import say_once
from ..speculation.draft import Rows
from ..speculation.loop import Loop
from ..speculation.rounds.caches import adopt
from ..speculation.rounds.chain import CapturedChain, borrowed, bucket_of
from ..speculation.rounds.plan import NotCaptured, round_levels
from ..speculation.rounds.program import Level, RoundLevel
from ..speculation.rounds.rounds import NoRoom
from ..speculation.stats import SpeculationStats
from .compare import accumulate
from .costs.replayed import POSITIONS
from .levels.wiring import Chain
from .processing import WARPERS
from .request import max_positions

_SHARE_OF_STREAM = 8  # of the memory that is free, one part of so many is for slots that a stream's rows may need
_FIRST_NEW_TOKENS = 4096  # a row has slots for at first; more are added, and graphs made anew, where it goes on


@contextmanager
def captured(
    chain: Chain, processors: LogitsProcessorList, rows: Rows, new_tokens: int, stream_of: int = 0,
    sampled: bool = False, divided: bool = False,
) -> Iterator[CapturedChain | None]:
    """The captured chain of a call, its caches in the runners of `chain`; None where the call runs step by step.

    The target's engine must be one that can be captured. rows: the prompts. new_tokens: the most a row may gain.
    stream_of: rows that a stream may have at a time, which has a chain of its own; 0: a call of generate. sampled:
    rows that join a stream may sample; a call says so itself. divided: each with a temperature of its own.
    """
    lengths = list(map(len, rows))
    levels = _levels(chain, processors, lengths, new_tokens)
    if levels is None:
        yield None
        return
    alone = chain.drafter is not None and len(levels) == 1
    planned = chain.controller is not None and not alone
    runners = [chain.target.runner, *(runner for runner in chain.runners if runner is not None and not alone)]
    sampler = chain.target.sampler
    with borrowed(
        [runner.model for runner in runners],
        levels,
        rows=len(rows),
        slots=_first_slots(runners, max(lengths) + min(new_tokens, _FIRST_NEW_TOKENS), stream_of),
        sampled=sampled or sampler.do_sample,
        warp=sampler.warp,
        warp_key=_in_words(processors),
        divided=divided,
        stream_of=stream_of,
        planned=planned,
        seen=chain.seen if planned else 0,
    ) as found:
        if found is not None:
            if alone:
                chain.leave_out_levels()
            adopt(found, chain.target, chain.drafter, len(rows))
        yield found


def _first_slots(runners: list[Any], needed: int, stream_of: int) -> int:
    """Slots of every row. Of a stream, whose longest row may come later, as many as a row can have, or as a part of
    the memory that is free has room for: making room later keeps running rows waiting, as graphs are made anew.
    Processes that share a target make room at the same time: the memory that each has free does not count."""
    own = [runner for runner in runners if runner.follow is None]
    each = sum(runner.bytes_per_token for runner in own) * bucket_of(max(stream_of, 1))
    most = [positions for runner in own if (positions := max_positions(runner.model))]
    if not stream_of or is_shared(runners[0].model) or not each or not most:
        return needed
    if (free := available(runners[0].device)) is None:
        return needed
    return max(needed, min(*most, free // _SHARE_OF_STREAM // each))


def go_on(chain: Chain, reason: NoRoom, device: torch.device, **how: Any) -> SpeculationStats:
    """Continue step by step after captured rounds ran out of memory, which is free again; the counts of both.

    how: arguments of `Loop`: how rows end, and what receives their tokens.
    """
    left = reason.left
    model = chain.target.runner.model
    say_once(model, f"{type(model).__name__} continues step by step: {reason}")
    chain.target.start(len(left.rows), device)
    rounds = chain.host_rounds(device)
    loop, total = Loop(rounds, **how), chain.finish(left.stats)
    loop.start(left.rows, left.budgets)
    loop.numbers = left.numbers
    for sampler in chain.samplers:  # the rows' noise goes on
        sampler.row_ids = list(left.numbers)
    while going := loop.round():
        loop.select(going)
    prefill = total.prefill_seconds, total.prefill_target_seconds, total.prefill_draft_seconds, total.prefill_tokens
    accumulate(total, chain.finish(loop.stats))
    # What is read again, because the rounds' caches are gone, is not the call's prefill.
    names = "prefill_seconds", "prefill_target_seconds", "prefill_draft_seconds", "prefill_tokens"
    return replace(total, **dict(zip(names, prefill, strict=True)))


def _levels(
    chain: Chain, processors: LogitsProcessorList, lengths: list[int], new_tokens: int
) -> list[Level] | None:
    """lengths: of the rows. Levels that cannot be captured may be left out; see speculation/shelf.py."""
    target, shelving = chain.target, chain.shelving
    how = {"num_draft_tokens": chain.num_draft_tokens, "batch": len(lengths), "longest": max(lengths) + new_tokens}
    try:
        _require_no_wait(processors)
        try:
            levels = round_levels(target, chain.drafter, **how)
        except NotCaptured:
            alone = round_levels(target, None, **how)
            if shelving is None or not shelving.leaves_out(lengths, new_tokens):
                raise
            return alone
    except NotCaptured as reason:
        model = target.runner.model
        say_once(model, f"{type(model).__name__} decodes without captured rounds, step by step: {reason}")
        return None
    if chain.controller is not None:
        for level in levels:
            level.most = 1  # a plan says how many
            if isinstance(level, RoundLevel):
                level.threshold = 0.0  # a draft that ends early takes as long: only a level's own length ends it
                # Before anything is captured, as measuring costs would move the rotary tables under the graphs.
                level.decoder.reserve_positions(POSITIONS)
    return levels


def _require_no_wait(processors: LogitsProcessorList) -> None:
    for processor in processors:
        if isinstance(processor, EtaLogitsWarper):
            raise NotCaptured("eta_cutoff looks at its probabilities on the host")
        if isinstance(processor, WARPERS) and type(processor) not in WARPERS:
            raise NotCaptured(f"{type(processor).__name__} is no class of transformers, and may wait for the device")


def _in_words(processors: LogitsProcessorList) -> str:
    """What decides what processors do to scores: their classes and numbers."""
    return ", ".join(f"{type(one).__name__}({vars(one)})" for one in processors)
