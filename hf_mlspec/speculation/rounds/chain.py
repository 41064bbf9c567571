"""Which captured chains are kept, for whom, and when do they give their memory back?

A chain's caches, state and graphs outlive a call: the next call of the same chain on the same weights finds them. One
call at a time may have them; a second thread waits.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...engines.capturing import free_cached
from ...engines.cuda.states import DeltaStates
from ...engines.memory import WORTH_ASKING, available, moved, out_of_memory
from ...engines.rows import GROWTH, new_kv, up_to_growth
from ...nn.state import say_once, state_of
from ...ops.attention_plain import FIRST_SLOTS
from ..draft import Rows
from ..plans import Plan, off
from ..search import Choice
from .first_rounds import FirstRounds
from .graphs import RoundGraphs
from .program import Level, RoundLevel, RoundProgram, repeats_of
from .prompts import PromptGraphs
from .reading import read
from .state import RoundState

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
_WIDEST = 32  # tokens of a check that there is always room for, whatever a controller chooses
_FED_AGAIN = 4  # tokens by which what a level below the target is fed may begin before what it was fed last
_BESIDE = 24  # tokens whose inputs are kept beside those of two checks: taps, and what is fed again
_OF_FREE = 0.9  # what caches may take of the memory that is free: graphs need some, too
_KEPT = 2  # chains of a target: one with levels, and the target alone
_keeping = threading.RLock()


class CapturedChain:
    """Levels with their caches, and rounds over them, for up to `batch` rows of `slots` tokens.

    planned: a controller chooses the program of every round; `program` is then that of the target alone. seen: slots
    that a draft window leaves in view, and plans have every level twice (`plans.Choices`); 0: there is none. single:
    one step of the target, for the last tokens of a call and the first ones of a stream's rows. sampled, warp,
    divided: as of `RoundProgram`. streams: rows join again and again.
    """

    def __init__(self, levels: list[Level], key: tuple, batch: int, slots: int, *, sampled: bool = False,
                 warp: Callable[[Tensor], Tensor] | None = None, divided: bool = False, script_rounds: int = 0,
                 planned: bool = False, seen: int = 0, streams: bool = False):
        self.levels, self.key, self.batch, self.slots = levels, key, batch, slots
        self.script_rounds, self.planned, self.seen = script_rounds, planned, seen
        self._sampling = sampled, warp, divided
        self._programs: dict[Plan, RoundProgram] = {}
        self.single = RoundProgram(levels[:1], *self._sampling, active=(), steps=1)
        self.idle_seconds = 0.0  # that `single` would have saved
        self.step_seconds = 0.0  # of the device for one step of the last round
        self.first_choices: dict[tuple, Choice] = {}  # of calls, see planning.py
        self.agreed: dict[tuple, int] = {}  # how often in a row the same levels were chosen anew for such calls
        self.choosing_seconds = 0.0  # what making a controller and its first choice took in the last call
        self.unquestioned = 0  # calls that ended before they had chosen;
        self.untold: list[tuple[int, list]] = []  # their rows and rounds, which the next controller is told of
        self.may_wait = 0.05  # seconds that the device may wait for first choices of calls, see planning.py
        alone = off((len(levels) - 1) * (2 if seen else 1))
        self.program = self.program_of(alone) if planned else RoundProgram(levels, *self._sampling)
        whole = RoundProgram(levels, *self._sampling) if planned else self.program
        self._widest = whole.most_checked
        self.lock, self.holder, self.dropped = threading.Lock(), 0, False
        self.captured_before = 0.0  # capture_seconds of its graphs when the call began that has it
        self._allocate()
        self._prompts = {id(one): PromptGraphs(one) for one in self.with_models if streams and one.own_cache}
        self.first_rounds = FirstRounds(levels[0], self._sampling) if streams else None

    @property
    def with_models(self) -> list[RoundLevel]:
        """The levels that have caches, the target first."""
        return _with_models(self.levels)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of all levels."""
        return sum(level.kv.nbytes for level in self.with_models if level.own_cache)

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.levels[0].decoder.device

    def program_of(self, plan: Plan) -> RoundProgram:
        """The rounds of a plan. Where a level in the middle drafts for one above, so many of its rounds as give at
        least the tokens that the plan names."""
        if plan not in self._programs:
            own, windowed = self.split(plan)
            levels = [self.levels[0], *(self.levels[index + 1] for index in own.active)]
            lengths = [own.lengths[index] for index in own.active]
            self._programs[plan] = RoundProgram(
                levels, *self._sampling, most=repeats_of(lengths), active=own.active,
                draft_window=self.seen - FIRST_SLOTS if windowed else 0,
            )  # fmt: skip
            states, width = self.levels[0].states, self._programs[plan].most_checked
            if states is not None and 2 * width + _BESIDE > states.window:
                raise ValueError(f"plan {plan} checks {width} tokens, recurrent layers keep {states.window} of a row")
        return self._programs[plan]

    def split(self, plan: Plan) -> tuple[Plan, bool]:
        """The plan of this chain's levels, and whether they have the draft window."""
        return plan.split() if self.seen else (plan, False)

    def captured_plans(self, batch: int) -> list[Plan]:
        """Plans whose rounds of so many rows can be launched at once."""
        return [plan for plan, program in self._programs.items() if self.graphs.has(program, batch)]

    def read(self, level: RoundLevel, places: list[int], rows: Rows, cached: list[int], window: int = 0) -> int:
        """As `reading.read`, or by one replay."""
        if (graphs := self._prompts.get(id(level))) is None:
            return read(level, places, rows, cached, window)
        target = self.levels[0].decoder
        of_layer = self.step_seconds / (target.num_layers + target.num_recurrent)  # some have recurrent ones alone
        return graphs.read(level, places, rows, cached, window, of_layer, self.graphs)

    def fits(self, batch: int, slots: int) -> bool:
        """Whether that many rows of that many tokens have room, on the weights of today."""
        return batch <= self.batch and slots <= self.slots and self._fingerprints == _fingerprints(self.levels)

    def more_slots(self, end: int) -> int:
        """For rows that have filled their slots and may reach `end`: twice as many, or fewer where there is no memory
        for those."""
        wanted, each = up_to_growth(min(2 * self.slots, end)), self.cache_bytes // self.slots
        if (wanted - self.slots) * each < WORTH_ASKING or (free := available(self.device)) is None:
            return wanted
        fitting = self.slots + int(_OF_FREE * free) // each
        return min(wanted, max(fitting - fitting % GROWTH, up_to_growth(self.slots + 1)))

    def grow(self, batch: int, slots: int) -> None:
        """More rows, or more slots a row: tokens, keys and values are copied, and graphs, which hold addresses, are
        made anew."""
        counts = self.graphs.counts
        old, self.graphs = self.state, None  # graphs give their memory back first
        self.batch, self.slots = batch, slots
        self._allocate()
        self.state.take_over(old)
        self.graphs.counts = counts

    def move(self, places: list[int]) -> None:
        """Put the rows of these places, which rise, first: in every cache and in the state."""
        for level in self.levels:
            for place, row in enumerate(places if level.own_cache else ()):
                if place != row:  # then row > place: none is overwritten before it is read
                    level.kv[:, :, place] = level.kv[:, :, row]
                    if level.states is not None:
                        level.states.move(place, row)
        self.state.move(places)

    def finish(self) -> None:
        """Wait for what the caller's stream does, be it a round that nobody asked about: then tensors may be freed, or
        used on another stream."""
        if self.graphs is not None:  # there are none where there was no memory for larger ones
            self.graphs.batch = 0
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _allocate(self) -> None:
        for level in self.with_models:
            level.decoder.reserve_positions(self.slots)
            level.kv = self._larger(level) if level.own_cache else self.levels[0].kv
            level.states = self._more_states(level) if level.own_cache else self.levels[0].states
        self._fingerprints = _fingerprints(self.levels)
        self.state = RoundState.new(self.batch, self.slots, len(self.levels), self.device, self.script_rounds)
        self.graphs = RoundGraphs(self.state)
        self.finish()  # whoever has it first may be on another stream

    def _larger(self, level: RoundLevel) -> Tensor:
        """Keys and values for all rows and slots, those that there are moved."""
        if level.kv is None:
            return new_kv(level.decoder, self.batch, self.slots, level.cache_format)
        return moved(level.kv, level.kv.shape[2], self.batch, self.slots, spend=True)

    def _more_states(self, level: RoundLevel) -> DeltaStates | None:
        """States of recurrent layers for all rows, inputs for a draft beside what the check before may have kept."""
        decoder, sizes = level.decoder, level.decoder.sizes.delta
        if not decoder.num_recurrent:
            return None
        window = 1 << (2 * max(self._widest, _WIDEST) + _BESIDE - 1).bit_length()
        if level.states is None:
            behind = 0 if level is self.levels[0] else _FED_AGAIN
            how = decoder.dtype, decoder.device
            return DeltaStates.new(sizes, decoder.num_recurrent, self.batch, *how, window, behind)
        return level.states.grown(max(self.batch, level.states.rows), level.states.window)


