"""How are many requests decoded with a few slots, each in its own time? Continuous batching over a chain.

Iteration-level scheduling as in ORCA (Yu et al., OSDI 2022): after every round the rows that ended leave, and requests
that wait take their places; a new row is prefilled in the same pass of the target in which the others are checked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import torch
from transformers import PreTrainedModel

from ...engines.modules.attention import ragged_attention_on
from ...engines.prefixes import bytes_of
from ...engines.rows import require_memory
from ...nn.adapters import without_wrapper
from ...nn.agreement import agreed, raise_if_shared
from ...speculation.checker import Verdict
from ...speculation.draft import Rows
from ...speculation.loop import Loop
from ...speculation.row_sampling import RowRule
from ...speculation.stats import LevelStats, SpeculationStats
from ..adaptive import tell_what_never_pays
from ..call import keep_stats
from ..config import SpeculationConfig
from ..levels.vocabulary import require_target_tokenizer
from ..levels.wiring import Chain
from ..request import check_target, vocab_size
from .arrivals import Arrivals
from .chain import FIRST_CAPACITY, chain_of
from .events import NewTokens
from .prompts import PREFILL_CHUNK, LongPrompts, chunk_of
from .request import Admitted, Completion, Preparation, Request
from .rounds import StreamRounds, closed_up
from .telling import Telling

_OF_STREAM = "prompt_tokens", "prefix_tokens", "prefix_bytes", "levels_error"  # counted here, not in the loops
_PAUSE = 0.002  # seconds between two looks at an idle source


def generate_stream(
    model: PreTrainedModel, requests: Iterable[Any], *, max_batch: int = 8, assistant_models: list | None = None,
    assistant_tokenizers: list | None = None, speculation_config: SpeculationConfig | dict | None = None,
    tokenizer=None, events: bool = False, prefill_chunk: int | None = PREFILL_CHUNK,
    prefix_cache: int | str | None = None, **defaults,
) -> Iterator[Completion | NewTokens]:  # fmt: skip
    """Decode requests as slots become free, first come, first served; completions come in the order they end.

    requests: any iterable of Request, or of a list of ids, a tensor, a string or a dict of arguments. It is asked for
        the next one only when a slot is free, between two rounds; if it blocks, decoding waits. It may yield None for
        "nothing yet" and is asked again after the next round.
    max_batch: rows decoded at a time.
    assistant_models, assistant_tokenizers, speculation_config: as in `model.generate`; no levels: the target alone.
    tokenizer: the target's, for prompts and stop strings; completions then have text.
    events: also yield `NewTokens` for every request that gained tokens in a round, before that round's completions.
    prefill_chunk: the most tokens of a prompt that are read between two rounds, fewer where rows would wait long for
        them; None: a prompt is read at once. Compiled models only.
    prefix_cache: bytes, or a text such as "1GiB", of keys and values that are kept of prompts: a prompt that begins
        as one before it is read from where they differ on, with the same bits. None: none. Compiled models only.
    defaults: arguments of generate (generation_config too) for requests that do not override them.

    A greedy request gets the ids of `model.generate` for it alone, whatever requests join or leave. A sampled one
    depends only on its seed and its scores, not on other requests or the levels. Both are exact if the models run
    compiled; module by module, ties can fall either way (invariant 3).

    Decoding happens only while the iterator is being consumed; closing it frees everything. For a progress bar wrap
    it: `tqdm(generate_stream(...), total=len(requests))`. A request that is invalid, whose own processor, criterion or
    streamer fails, or for which the target's logits are NaN (FloatingPointError) completes with "error". Where a
    level fails, the target goes on alone, with one warning and the same tokens; where the target fails, the stream
    raises its error. Raises TypeError or ValueError at once for arguments of the call itself, and an exception of
    `requests` once the running requests have completed.
    """
    made = _made(model, requests, max_batch, assistant_models, assistant_tokenizers, speculation_config, prefill_chunk,
                 prefix_cache, tokenizer, defaults, texts=True, events=events)  # fmt: skip
    return made.completions()


def stream_in_rounds(
    model: PreTrainedModel, requests: Iterable[Any], *, max_batch: int, assistant_models: list,
    speculation_config: SpeculationConfig | dict | None, tokenizer, prefill_chunk: int | None,
    prefix_cache: int | str | None,
) -> Iterator[list[Completion | NewTokens]]:  # fmt: skip
    """As `generate_stream(events=True)`, all that a round brings at once, without texts. No level is built later."""
    made = _made(model, requests, max_batch, assistant_models, None, speculation_config, prefill_chunk, prefix_cache,
                 tokenizer, {}, texts=False, events=True, whole=True)  # fmt: skip
    return made.rounds_told()


def _made(
    model: PreTrainedModel, requests: Any, max_batch: Any, assistant_models: list | None,
    assistant_tokenizers: list | None, speculation_config: Any, prefill_chunk: Any, prefix_cache: Any, tokenizer: Any,
    defaults: dict[str, Any], *, texts: bool, events: bool, whole: bool = False,
) -> _Stream:  # fmt: skip
    model = without_wrapper(model, "generate_stream")
    _check_call(model, requests, max_batch, tokenizer)
    chunk, budget = chunk_of(prefill_chunk), bytes_of(prefix_cache, "prefix_cache")
    prepare = Preparation(model, tokenizer, vocab_size(model), defaults).checked()
    rules: list[RowRule] = []
    levels, config = [] if assistant_models is None else assistant_models, SpeculationConfig.of(speculation_config)
    with agreed(model):
        chain = chain_of(model, tokenizer, config, rules, levels, assistant_tokenizers, whole)
        prompts = LongPrompts(chain, model.device, chunk, budget)
    live: dict[int, Admitted] = {}
    telling = Telling(chain, live, tokenizer if texts else None, events)
    return _Stream(model, chain, rules, prepare, Arrivals(iter(requests), model), max_batch, live, telling, prompts)


def _check_call(model: PreTrainedModel, requests: Any, max_batch: Any, tokenizer: Any) -> None:
    check_target(model, None)
    if not isinstance(max_batch, int) or isinstance(max_batch, bool) or max_batch < 1:
        raise ValueError(f"max_batch is {max_batch!r}, it must be a positive integer: the rows decoded at a time")
    if isinstance(requests, (str, Request)) or not isinstance(requests, Iterable):
        raise TypeError(f"requests is a {type(requests).__name__}, it must be an iterable: write [request]")
    require_target_tokenizer(tokenizer, vocab_size(model))


class _Stream:
    """The requests that have a slot, and the rounds they go through."""

    def __init__(
        self, model: PreTrainedModel, chain: Chain, rules: list[RowRule], prepare: Preparation, arrivals: Arrivals,
        max_batch: int, live: dict[int, Admitted], telling: Telling, prompts: LongPrompts,
    ):  # fmt: skip
        self.model, self.chain, self.prepare, self.arrivals = model, chain, prepare, arrivals
        self.rules, self.max_batch, self.prompts, self.admitted = rules, max_batch, prompts, 0
        self.live, self.telling = live, telling  # by the number of their row
        self.spoiled: set[int] = set()  # numbers of rows that may have left NaN in their slots
        self.told = chain.watched = SpeculationStats(chain.counts)  # while the stream runs
        self.device = next(model.parameters()).device
        self.rounds = StreamRounds(chain, self.device, max_batch, self._stop, self._emit, prompts.begun,
                                   live)
        prompts.on_failure = self.rounds.leave_out

    def completions(self) -> Iterator[Completion | NewTokens]:
        """New tokens and completions, one by one."""
        with closing(self.rounds_told()) as rounds:
            for told in rounds:
                yield from told

    def rounds_told(self) -> Iterator[list[Completion | NewTokens]]:
        """What rounds bring; in between the caller's code runs."""
        with agreed(self.model):
            yield from self._rounds_told()

    def _rounds_told(self) -> Iterator[list[Completion | NewTokens]]:
        """The loop: refill, one round, yield new tokens and completions."""
        going: list[int] = []
        keep_stats(self.model, self.told)
        try:
            while True:
                joining: list[int] = []
                while self._has_slot(going, joining) and (item := self.arrivals.next()) is not None:
                    if (ended := self._join(item, joining)) is not None:
                        yield [ended]
                if over := self._read_on(going, joining):
                    yield over
                if self.arrivals.exhausted and not (going or joining or self.prompts.reading):
                    self.arrivals.raise_failure()
                    return
                self._place(going, joining)
                if self.loop.rows:
                    going = self._round()
                    told = self.telling.told()
                    ended = [number for number in self.loop.numbers if self.live[number].finish_reason]
                    yield [*told, *(self.telling.complete(self.live.pop(number)) for number in ended)]
                elif not self.prompts.reading:
                    time.sleep(_PAUSE)
        except Exception as error:
            self.rounds.close(error)
            raise
        finally:
            for one in (*self.live.values(), *(found.one for found in self.prompts.reading.values())):
                one.end_stream()
            self._end()

    def _has_slot(self, going: list[int], joining: list[int]) -> bool:
        return len(going) + len(joining) + len(self.prompts.reading) < self.max_batch

    def _read_on(self, going: list[int], joining: list[int]) -> list[Completion]:
        """Read a chunk of a long prompt; those that are read join, and others are over."""
        over = []
        for number, one in self.prompts.advance(beside=bool(going)) if self.prompts.reading else ():
            if one.finish_reason is None:
                self.live[number] = one
                joining.append(number)
            else:
                one.stats.seconds = time.perf_counter() - one.began
                over.append(self.telling.complete(one))
        return over

    def _end(self) -> None:
        """What was counted is kept, and caches are let go of."""
        try:
            self.rounds.close()
        finally:
            self.prompts.forget()
            stats, self.told.levels_error = self.rounds.stats, self.rounds.failure
            for name in _OF_STREAM:
                setattr(stats, name, getattr(self.told, name))
            keep_stats(self.model, stats)
            if self.chain.shelving is not None:
                self.chain.shelving.settle(stats)
            tell_what_never_pays(self.model, self.chain, stats)
            self.rounds = None  # it knows our methods: a cycle would keep the caches until the next gc

    @property
    def loop(self) -> Loop:
        """The rows that are being decoded."""
        return self.rounds.loop

    def _join(self, item: Any, joining: list[int]) -> Completion | None:
        """Prepare a request for the next round; the completion of one that never gets there."""
        request = item
        try:
            request = Request.of(item)
            if request.cancelled:
                request.end_stream()
                return Completion(request, [], [], "cancelled")
            one = self.prepare(request, time.perf_counter())
            opening = self.prompts.opening(one, self.rounds.drafting)
            self._require_memory(one, opening.nbytes)
        except Exception as error:  # whatever is wrong with one request, the others go on
            raise_if_shared(self.model, error)
            if isinstance(request, Request):
                request.end_stream()
            return Completion(request, [], [], "error", error)
        one.stream(one.prompts.input_ids.cpu())
        one.raise_if_alone(self.model)
        number, joins = self.admitted, False
        try:
            joins = one.error is None and self.prompts.take(number, one, opening)
        except Exception as error:  # no memory to read it into: the others go on
            raise_if_shared(self.model, error)
            one.fail(error)
        if one.error is not None:
            one.stats.seconds = time.perf_counter() - one.began
            return self.telling.complete(one)
        self.admitted += 1
        if self.chain.drafter is not None or self.chain.deferred is not None:
            one.stats.levels = [LevelStats(self.chain.names[0])]
        if joins:
            self.live[number] = one
            joining.append(number)
        self.told.prompt_tokens += one.stats.prompt_tokens
        self.told.prefix_tokens += one.stats.prefix_tokens
        return None

    def _require_memory(self, one: Admitted, beside: int) -> None:
        """torch.OutOfMemoryError for a row without room beside the live ones. beside: bytes its prompt is read to."""
        others = *self.live.values(), *(found.one for found in self.prompts.reading.values())
        rows = [*(other.row for other in others), one.row]
        engines = [self.chain.target.runner, *self.chain.runners]
        require_memory(engines, len(rows), self.device, longest=max(map(len, rows)), beside=beside)

    def _place(self, going: list[int], joining: list[int]) -> None:
        """Those that go on and those that join become the rows of the loop, or of a new one."""
        fits = self.rounds.take([self.live[number] for number in joining], len(going))
        try:
            if fits:
                self._move(going, joining)
        except Exception as error:  # whatever the levels or the target raise
            self.rounds.give_up(error, list(self.live.values()))
            fits = False
        if not fits:
            self._begin()
        self.prompts.begun.clear()

    def _begin(self) -> None:
        """All that are live, in a new loop."""
        self.rules[:] = [one.rule for one in self.live.values()]
        self.rounds.begin(list(self.live.values()), list(self.live))

    def _move(self, going: list[int], joining: list[int]) -> None:
        """New rows take the slots of those that ended; what is left over joins behind, or leaves."""
        loop, left = self.loop, set(range(len(self.loop.rows))) - set(going)
        free = sorted(r for r in left if loop.numbers[r] not in self.spoiled)  # a masked NaN is still a NaN
        with torch.inference_mode():
            places, new = free[: len(joining)], [self.live[number] for number in joining[: len(free)]]
            loop.replace(places, [one.row for one in new], [one.budget for one in new], joining[: len(free)])
            for r, one in zip(places, new, strict=True):
                self.rules[r] = one.rule
            taken, more = free[: len(joining)], [self.live[number] for number in joining[len(free) :]]
            keep = closed_up([*going, *taken])
            loop.select(keep)
            self.rules[:] = [self.rules[r] for r in keep]
            if more:
                self.rules += [one.rule for one in more]
                loop.admit([one.row for one in more], [one.budget for one in more], joining[len(free) :])
            if left and not self.rounds.is_captured:
                self.rounds.shrink(FIRST_CAPACITY)
            self.chain.count_memory(self.told)

    def _round(self) -> list[int]:
        """One round of all rows; the indices of those that go on."""
        asks = (self.live[number].request.logprobs for number in self.loop.numbers)
        self.chain.target.keep_logits = self.telling.asks and any(count is not None for count in asks)
        begin = time.perf_counter()
        with torch.inference_mode(), ragged_attention_on(self.chain.models):
            going = self._advanced()
        self.prompts.pace.took(time.perf_counter() - begin)
        self.prompts.keep(self.loop.numbers, self.loop.rows, self.loop.rounds.places)
        self.told.prefix_bytes, self.told.levels_error = self.prompts.bytes_kept, self.rounds.failure
        for r, number in enumerate(self.loop.numbers):
            one = self.live[number]
            if r not in going and not one.finish_reason:
                one.finish_reason = "length"
            if one.finish_reason:
                one.stats.seconds = time.perf_counter() - one.began
                one.raise_if_alone(self.model)
        return [r for r in going if not self.live[self.loop.numbers[r]].finish_reason]

    def _advanced(self) -> list[int]:
        """As `Loop.round`. Where captured rounds cannot go on, others do."""
        rows = [self.live[number] for number in self.loop.numbers]
        before = [len(one.row) for one in rows]
        try:
            going = self.loop.round()
        except Exception as error:  # whatever the levels or the target raise
            self.rounds.give_up(error, list(self.live.values()))
            if before != [len(one.row) for one in rows] or any(one.finish_reason for one in rows):
                return [r for r, one in enumerate(rows) if one.left]  # the round was over, and the next one failed
            self._begin()
            going = self.loop.round()
        self.rounds.goes_on()
        return going

    def _stop(self, number: int, row: list[int], tokens: list[int]) -> tuple[int, bool]:
        """How many tokens of a row count, and whether it ends; its own criteria may end it alone."""
        one = self.live[number]
        good = tokens if one.rule.error is None else tokens[: one.rule.failed_at - len(row)]
        try:
            count, stopped = one.stop(0, row, good)
        except Exception as error:  # a criterion of this request
            one.fail(error, by_caller=True)
            return 0, True
        if stopped:
            one.finish_reason = "stop"
        elif len(good) < len(tokens):
            one.fail(one.rule.error, by_caller=not isinstance(one.rule.error, FloatingPointError))  # else of logits
            self.spoiled.add(number)
        elif one.request.cancelled:
            one.finish_reason = "cancelled"
        return count, one.finish_reason is not None

    def _emit(self, numbers: list[int], kept: Rows, verdict: Verdict) -> None:
        self.telling.emit(self.loop, kept, verdict)
