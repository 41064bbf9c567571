"""How is one call of generate checked, decoded, and returned in the form transformers would return it?"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from ..engines.built import walking_once
from ..engines.modules.attention import ragged_attention_on
from ..engines.modules.states import row_by_row
from ..engines.rows import require_memory
from ..nn.adapters import without_wrapper
from ..nn.agreement import agreed, raise_if_shared
from ..nn.state import ModelState, say_once, state_of
from ..speculation.checker import Verdict
from ..speculation.draft import Rows
from ..speculation.loop import Emit, Loop
from ..speculation.rounds.captured import CapturedRounds
from ..speculation.rounds.chain import CapturedChain
from ..speculation.rounds.planning import Planning
from ..speculation.rounds.rounds import NoRoom
from ..speculation.sampling import drawn_seed
from ..speculation.shelf import decoded, tell_off
from ..speculation.stats import SpeculationStats
from . import images, seen
from .adaptive import chain_without_levels, let_choose, tell_what_never_pays
from .capture import captured, go_on
from .config import SpeculationConfig
from .known import given_of
from .levels.resolve import resolve
from .levels.wiring import Chain, Wiring
from .origins import Origins
from .processing import Prompts, Stopping, calls_like, split_processors
from .request import check_length, check_prompts, check_request, check_streamer, check_target
from .returned_cache import ReturnedCache, check_given, check_no_states, take_over, tokens_in
from .streamed import counting

_FIRST_CAPACITY = 512  # slots for new tokens a cache has at first; it grows as rows do


def last_stats(model: PreTrainedModel) -> SpeculationStats | None:
    """The counts of the last call of generate with levels on this model; None before the first one."""
    return state_of(without_wrapper(model, "last_stats")).last_stats


def keep_stats(model: PreTrainedModel, stats: SpeculationStats) -> None:
    """What `last_stats` answers from now on."""
    state_of(model).last_stats = stats


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_models: list | None = None,
    assistant_tokenizers: list | None = None,
    speculation_config: SpeculationConfig | dict | None = None,
    target_tokenizer=None,
    **model_kwargs,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Decode with levels: `model.generate(**inputs, custom_generate=hf_mlspec.generate, assistant_models=[...])`.

    input_ids int64 `[batch, width]`, left-padded as attention_mask says -> int64 `[batch, width + new]` or, with
    return_dict_in_generate, a GenerateDecoderOnlyOutput with `.speculation`. transformers passes neither streamers nor
    tokenizers to a custom_generate callable. Here the target's tokenizer is therefore `target_tokenizer`, and
    streamer= and stop_strings= do not work; `model.generate(..., assistant_models=[...])` has neither limit.

    past_key_values: a DynamicCache of the first tokens of input_ids, fewer than all, in columns as generate returns
    them. It must come from the same tokens, attention_mask and weights, which is not checked. It is returned filled,
    as is that of return_dict_in_generate: with the columns of the returned sequences for which every row has keys and
    values, all but the last, or, if a row ended earlier, those before its last token. Columns of padding hold zeros.
    To continue, pass the cache with the sequences and the attention mask of their padding.

    Raises TypeError or ValueError for invalid levels and options, before anything is computed.
    """
    check_target(model, generation_config.num_beams)
    call = Call(
        input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs,
        levels=assistant_models if assistant_models is not None else [], tokenizers=assistant_tokenizers,
        config=speculation_config,
        tokenizer=target_tokenizer,
    )
    return run(model, call)


@dataclass
class Call:
    """What stock generate prepared, and the user's arguments about levels.

    input_ids: int64 `[batch, width]`. keep_cache: return the user's own past_key_values filled.
    watch: called with the chain and its `emit` before decoding; returns the `emit` to use instead. images: whether
    the prompt had some, which modules read.
    """

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    settings: GenerationConfig
    model_kwargs: dict
    levels: list
    tokenizers: list | None = None
    config: SpeculationConfig | dict | None = None
    tokenizer: object | None = None
    streamer: object | None = None
    keep_cache: bool = False
    watch: Callable[[Chain, Emit], Emit] | None = None
    images: bool = False

    @property
    def tokens_given(self) -> int:
        """Columns that the user's own cache holds; transformers passes an empty one where there is none."""
        given = self.model_kwargs.get("past_key_values")
        return 0 if given is None else given.get_seq_length()

    @property
    def new_tokens(self) -> int:
        """The most a row may gain; stock generate asks a length of the user's after the first token only."""
        width = self.input_ids.shape[1]
        own = [c.max_length - width for c in self.criteria if calls_like(c, (MaxLengthCriteria,))]
        return min([int(self.settings.max_length) - width, *(max(room, 1) for room in own)])


def run(model: PreTrainedModel, call: Call) -> GenerateDecoderOnlyOutput | Tensor:
    """Check the request, build the chain, decode, and put the result into the form stock generate returns."""
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    with nullcontext() if alone else agreed(model):
        return _run(model, call)