def bucket_of(rows: int) -> int:
    """The number of rows that graphs are made for."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), rows - rows % -BUCKETS[-1])


@contextmanager
def borrowed(
    models: list[nn.Module], levels: list[Level], *,
    rows: int, slots: int, sampled: bool = False, warp: Callable[[Tensor], Tensor] | None = None, warp_key: str = "",
    divided: bool = False, planned: bool = False, seen: int = 0, stream_of: int = 0,
) -> Iterator[CapturedChain | None]:  # fmt: skip
    """A chain for one call, its first graph captured; None, with one warning, without memory for it, or inside another
    call on the same chain.

    models: of the levels, the target first; kept chains of any of them are freed. warp_key: `warp` in words. divided,
    planned, seen: as of `CapturedChain`. stream_of: rows that the chain of a stream has room for; calls do not share
    it, and nobody waits for it; 0: a call.
    """
    how = sampled, warp_key, divided, planned, seen, stream_of > 0
    key = (id(levels[0].decoder), *how, *(_key(level) for level in levels))

    def build(batch: int, slots: int) -> CapturedChain:
        own = [replace(level) for level in levels]  # the caches of a failed attempt go with it
        return CapturedChain(own, key, batch, slots, sampled=sampled, warp=warp, divided=divided, planned=planned,
                             seen=seen, streams=stream_of > 0)

    chain = _locked(models, key, bucket_of(rows), up_to_growth(slots), build, stream_of)
    if chain is None:
        yield None
        return
    try:
        yield chain
    except BaseException:  # who knows how far it came: the next call starts anew
        _drop(models[0], chain)
        raise
    finally:
        try:
            chain.finish()
        finally:
            chain.holder = 0
            chain.lock.release()


def let_go(model: nn.Module) -> None:
    """Free what is kept for calls with this target."""
    with _keeping:
        state_of(model).chains.clear()


def _drop(model: nn.Module, chain: CapturedChain) -> None:
    """No other call gets this chain, and its memory goes when this one ends."""
    with _keeping:
        chain.dropped = True
        kept = state_of(model).chains
        kept[:] = [one for one in kept if one is not chain]


def _locked(models, key, bucket, slots, build, stream_of) -> CapturedChain | None:
    """A chain that is this call's alone, with a graph for so many rows. Where memory is short, all that is kept for
    the target is freed first."""
    problem, room = "", bucket_of(max(bucket, stream_of))
    for _ in range(2):
        try:
            while (chain := _find(models, key, room, slots, build)) is not None:
                if not chain.lock.acquire(blocking=not stream_of):
                    say_once(models[0], "rounds of a stream are not captured: another stream has the same levels")
                    return None
                if not chain.dropped:  # by the call that was waited for
                    break
                chain.lock.release()
            return None if chain is None else _with_graph(chain, bucket)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            problem = str(error).splitlines()[0]
        chain = None
        let_go(models[0])
        gc.collect()
        free_cached()
    say_once(models[0], f"rounds run step by step: not enough memory to capture them for {bucket} rows of {slots} "
                        f"tokens ({problem}); ask for fewer new tokens or rows, or free what else is on the device")
    return None


def _with_graph(chain: CapturedChain, bucket: int) -> CapturedChain:
    """The locked chain; unlocked again where its graph fails."""
    chain.captured_before = chain.graphs.capture_seconds
    try:
        with torch.inference_mode():
            chain.graphs.capture(chain.program, bucket)
    except BaseException:
        chain.dropped = True
        chain.lock.release()
        raise
    chain.holder = threading.get_ident()
    return chain


def _find(models, key, batch, slots, build) -> CapturedChain | None:
    """The kept chain of this key where rows and slots fit it, else a new one; None inside a call on the chain."""
    with _keeping, torch.inference_mode():
        kept: list[CapturedChain] = state_of(models[0]).chains
        kept[:] = [one for one in kept if not one.dropped and one.key[0] == key[0]]  # the target's weights of today
        chain = next((chain for chain in kept if chain.key == key), None)
        if chain is not None and chain.holder == threading.get_ident():
            say_once(models[0], "rounds are not captured: generate was called inside a call of the same chain")
            return None
        kept[:] = [one for one in kept if one is not chain]
        if chain is not None and not chain.fits(batch, slots):
            batch, slots = _for_both(chain, batch, slots)
            chain = None  # frees it before the next one is made
        if chain is None:
            del kept[: max(0, len(kept) + 1 - _KEPT)]
            chain = build(batch, slots)
            _watch(models)
        kept.append(chain)  # the newest last
        return chain


def _for_both(chain: CapturedChain, batch: int, slots: int) -> tuple[int, int]:
    """Rows and slots that serve these calls and those the chain was for, unless that is twice what either takes."""
    most = max(batch, chain.batch), max(slots, chain.slots)
    fair = 2 * max(batch * slots, chain.batch * chain.slots)
    return most if most[0] * most[1] <= fair else (batch, slots)


def _watch(models: list[nn.Module]) -> None:
    """Kept chains hold the weights of their levels: let them go with the level's model."""
    target = weakref.ref(models[0])
    for model in models[1:]:
        if model is not models[0]:
            weakref.finalize(model, _forget, target).atexit = False


def _forget(target: weakref.ref) -> None:
    model = target()
    if model is not None:
        let_go(model)


def _key(level: Level) -> tuple:
    if not isinstance(level, RoundLevel):
        return (level.name, level.min_ngram, level.max_ngram, level.most)
    own = level.own_cache, level.cache_format, level.bits, level.vocab_size, level.threshold, level.most
    return (id(level.decoder), level.name, *own, level.draft_window)


def _fingerprints(levels: list[Level]) -> list[tuple]:
    return [level.decoder.fingerprint for level in _with_models(levels)]


def _with_models(levels: list[Level]) -> list[RoundLevel]:
    return [level for level in levels if isinstance(level, RoundLevel)]
