"""Does a call choose its draft lengths itself, and if so from which costs, chances and memories?"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

from transformers import PreTrainedModel

from ..engines.engine import Engine
from ..nn.state import say_once
from ..nn.switch import precision_switch
from ..ops.attention_plain import FIRST_SLOTS
from ..speculation.chain import Chain
from ..speculation.controller import Controller
from ..speculation.costs import PassCosts
from ..speculation.deferred import inside
from ..speculation.fixed_rounds import FixedExpectations
from ..speculation.fixed_shapes import Captured, Captures, FixedController
from ..speculation.memory import LevelCosts, Memory
from ..speculation.openings import Openings
from ..speculation.plans import MOST_LEVELS, Situation, names_of
from ..speculation.rounds.planning import KeptGraphs
from ..speculation.shelf import Outlook, Shelf, Shelving
from ..speculation.stats import SpeculationStats
from .config import DRAFT_WINDOW, SpeculationConfig
from .costs.learned import learned_of, write_what_is_due
from .costs.probe import costs_of, is_due, next_check
from .known import Known, describe, remember, spared
from .levels.resolve import Level
from .levels.wiring import Wiring

# The chance that a drafted token is kept, by the kind of level, until rounds have shown it.
_LOWER_PRECISION, _SAME_WEIGHTS, _EARLY_EXIT, _OTHER_MODEL, _FOREIGN, _LOOKUP = 0.85, 0.92, 0.4, 0.65, 0.45, 0.35
_ROUNDS_TO_JUDGE = 64  # of a call, before a level that never pays is named
_RARELY = 0.05
_TWINS = 2  # times the levels, at most, that a controller knows of: without a draft window and with it


def let_choose(wiring: Wiring, levels: list[Level], settings: str) -> Chain:
    """The chain of these levels, with a controller for its rounds where nobody named lengths.

    settings: what else decides which drafts are kept, such as sampling; what was learned is kept for calls that have
    the same levels and settings.
    """
    chain = wiring.build(levels)
    if wiring.chooses:
        chain.controller = partial(controller_of, wiring, levels, chain, settings)
        chain.seen = _seen_by_choice(wiring, chain)
        key = _key(wiring, levels, chain, settings)
        if chain.target.runner.can.bit_exact:  # else plans follow counts, and a call repeats itself
            chain.openings = wiring.state.openings.setdefault(key, Openings())
            if is_due(chain.openings.due):
                chain.openings.doubt()
        if chain.target.runner.can.capturable:
            shelf = wiring.state.shelved.setdefault(key, Shelf())
            chain.shelving = Shelving(shelf, partial(_outlook, wiring, levels, chain, settings))
        remember(wiring, levels, chain, key)
    return chain


def chain_without_levels(
    wiring: Wiring, rows: list[list[int]] | None, new_tokens: int, resolved: Callable[[], list[Level]]
) -> Chain | None:
    """The chain of a call that may end without its levels, which are then not built; None where they are to be. rows:
    None for a stream."""

    def choosing(known: Known, chain: Chain) -> Controller:
        return _controller(wiring, chain, known.key, *known.costs[True], Captured())

    found = spared(wiring, rows, new_tokens, resolved, choosing)
    if found is None:
        wiring.began = perf_counter()
        return None
    known, chain = found
    if chain.left_off is None:
        chain.openings = wiring.state.openings.setdefault(known.key, Openings())
        chain.controller = partial(_controller, wiring, chain, known.key, *known.costs[False])
    return chain


def controller_of(
    wiring: Wiring, levels: list[Level], chain: Chain, settings: str, captures: Captures | None = None
) -> Controller:
    """What chooses for this chain, its costs measured where they are not known; see `let_choose`.

    captures: of rounds that are replayed; None: rounds of the host.
    """
    begin = perf_counter()
    own, told = _costs(wiring, levels, chain, captures is not None)
    known = wiring.state.known.get(wiring.asked)
    if known is not None:
        known.costs[captures is not None] = own, told
        describe(wiring, chain, known, captures is not None)
        if isinstance(captures, KeptGraphs):
            known.captured = weakref.ref(captures.chain)
    measuring = perf_counter() - begin
    made = _controller(wiring, chain, _key(wiring, levels, chain, settings), own, told, captures)
    made.measuring = measuring
    return made


def _controller(
    wiring: Wiring, chain: Chain, chain_key: tuple, own: PassCosts, told: list[LevelCosts],
    captures: Captures | None = None,
) -> Controller:  # fmt: skip
    """As `controller_of`, where costs are known. chain_key: of what calls of this chain learn."""
    target, memories, key = chain.target.runner, wiring.state.memories, (*chain_key, captures is not None)
    exact = target.can.bit_exact
    learned = wiring.state.learned.get(key) if exact else None
    if exact and key not in wiring.state.learned:  # None is kept, too
        learned = learned_of(target, captures is not None, key, _TWINS * len(chain.names))
        wiring.state.learned[key] = learned
    memory = memories.get(key) if exact else None
    memory = memory.kept() if memory is not None else learned and learned.read()
    how = {"by_clock": exact, "memory": memory, "seen": chain.seen}
    if captures is None:
        made = Controller(own, told, **how)
    else:
        made = FixedController(own, told, captures=captures, **how)
        chain.waiting = made.waiting
    if chain.openings is not None:
        made.on_disproved = partial(chain.openings.disprove, by_trial=True)
    if chain.openings is not None and chain.deferred is None:
        engines = [target, *filter(None, chain.runners)]
        chain.openings.due = next_check(engines, replayed=captures is not None)
    memories[key] = made.memory
    if learned is not None:
        learned.memory = made.memory
    return made


def _costs(wiring: Wiring, levels: list[Level], chain: Chain, replayed: bool) -> tuple[PassCosts, list[LevelCosts]]:
    """Of the target, and what a controller is told of each level, and again of each with a draft window where it may
    choose one. replayed: inside captured rounds."""
    config, target = wiring.config, chain.target.runner
    engines = [runner for runner in chain.runners if runner is not None]
    how = {"profile": config.profile, "prepare": config.prepare, "replayed": replayed}
    openings = chain.openings
    disproved = openings is not None and (openings.by_trial or (openings.disproved and not replayed))
    own, *costs = costs_of(target, engines, disproved=disproved, **how)
    of_levels = iter(costs)
    told = [
        LevelCosts(
            level.name,
            _seen(next(of_levels), runner.draft_window) if runner is not None else None,
            prior(level, wiring.model, joined),
            own_cache=runner is not None and runner.follow is None,
            joined=joined,
        )
        for level, runner, joined in zip(levels, chain.runners, chain.joined, strict=True)
    ]
    return own, _windowed(told, chain) if chain.seen else told


def _seen_by_choice(wiring: Wiring, chain: Chain) -> int:
    """Slots that a draft window leaves in view where a controller may choose one, or 0."""
    can = any(runner is not None and runner.can.draft_window for runner in chain.runners)
    return FIRST_SLOTS + DRAFT_WINDOW if can and wiring.config.draft_window is None else 0


def _windowed(told: list[LevelCosts], chain: Chain) -> list[LevelCosts]:
    """Levels as they are, and again with a draft window."""
    count = len(told)
    can = [runner is not None and runner.can.draft_window for runner in chain.runners]
    whole = [replace(level, twin=index + count) for index, level in enumerate(told)]
    windowed = [
        replace(level, twin=index, costs=_seen(level.costs, DRAFT_WINDOW) if can[index] else level.costs)
        for index, level in enumerate(told)
    ]
    return whole + windowed


def _seen(costs: PassCosts, draft_window: int) -> PassCosts:
    """Costs of a level with a draft window, 0 for none."""
    return replace(costs, most_slots=FIRST_SLOTS + draft_window) if draft_window else costs


def _outlook(
    wiring: Wiring, levels: list[Level], chain: Chain, settings: str, lengths: list[int], new_tokens: int
) -> Outlook:
    """What a call of rows of these lengths loses with levels that run step by step."""
    rows, slots = len(lengths), sum(lengths) / len(lengths) + new_tokens / 2
    own, told = _costs(wiring, levels, chain, replayed=False)
    memory = wiring.state.memories.get((*_key(wiring, levels, chain, settings), False))
    positions = [getattr(inside(level), "max_positions", None) or max(lengths) for level in chain.levels]
    positions *= len(told) // len(positions)
    missing = [[min(n, most) * level.own_cache for n in lengths] for level, most in zip(told, positions, strict=True)]
    controller = Controller(own, told, by_clock=chain.target.runner.can.bit_exact, memory=memory and memory.kept(),
                            seen=chain.seen)  # fmt: skip
    controller.start(rows)
    tokens, seconds = controller.outlook(Situation([new_tokens - 1] * rows, slots, missing))
    off_speed = captured_speed(chain.target.runner, wiring.config, rows, slots)
    return Outlook(seconds - tokens / off_speed, off_speed)


def captured_speed(target: Engine, config: SpeculationConfig, rows: int, slots: float) -> float:
    """Tokens a second that captured rounds of the target alone are expected to write; its costs are measured where
    they are not known."""
    (costs,) = costs_of(target, [], profile=config.profile, prepare=config.prepare, replayed=True)
    return FixedExpectations(costs, [], Memory(), corrected=False).off(rows, slots).speed


def _key(wiring: Wiring, levels: list[Level], chain: Chain, settings: str) -> tuple:
    kept = [runner.kept_in for runner in (chain.target.runner, *chain.runners) if runner is not None]
    formats = tuple(None if one is None else one.word for one in kept)
    caches = wiring.config.draft_window, formats
    return (chain.target.runner.name, settings, caches, *(_identity(level) for level in levels))


def _identity(level: Level) -> tuple[str, str]:
    """What tells a level from others of its name."""
    return level.name, "" if level.model is None else str(level.model.config.name_or_path)


def prior(level: Level, target: PreTrainedModel, joined: bool) -> float:
    """The chance that a token of this kind of level is kept, before anything is known."""
    if level.drafter is not None:
        return _LOOKUP
    if level.bits is not None:
        return _LOWER_PRECISION if level.bits.weight < precision_switch(target).bits.weight else _SAME_WEIGHTS
    if level.shape_of_target:
        layers = [getattr(one.config, "num_hidden_layers", 0) for one in (level.model, target)]
        return _EARLY_EXIT if layers[0] < layers[1] else _LOWER_PRECISION
    return _OTHER_MODEL if joined else _FOREIGN


def tell_what_never_pays(model: PreTrainedModel, chain: Chain, stats: SpeculationStats) -> None:
    """Name each level that hardly took part in a long call, once, with the speeds that spoke against it. What calls
    learned is written for other processes, where that is due, and costs that rounds disprove are to be timed again."""
    if stats.plans:
        write_what_is_due()
    chooses = None if chain.steering is None else chain.steering.controller
    if chooses is not None and chain.openings is not None and chooses.disproves_costs:
        chain.openings.disprove()
    if chain.shelving is not None and chain.shelving.left_out:
        names = " + ".join(chain.names)
        say_once(
            model,
            f"a call left {names} out: rounds with them cannot be captured, and captured rounds of the target alone "
            "are expected to be faster",
            kind=f"left {names} out",
        )
        return
    rounds = sum(plan.rounds for plan in stats.plans.values())
    if rounds < _ROUNDS_TO_JUDGE:
        return
    if chain.steering is not None and chain.steering.failed:
        return
    for index, name in enumerate(chain.names[:MOST_LEVELS]):
        if index in chain.waiting:
            continue
        took_part = sum(plan.rounds for words, plan in stats.plans.items() if name in names_of(words))
        if took_part <= _RARELY * rounds:
            say_once(
                model,
                f"level {name} took part in {took_part} of {rounds} rounds: it does not pay here. "
                f"{stats.tokens_per_second:.0f} tokens a second were written, {stats.gain_over_off:.2f} times what "
                "the target alone is expected to write; leave the level out to save its memory",
                kind=f"level {name} does not pay",
            )
