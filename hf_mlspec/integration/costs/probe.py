"""What does a forward pass of each model of a chain cost here? Known from an earlier call, a file, or measured now."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from time import monotonic, process_time, time

import torch

from ...engines.built import device_of
from ...engines.capturing import wait_for
from ...engines.choose import engine_of
from ...engines.engine import Engine, Guess
from ...engines.head import HeadEngine
from ...engines.modules.attention import ragged_attention_on
from ...nn.state import say_once, state_of
from ...ops import UnreadableLibrary
from ...speculation.costs import DISTURBED, FEW_TOKENS, LONG, TOKENS, PassCosts, measure
from .file import CACHE_VARIABLE, NotAProfile, cache_file, can_be_kept, read, write
from .identity import key_of, key_of_hash, machine_of, model_of
from .replayed import PASSES, replays

_BUDGET = 1.8  # seconds for all models of a chain that are measured for the first time; warming up comes on top

_FIRST_CHECK, _NEXT_CHECK = 2.0, 4.0  # age at which kept costs are timed again, in seconds; then as many times more
_FIRST_CAPTURED = 60.0  # the same where passes are captured to be timed, which takes .2 seconds
_CHECK_PASSES, _CHECK_SHARE = 8, 0.002  # passes that this takes, and of all time
_CHECK_TOKENS = 1, 8  # of a pass: a step, and a check
_WIDE_TOKENS = 32, 128  # of checks of many rows, timed where that is little, or where rounds were too short
_CHECK_REPEATS = 2
_MOST_ANEW = 4.0  # seconds that so many passes may take where rounds have shown that costs do not hold: a call waits
_AGAIN, _MOST_AGAIN = 0.3, 32  # of a budget, and tokens of a pass, where costs are measured anew: a call waits for it
_SLOWER = 3  # times in a row that passes took longer, as of which costs were too low, and no load is the reason
_BUILDING_SHARE = 0.05  # of what a process has taken may go to building levels whose costs are to be timed again


@dataclass
class Check:
    """When the costs of an engine are timed again, and how long after that once more. disproved: they were, because
    rounds had shown that they do not hold. slower: what was timed the last times in a row, where passes took longer.
    """

    due: float
    wait: float
    disproved: bool = False
    slower: list[PassCosts] = field(default_factory=list)

    @classmethod
    def of(cls, costs: PassCosts, replayed: bool = False, told: bool = True) -> Check:
        """Of costs that were read, or measured just now. Those that held for so long are timed again when they are
        some times as old, whoever measured them: what a process of a few seconds finds is kept by those behind it.
        told: whether they are told of it; else each of them would find old costs due in its first call."""
        wait = max(_FIRST_CAPTURED if replayed else _FIRST_CHECK, _CHECK_PASSES * costs.seconds[0] / _CHECK_SHARE)
        if replayed or not told:  # capturing passes takes too long for every process
            return cls(monotonic() + wait, wait)
        wait = max(wait, _NEXT_CHECK * costs.held)
        return cls(monotonic() + max(wait - age_of(costs), 0.0), wait)

    def disprove(self) -> None:
        """Rounds have shown that the costs do not hold: it is due, once."""
        if not self.disproved:
            self.disproved, self.due = True, monotonic()

    def again(self, seconds: float) -> None:
        """It was done, which took so many seconds."""
        self.wait = max(_NEXT_CHECK * self.wait, seconds / _CHECK_SHARE)
        self.due = monotonic() + self.wait


def costs_of(
    target: Engine,
    levels: list[Engine],
    *,
    profile: str | os.PathLike | None = None,
    prepare: bool = True,
    replayed: bool = False,
    disproved: bool = False,
) -> list[PassCosts]:
    """Costs of the target and of each level, as far as they run a model.

    replayed: of passes inside captured rounds. profile: a file of `mlspec tune`; None: the cache folder alone.
    prepare: as SpeculationConfig says. What is nowhere is measured, and kept in the cache folder. A file of another
    machine or version, a damaged one, and a folder that cannot be written give one warning each. Now and then two
    passes are timed again, for costs that were measured beside a load may forbid a level for ever. disproved: rounds
    have shown that costs do not hold.
    """
    engines = [target, *levels]
    # What is kept of a model goes when another thread clears it: a call holds what it found.
    held = [_kept(engine, replayed) for engine in engines]
    given = _given(target, profile) if None in held and profile is not None else {}
    for place, engine in enumerate(engines):
        if held[place] is not None:
            continue
        found = given.get(model_of(engine, replayed)) if given else None
        found = found or _cached(engine, target, replayed)
        if found is None:
            budget = _BUDGET / len(engines)
            found = measured(engine, budget=budget, prepare=prepare, replayed=replayed)
            keep(engine, found, target, replayed)
        else:
            state_of(engine.model).costs[_state_key(engine, replayed)] = found
        held[place] = found
    if target.can.bit_exact:  # other engines repeat themselves: their costs stay as they are
        for engine, kept in zip(engines, held, strict=True):
            how = {"budget": _BUDGET / len(engines), "prepare": prepare, "replayed": replayed}
            _check(engine, target, _kept(engine, replayed) or kept, profile=profile, disproved=disproved, **how)
    return [_kept(engine, replayed) or kept for engine, kept in zip(engines, held, strict=True)]


def costs_of_hash(
    target: Engine, model: str, replayed: bool, profile: str | os.PathLike | None = None
) -> PassCosts | None:
    """The kept costs of a model beside this target by its hash alone (`identity.model_of`), None where there are none.
    """
    given = _given(target, profile) if profile is not None else {}
    try:
        return given.get(model) or read(cache_file(key_of_hash(target, model)), machine_of(target)).get(model)
    except (OSError, NotAProfile):
        return None


def first_check(costs: Iterable[PassCosts], replayed: bool, profile: str | os.PathLike | None) -> float:
    """When costs that were just read are to be timed again, by the clock of checks."""
    told = _are_told(profile)
    return min((Check.of(one, replayed, told).due for one in costs), default=math.inf)


def affordable(seconds: float) -> float:
    """From when on building levels, which takes so many seconds, is little beside what this process has taken since it
    was started, by the clock of checks."""
    return monotonic() + max(seconds / _BUILDING_SHARE - process_time(), 0.0)


def age_of(costs: PassCosts) -> float:
    """Seconds since they were measured; 0 where that is not known, or the clock was set back since then."""
    return max(time() - costs.measured, 0.0) if costs.measured else 0.0


def _check(
    engine: Engine, target: Engine, kept: PassCosts, *, budget: float, prepare: bool, replayed: bool, disproved: bool,
    profile: str | os.PathLike | None,
) -> None:  # fmt: skip
    """Where it is due, time passes of few tokens, and of many where that is little or rounds have shown that kept
    costs do not hold; those of which one turns out to be less are measured anew, and each is the least ever measured.
    Where all take longer, time after time, they are measured anew, too, and what was kept is forgotten."""
    checks, key = state_of(engine.model).checks, _state_key(engine, replayed)
    check = checks.get(key)
    if check is None:
        check = checks[key] = Check.of(kept, replayed, _are_told(profile))
    anew = disproved and not check.disproved
    if disproved:
        check.disprove()
    if not is_due(check.due):
        return
    begin, how = monotonic(), {"prepare": prepare, "replayed": replayed}
    again = _timed_again(engine, kept, _MOST_ANEW if anew else _CHECK_SHARE * check.wait, {**how, "long": anew})
    ratios = [one / kept.of(float(count)) for count, one in zip(again.tokens, again.seconds, strict=True)]
    if again.attention and anew:
        ratios.append(again.attention / kept.attention if kept.attention else 1.0)
    check.slower = [*check.slower, again] if min(ratios) > 1.0 / DISTURBED else []
    if min(ratios) < DISTURBED:
        few = [count for count in FEW_TOKENS if count <= _MOST_AGAIN]
        found = measured(engine, budget=_AGAIN * budget, repeats=2, tokens=few, **how)
        keep(engine, kept.scaled(found).least(again).least(found), target, replayed)
    elif len(check.slower) >= _SLOWER:
        found = measured(engine, budget=budget, **how)
        keep(engine, reduce(lambda later, one: one.least(later), check.slower, found), target, replayed)
        check.slower = []
    elif not replayed:
        _hold(engine, kept, target, profile)
    check.again(monotonic() - begin)


def _timed_again(engine: Engine, kept: PassCosts, share: float, how: dict[str, bool]) -> PassCosts:
    """Passes of few tokens, and those of many that take no more than so many seconds, behind which there is time for
    what attention costs, too. Costs of many tokens may be wrong: a pass takes no more than several of fewer tokens."""
    few, seconds = _CHECK_TOKENS[-1], kept.of(float(_CHECK_TOKENS[-1]))
    takes = {count: _CHECK_PASSES * min(kept.of(float(count)), count / few * seconds) for count in _WIDE_TOKENS}
    wide = [count for count in _WIDE_TOKENS if count <= kept.tokens[-1] and takes[count] <= share]
    budget = sum(takes[count] for count in wide)
    return measured(engine, budget=budget, repeats=_CHECK_REPEATS, tokens=(*_CHECK_TOKENS, *wide), **how)


def _are_told(profile: str | os.PathLike | None) -> bool:
    """Whether other processes are told that costs held: the cache folder can be written, and there is no profile,
    which nobody writes but who asks for it."""
    return profile is None and can_be_kept()


def _hold(engine: Engine, kept: PassCosts, target: Engine, profile: str | os.PathLike | None) -> None:
    """Costs have stood a check; where they are those of the cache folder, other processes are told."""
    held = replace(kept, held=age_of(kept))
    if _are_told(profile) and _cached(engine, target, replayed=False) == kept:
        keep(engine, held, target)
    else:
        state_of(engine.model).costs[_state_key(engine, False)] = held


def is_due(at: float) -> bool:
    """Whether it is that late by the clock of checks."""
    return monotonic() >= at


def next_check(engines: Sequence[Engine], replayed: bool) -> float:
    """When the costs of one of these engines are to be timed again, by the clock of checks; never: infinity."""
    found = [state_of(engine.model).checks.get(_state_key(engine, replayed)) for engine in engines]
    return min([check.due for check in found if check is not None], default=math.inf)


def measured(
    engine: Engine,
    *,
    budget: float,
    repeats: int = 3,
    tokens: Sequence[int] = FEW_TOKENS,
    prepare: bool = True,
    step: Callable[[], None] = lambda: None,
    long: bool = True,
    replayed: bool = False,
) -> PassCosts:
    """Time forward passes of this engine's model, in a cache that is freed again. See `speculation.costs.measure`.

    long: the cost of attention, too. replayed: as they are inside captured rounds; the engine must be one that can be.
    """
    options = {"name": engine.name, "prepare": prepare, "num_positions": engine.max_positions}
    own = engine.trial() if isinstance(engine, HeadEngine) else engine_of(engine.model, **options, required=False)
    own.bits, own.cache_format = engine.bits, engine.kept_in
    models = [own.model] if own.can.by_module else []
    device = device_of(own.model)

    def run(count: int, slots: int) -> None:
        slots = 0 if own.can.by_module or own.can.stateful else slots  # it holds what was fed and nothing else
        own.lengths = [slots]
        row, guess = [1] * (slots + 1), [1] * (count - 1)
        if own.can.greedy_rounds:
            own.score([row], [guess])
        else:
            own.feed([row], Guess(torch.tensor([guess], device=device), [count - 1]) if guess else None)
        if device.type == "cuda":
            wait_for(device)

    most = own.max_positions or 2 * LONG
    how = {"budget": budget, "repeats": repeats, "step": step, "long": long and most > LONG + TOKENS[-1]}
    how["tokens"] = [count for count in tokens if count < most]
    with torch.inference_mode(), ragged_attention_on(models):
        if replayed:
            return measure(replays(own), **how, passes=PASSES)
        own.start(1, device)
        return measure(run, **how)


def keep(engine: Engine, found: PassCosts, target: Engine, replayed: bool = False) -> bool:
    """Keep costs for the next calls of this process and of others; False where the cache folder cannot be written or
    nothing tells the kernels from another build, with one warning for all models of a target's chains."""
    state_of(engine.model).costs[_state_key(engine, replayed)] = found
    try:
        write(
            cache_file(key_of(engine, replayed)),
            machine_of(engine),
            {model_of(engine, replayed): (type(engine.model).__name__, found)},
        )
    except OSError as error:
        said = f"measured costs are not kept for the next process: {error}"
        said += "" if isinstance(error, UnreadableLibrary) else f"; name a folder in {CACHE_VARIABLE}"
        say_once(target.model, said, kind="measured costs are not kept")
        return False
    return True


def _state_key(engine: Engine, replayed: bool) -> tuple:
    where = str(device_of(engine.model)), torch.get_num_threads()
    return replayed, engine.name, engine.bits, engine.dtype, engine.kept_in, *where


def _kept(engine: Engine, replayed: bool) -> PassCosts | None:
    return state_of(engine.model).costs.get(_state_key(engine, replayed))


def _given(target: Engine, profile: str | os.PathLike) -> dict[str, PassCosts]:
    try:
        return read(Path(profile), machine_of(target))
    except (NotAProfile, OSError) as error:
        say_once(target.model, f"profile is ignored, costs are measured anew: {error}")
        return {}


def _cached(engine: Engine, target: Engine, replayed: bool) -> PassCosts | None:
    try:
        path = cache_file(key_of(engine, replayed))
        return read(path, machine_of(engine)).get(model_of(engine, replayed))
    except OSError:  # there is no such file or no place for one, or the kernels cannot be told from others
        return None
    except NotAProfile as error:
        said = f"kept costs are ignored and measured anew: {error}"
        say_once(target.model, said, kind="kept costs are ignored")
        return None