def _run(model: PreTrainedModel, call: Call) -> GenerateDecoderOnlyOutput | Tensor:
    found = images.given(call.model_kwargs)
    found = found and seen.checked(model, call, found)
    prompts = check(model, call, found)
    if found:
        seen.read(model, call, found)
    stop, state = Stopping(call.criteria, prompts), state_of(model)
    with walking_once():
        chain = _chain(model, call, prompts, stop, state)
    _require_memory(model, call, chain, prompts, state)
    record = Record(call.settings, call.streamer, len(prompts.rows), chain)
    chain.watched = state.last_stats = SpeculationStats(chain.counts)  # a streamer may watch them grow
    emit = record if record.listens else None
    if call.watch is not None:
        emit, chain.shelving = call.watch(chain, record), None  # whoever watches levels wants them at work
    try:
        with ragged_attention_on(chain.models) if chain.models else nullcontext(), counting(model) as planes:
            stats, cache = _decode(chain, call, prompts, stop, emit)
    except BaseException:
        chain.learn()  # else at the end of the loop
        raise
    finally:
        if record.origins is not None:
            record.origins.end()
    stats.planes = planes
    state.last_stats = stats
    if chain.shelving is not None:
        chain.shelving.settle(stats)
    elif chain.left_off is not None:
        tell_off(stats, chain.left_off.off_speed)
        chain.left_off.correct_off(*decoded(stats))
    tell_what_never_pays(model, chain, stats)
    if call.streamer is not None:
        call.streamer.end()
    return record.result(prompts, prompts.grown, stats, None if call.images else cache)


def check(model: PreTrainedModel, call: Call, found: Collection[str] = ()) -> Prompts:
    """The prompts of a call that can be served; ValueError for any other, before anything is computed. found: inputs
    of images that are read before."""
    check_request(call.input_ids, call.settings, call.model_kwargs, known=found)
    if not found:
        images.check_tokens(model, call.input_ids)
    check_streamer(call.streamer, len(call.input_ids))
    prompts = Prompts(call.input_ids, call.model_kwargs.get("attention_mask"), _filler(call.settings))
    check_prompts(model, prompts, call.settings.max_length, {} if found else call.model_kwargs)
    check_length(model, max(prompts.lengths), call.new_tokens)
    if row_by_row(model):
        check_no_states(model, call.model_kwargs, call.keep_cache)
    elif call.tokens_given:
        check_given(model, call.model_kwargs["past_key_values"], prompts)
    split_processors(call.processors, prompts)  # refuses those that keep state
    return prompts


def _filler(settings: GenerationConfig) -> int:
    """The token that stands behind the end of a row."""
    for name in ("_pad_token_tensor", "_eos_token_tensor"):
        value = getattr(settings, name, None)
        if value is not None:
            return int(value.flatten()[0])
    return 0


def _chain(model: PreTrainedModel, call: Call, prompts: Prompts, stop: Stopping, state: ModelState) -> Chain:
    config, sampled = SpeculationConfig.of(call.config), "sampled" if call.settings.do_sample else ""
    resolved = partial(resolve, model, call.levels, call.tokenizers, config, state)
    given = None
    if call.watch is None:
        given = given_of(call.levels, call.tokenizers, call.tokenizer, config, sampled)
    wiring = Wiring(
        model, call.tokenizer, config,
        seed=drawn_seed() if call.settings.do_sample else None,
        processors=call.processors,
        prompts=prompts,
        capacity=max(prompts.lengths) + min(call.new_tokens, _FIRST_CAPACITY),
        ends=frozenset(stop.eos),
        keep_logits=bool(call.settings.output_scores or call.settings.output_logits),
        state=state,
        given=given,
    )
    chain = chain_without_levels(wiring, prompts.rows, call.new_tokens, resolved)
    return chain or let_choose(wiring, resolved(), sampled)


def _require_memory(model: PreTrainedModel, call: Call, chain: Chain, prompts: Prompts, state: ModelState) -> None:
    """torch.OutOfMemoryError where the prompts leave no room; one warning where all that they may gain would."""
    short = require_memory(
        [chain.target.runner, *chain.runners],
        len(prompts.rows),
        call.input_ids.device,
        end=max(prompts.lengths) + call.new_tokens,
        kept=lambda: sum(one.cache_bytes for one in state.chains),
    )
    if short:
        say_once(model, f"{type(model).__name__}: {short}", kind="may need more memory")


