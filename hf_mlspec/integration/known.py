"""Which chains were built before, so that a call need not build their levels until a plan uses them?

A first call builds all levels: they are checked, and their passes are timed. A later one with the same levels, target
and options asks the costs that are known, also one in a process that finds a description of the chain
(costs/known_file.py). Where it begins with "off" it has the target alone, and the controller calls for the levels when
they are worth it. What is wrong with a level is found in its first call; what may have changed since then, such as a
model that was moved to another device, is looked at in every call.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from ..engines.built import device_of
from ..nn.state import ModelState
from ..speculation.chain import Chain
from ..speculation.controller import Controller
from ..speculation.costs import PassCosts
from ..speculation.deferred import Built, Deferred, Kind
from ..speculation.memory import LevelCosts
from ..speculation.openings import Openings, alike
from ..speculation.plans import Situation
from ..speculation.rounds.planning import ends_unquestioned
from ..speculation.search import Choice
from ..speculation.shelf import are_kept
from .config import SpeculationConfig
from .costs.known_file import (
    Given,
    any_known,
    as_tuple,
    described,
    file_of,
    read_description,
    told_of,
    write_description,
)
from .costs.probe import affordable, costs_of, first_check, is_due
from .levels.resolve import Level
from .levels.wiring import Wiring

_LENGTHS = "num_assistant_tokens", "assistant_confidence_threshold"  # of a level's generation_config, obeyed where set
_BUILDING_SHARE = 0.02  # of the time may go to building levels that what is known rules out
_MOST_KNOWN = 64  # chains of a target
_MOST_CALLS = 8  # in captured rounds that do without levels that were never built here, until one builds them


@dataclass
class Known:
    """A chain that was built.

    names, kinds, follows: as of `Deferred`. seen: as of `Chain`. key: of what calls learn. held: models and tokenizers
    that were given; decoder: of the target as it stood. costs: of the target and the levels, by whether they are of
    passes inside captured rounds; captured: those rounds, where there are any. file: where other processes find it,
    None: nowhere; described: for which of these rounds it is there. seconds: what building the levels took, where this
    process has not built them; left_off: the calls that it chose "off" for, and what it chose, by what they have in
    common.
    """

    names: list[str]
    kinds: list[Kind]
    follows: bool
    seen: int
    key: tuple
    held: list[weakref.ref]
    decoder: weakref.ref
    is_captured: bool
    costs: dict[bool, tuple[PassCosts, list[LevelCosts]]] = field(default_factory=dict)
    captured: Callable[[], Any] = lambda: None
    file: Path | None = None
    described: set[bool] = field(default_factory=set)
    seconds: float = 0.0
    left_off: dict[tuple, tuple[int, Choice]] = field(default_factory=dict)

    def stands(self, model: PreTrainedModel, levels: Sequence[Any]) -> bool:
        """Whether what was given is there as it was, as far as it takes no walk over a model."""
        place = device_of(model)
        models = [level for level in levels if isinstance(level, PreTrainedModel)]
        given = [getattr(level.generation_config, name, None) for level in models for name in _LENGTHS]
        there = all(ref() is not None for ref in self.held) and all(device_of(level) == place for level in models)
        return there and all(length is None for length in given)

    def begins_with(self, openings: Openings, rows: list[list[int]], new_tokens: int) -> Choice | None:
        """What a call like this one begins with in rounds of the host, None where it is to choose."""
        lengths = [len(row) + self.follows for row in rows]
        found = openings.found.get(alike(lengths, [new_tokens - 1 - self.follows], self.seen))
        return None if found is None or found.calls >= found.until else found.choice

    def stays_off(self, rows: list[list[int]], new_tokens: int, make: Callable[[], Controller]) -> Choice | None:
        """What a call in captured rounds begins and ends with, where its levels were never built here and building
        them takes more than asking them may; None where they are to be built. make: what chooses, from what is known.
        """
        slots = sum(map(len, rows)) / len(rows)
        like = len(rows), new_tokens.bit_length(), int(slots).bit_length()
        calls, choice = self.left_off.get(like, (0, None))
        if choice is None:
            missing = [[len(row) * level.own_cache for row in rows] for level in self.costs[True][1]]
            made = make()
            made.start(len(rows))
            choice = made.best_of(Situation([new_tokens - 1] * len(rows), slots + new_tokens / 2, missing))
        self.left_off[like] = calls + 1, choice
        seconds = len(rows) * new_tokens / choice.off_speed
        spared = calls < _MOST_CALLS and self.seconds > _BUILDING_SHARE * seconds
        return choice if spared and not choice.plan.active else None


def given_of(
    levels: Sequence[Any], tokenizers: Sequence[Any] | None, tokenizer: Any, config: SpeculationConfig, settings: str
) -> Given | None:
    """What a call was given, where its levels may be known; None where every call builds them, as nothing is chosen or
    a router chooses."""
    chosen = config.num_draft_tokens is config.confidence_threshold is config.router is config.tree is None
    lists = isinstance(levels, (list, tuple)) and isinstance(tokenizers, (list, tuple, type(None)))
    if not chosen or not lists or not levels:
        return None
    if not all(isinstance(level, (str, os.PathLike, PreTrainedModel)) for level in levels):
        return None
    return Given(levels, tokenizers, tokenizer, (settings, repr(config)))


def remember(wiring: Wiring, levels: list[Level], chain: Chain, key: tuple) -> None:
    """The chain of these levels was built."""
    wiring.building = perf_counter() - wiring.began
    runners = [chain.target.runner, *filter(None, chain.runners)]
    decoder = getattr(runners[0], "decoder", None)
    # A router chooses by the prompt, and a head reads hidden states that the target writes from the first token on.
    needed = any(level.router is not None or level.is_head for level in levels)
    if wiring.asked is None or decoder is None or needed or not all(runner.can.bit_exact for runner in runners):
        return
    before = wiring.state.known.get(wiring.asked)
    before = before if before is not None and before.decoder() is decoder else None
    _keep(wiring, Known(
        [level.name for level in chain.levels],
        list(map(Kind.of, chain.levels, chain.runners)),
        bool(getattr(chain.drafter, "follows", False)),
        chain.seen,
        key,
        list(map(weakref.ref, filter(_is_object, wiring.given.objects))),
        weakref.ref(decoder),
        runners[0].can.capturable,
        file=before.file if before else file_of(runners[0], wiring.given),
        described=before.described if before else set(),
    ))  # fmt: skip


def _keep(wiring: Wiring, known: Known | None) -> None:
    """What is known of the levels of a call, None where no other process knows anything. Those of which calls asked
    longest ago are forgotten: every model that is given as a level has entries of its own."""
    all_ = wiring.state.known
    all_.pop(wiring.asked, None)
    for oldest in list(all_)[: max(len(all_) + 1 - _MOST_KNOWN, 0)]:
        all_.pop(oldest, None)  # another thread may have been faster
    all_[wiring.asked] = known


def _is_object(one: Any) -> bool:
    return one is not None and not isinstance(one, (str, os.PathLike))


def describe(wiring: Wiring, chain: Chain, known: Known, replayed: bool) -> None:
    """Costs of this chain are known from now on: other processes begin with that."""
    if known.file is None or replayed in known.described:
        return
    known.described.add(replayed)
    _, told = known.costs[replayed]
    write_description(known.file, chain.target.runner, {
        "names": known.names,
        "kinds": [[kind.reads, kind.positions] for kind in known.kinds],
        "follows": known.follows,
        "seen": known.seen,
        "key": known.key,
        "captured": replayed,
        "levels": described(told, chain.runners, replayed),
        "seconds": wiring.building,
    })  # fmt: skip


def _found(wiring: Wiring, chain: Chain) -> Known | None:
    """What another process knew of the levels of a call; None where nothing is known, or not their costs. chain: of
    the target alone."""
    target, given = chain.target.runner, wiring.given
    decoder = getattr(target, "decoder", None)
    file = file_of(target, given) if decoder is not None else None
    found = read_description(file, target) if file is not None else None
    if found is None or (replayed := found["captured"]) != target.can.capturable:
        return None
    told = told_of(target, found["levels"], replayed, wiring.config.profile)
    if told is None:
        return None
    kinds = [Kind(reads, positions) for reads, positions in found["kinds"]]
    held = list(map(weakref.ref, filter(_is_object, given.objects)))
    key, seconds = as_tuple(found["key"]), found["seconds"]
    known = Known(found["names"], kinds, found["follows"], found["seen"], key, held, weakref.ref(decoder), replayed,
                  file=file, described={replayed}, seconds=seconds)  # fmt: skip
    (own,) = costs_of(target, [], profile=wiring.config.profile, prepare=wiring.config.prepare, replayed=replayed)
    known.costs[replayed] = own, told
    costs = [own, *(level.costs for level in told if level.costs is not None)]
    openings = wiring.state.openings.setdefault(key, Openings())
    openings.affordable = monotonic() + seconds / _BUILDING_SHARE if replayed else affordable(seconds)
    openings.due = max(first_check(costs, replayed, wiring.config.profile), openings.affordable)
    wiring.state.known[wiring.asked] = known
    return known


def spared(
    wiring: Wiring, rows: list[list[int]] | None, new_tokens: int, resolved: Callable[[], list[Level]],
    choosing: Callable[[Known, Chain], Controller],
) -> tuple[Known, Chain] | None:  # fmt: skip
    """The chain of a call that begins without its levels, and what is known of it; None where they are to be built.

    rows: None for a stream. resolved: gives the levels. choosing: makes what chooses for captured rounds. In captured
    rounds a call has its levels or not: it has none where it ends before it would have chosen anew.
    """
    state: ModelState = wiring.state
    known, chain = state.known.get(wiring.asked), None
    if wiring.asked is None or are_kept():
        return None
    if wiring.asked not in state.known and any_known():
        _keep(wiring, None)
        known = _found(wiring, chain := wiring.build([]))
    openings = None if known is None else state.openings.get(known.key)
    if openings is None or is_due(openings.due) or not known.stands(wiring.model, wiring.given.levels):
        return None
    chain = chain or wiring.build([])
    if getattr(chain.target.runner, "decoder", None) is not known.decoder():
        return None  # the target was changed
    build = partial(_build, wiring, known, chain, resolved)
    chain.seen, chain.deferred = known.seen, Deferred(known.names, known.kinds, known.follows, build, known.seconds)
    if known.is_captured:
        chain.left_off = _left_off(known, rows, new_tokens, partial(choosing, known, chain))
        if chain.left_off is None:
            return None
    elif False not in known.costs or _begins(known, openings, rows, new_tokens):
        return None
    return known, chain


def _left_off(
    known: Known, rows: list[list[int]] | None, new_tokens: int, make: Callable[[], Controller]
) -> Choice | None:
    """What a call in captured rounds begins and ends with, None where its levels are to be there."""
    if rows is None:  # rounds of a stream go on, whatever comes
        return None
    if True in known.costs and known.seconds:
        return known.stays_off(rows, new_tokens, make)
    return ends_unquestioned(known.captured(), list(map(len, rows)), new_tokens)


def _begins(known: Known, openings: Openings, rows: list[list[int]] | None, new_tokens: int) -> bool:
    """Whether a call begins with its levels."""
    choice = None if rows is None else known.begins_with(openings, rows, new_tokens)
    return choice is not None and bool(choice.plan.active)


def _build(wiring: Wiring, known: Known, chain: Chain, resolved: Callable[[], list[Level]]) -> Built:
    """The levels of a chain that has done without them; whoever watches the counts of the call sees theirs."""
    with torch.inference_mode(False):  # weights that are made now count their changes
        wiring.build_below(chain, resolved())
    chain.deferred, known.seconds = None, 0.0
    if chain.on_built is not None:
        chain.on_built(chain.drafter)
    if chain.watched is not None:
        chain.watched.levels[:] = chain.counts
    return Built(chain.drafter, chain.levels, chain.runners, chain.samplers[1:])
