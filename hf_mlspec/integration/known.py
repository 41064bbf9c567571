"""Which chains were built before, so that a call need not build their levels until a plan uses them?

A first call builds all levels: they are checked, and their passes are timed. A later one with the same levels, target
and options asks the costs that are known. Where it begins with "off" it has the target alone, and the controller calls
for the levels when they are worth it. What is wrong with a level is found in its first call; what may have changed
since then, such as a model that was moved to another device, is looked at in every call.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..engines.built import device_of
from ..nn.state import ModelState, state_of
from ..speculation.chain import Chain
from ..speculation.costs import PassCosts
from ..speculation.deferred import Built, Deferred, Kind
from ..speculation.memory import LevelCosts, Openings
from ..speculation.rounds.planning import ends_unquestioned
from ..speculation.rounds.steering import alike
from ..speculation.search import Choice
from ..speculation.shelf import are_kept
from .config import SpeculationConfig
from .costs.probe import is_due
from .levels.resolve import Level
from .levels.wiring import Wiring

_LENGTHS = "num_assistant_tokens", "assistant_confidence_threshold"  # of a level's generation_config, obeyed where set


@dataclass
class Known:
    """A chain that was built.

    names, kinds, follows: as of `Deferred`. seen: as of `Chain`. key: of what calls learn. held: models and tokenizers
    that were given; decoder: of the target as it stood. costs: of the target and the levels, by whether they are of
    passes inside captured rounds; captured: those rounds, where there are any.
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


def asked_of(
    levels: Sequence[Any], tokenizers: Sequence[Any] | None, tokenizer: Any, config: SpeculationConfig, settings: str
) -> tuple | None:
    """What tells the levels of a call from those of others; None for levels that every call has to build."""
    if not isinstance(levels, (list, tuple)) or not levels or config.router is not None:
        return None
    if not all(isinstance(level, (str, os.PathLike, PreTrainedModel)) for level in levels):
        return None
    given = [(type(one), os.fspath(one)) if isinstance(one, (str, os.PathLike)) else id(one) for one in levels]
    return (settings, repr(config), id(tokenizer), tuple(map(id, tokenizers or ())), *given)


def remember(wiring: Wiring, levels: list[Level], chain: Chain, key: tuple, held: Sequence[Any]) -> None:
    """The chain of these levels was built. held: models and tokenizers that the call was given."""
    runners = [chain.target.runner, *filter(None, chain.runners)]
    decoder = getattr(runners[0], "decoder", None)
    # A router chooses by the prompt, and a head reads hidden states that the target writes from the first token on.
    needed = any(level.router is not None or level.is_head for level in levels)
    if wiring.asked is None or decoder is None or needed or not all(runner.can.bit_exact for runner in runners):
        return
    wiring.state.known[wiring.asked] = Known(
        [level.name for level in chain.levels],
        list(map(Kind.of, chain.levels, chain.runners)),
        bool(getattr(chain.drafter, "follows", False)),
        chain.seen,
        key,
        list(map(weakref.ref, filter(_is_object, held))),
        weakref.ref(decoder),
        runners[0].can.capturable,
    )


def _is_object(one: Any) -> bool:
    return one is not None and not isinstance(one, (str, os.PathLike))


def spared(
    wiring: Wiring, levels: Sequence[Any], rows: list[list[int]], new_tokens: int, resolved: Callable[[], list[Level]]
) -> tuple[Known, Chain] | None:
    """The chain of a call that begins without its levels, and what is known of it; None where they are to be built.

    resolved: gives the levels. In captured rounds a call has its levels or not: it has none where it ends before it
    would have chosen anew.
    """
    state: ModelState = wiring.state
    known = state.known.get(wiring.asked)
    openings = None if known is None else state.openings.get(known.key)
    if openings is None or are_kept() or is_due(openings.due) or not known.stands(wiring.model, levels):
        return None
    first = None
    if known.is_captured:
        first = ends_unquestioned(known.captured(), list(map(len, rows)), new_tokens)
        if first is None:
            return None
    elif False not in known.costs or (
        (choice := known.begins_with(openings, rows, new_tokens)) is not None and choice.plan.active
    ):
        return None
    chain = wiring.build([])
    if getattr(chain.target.runner, "decoder", None) is not known.decoder():
        return None  # the target was changed
    chain.seen, chain.left_off = known.seen, first
    chain.deferred = Deferred(known.names, known.kinds, known.follows, partial(_build, wiring, chain, resolved))
    return known, chain


def _build(wiring: Wiring, chain: Chain, resolved: Callable[[], list[Level]]) -> Built:
    """The levels of a chain that has done without them; whoever watches the counts of the call sees theirs."""
    with torch.inference_mode(False):  # weights that are made now count their changes
        wiring.build_below(chain, resolved())
    chain.deferred = None
    watched = state_of(wiring.model).last_stats
    if watched is not None:
        watched.levels[:] = [level.stats for level in chain.levels]
    return Built(chain.drafter, chain.levels, chain.runners, chain.samplers[1:])