def _decode(chain: Chain, call: Call, prompts: Prompts, stop: Stopping, emit: Emit | None):
    """Extend the rows; the counts, and the cache a user asked to have back."""
    device, rows = call.input_ids.device, prompts.grown
    given = None if chain.target.runner.can.stateful else call.model_kwargs.get("past_key_values")
    cached, returned = tokens_in(given, prompts) if given is not None and call.tokens_given else 0, None
    if given is not None and (call.keep_cache or call.settings.return_dict_in_generate or call.tokens_given):
        emit = returned = ReturnedCache(chain, prompts, stop, call.new_tokens, given, emit)
    asked = stop if stop.asks or returned is not None else None
    how = {"stop": asked, "emit": emit, "ends": frozenset(stop.eos)}
    budgets = [call.new_tokens] * len(rows)
    capturable = chain.target.runner.can.capturable and not call.images  # whose caches are read again from ids alone
    try:
        with (
            captured(chain, call.processors, rows, call.new_tokens) if capturable else nullcontext() as rounds,
            torch.inference_mode(),
        ):
            if rounds is None and returned is None:
                stats = chain.decode(rows, budgets, device=device, **how)
            else:
                if rounds is None:
                    chain.target.start(len(rows), device)
                elif len(rows) > 1:
                    cached = 0  # captured rounds put rows into an order of their own
                if cached:
                    take_over(chain, given, cached, prompts)
                loop = loop_over(chain, rounds, device, how)
                decode = loop.decode if returned is None else partial(returned.decode, loop)
                stats = chain.finish(decode(rows, budgets, cached))
    except NoRoom as error:
        raise_if_shared(chain.target.runner.model, error)
        reason = NoRoom(str(error), error.left)  # without the frames that hold the chain
        with torch.inference_mode():
            stats = go_on(chain, reason, device, **how)
    if asked is not None:
        stats.new_tokens -= stop.cut(rows)
    if chain.drafter is None:
        stats.row_passes = stats.new_tokens  # what ran behind the end of a row is no one's
    return stats, None if returned is None else returned.fill()


def loop_over(chain: Chain, captured: CapturedChain | None, device: torch.device, how: dict) -> Loop:
    """A loop in captured rounds, or in those of the host where there are none. how: arguments of `Loop`."""
    chain.learn()  # of an earlier loop
    if captured is not None:
        planning = None
        if captured.planned:
            planning = chain.planning = Planning(chain.controller, chain.levels, captured)
            chain.waiting = set(range(len(chain.levels)))  # until there is a controller
        rounds = CapturedRounds(captured, chain.target, chain.drafter, planning=planning)
    else:
        rounds = chain.host_rounds(device)
    return Loop(rounds, **how)


class Record:
    """What is streamed and returned, collected round by round."""

    def __init__(self, settings: GenerationConfig, streamer, batch: int, chain: Chain):
        self.settings, self.streamer, self.batch = settings, streamer, batch
        self.origins = Origins(chain) if hasattr(streamer, "put_levels") else None
        wanted = settings.return_dict_in_generate
        self.scores = [[] for _ in range(batch)] if wanted and settings.output_scores else None
        self.logits = [[] for _ in range(batch)] if wanted and settings.output_logits else None

    @property
    def listens(self) -> bool:
        """Whether there is something to collect."""
        return self.streamer is not None or self.scores is not None or self.logits is not None

    def __call__(self, numbers: list[int], kept: Rows, verdict: Verdict) -> None:
        if self.streamer is not None and any(kept):
            if self.origins is not None:  # a streamer that asks has one row
                self.streamer.put_levels(self.origins.of(0, len(kept[0]), verdict))
            self.streamer.put(torch.tensor(kept[0] if self.batch == 1 else kept))
        for store, values in ((self.scores, verdict.scores), (self.logits, verdict.logits)):
            if store is not None:
                for r, (number, tokens) in enumerate(zip(numbers, kept, strict=True)):
                    # A copy: views would keep the rejected positions of every round alive.
                    store[number] += values[r, : len(tokens)].to(torch.float32, copy=True).unbind(0)
        if self.origins is not None:
            self.origins.forget()

    def result(self, prompts: Prompts, rows: Rows, stats: SpeculationStats, cache):
        new = [row[n:] for row, n in zip(rows, prompts.lengths, strict=True)]
        width = max(map(len, new))
        padded, begin = [line + [prompts.filler] * (width - len(line)) for line in new], prompts.input_ids
        tail = torch.tensor(padded, dtype=begin.dtype, device=begin.device).view(len(new), width)
        sequences = torch.cat([begin, tail], dim=1)
        if not self.settings.return_dict_in_generate:
            return sequences
        out = GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=_by_step(self.scores, new),
            logits=_by_step(self.logits, new),
            past_key_values=cache,
        )
        out.speculation = stats
        return out


def _by_step(store: list[list[Tensor]] | None, new: Rows) -> tuple[Tensor, ...] | None:
    """Per new token one `[batch, vocab]`; rows that had stopped hold zeros."""
    if store is None:
        return None
    blank = torch.zeros_like(next(line[0] for line in store if line))
    lines = list(zip(store, map(len, new), strict=True))
    return tuple(
        torch.stack([line[t] if t < count else blank for line, count in lines]) for t in range(max(map(len, new)))
    )
