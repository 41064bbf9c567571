"""How do the runners of a chain get the caches of its captured rounds?"""

from __future__ import annotations

from ...engines.rows import DecoderCache
from ..checker import Checker
from ..draft import Drafter
from ..drafters.model import ModelDrafter
from ..traces.recorder import checkers
from .chain import CapturedChain


def adopt(chain: CapturedChain, target: Checker, drafter: Drafter | None, rows: int) -> None:
    """The chain's caches become those of its runners for a call of so many rows."""
    for runner, level in zip(_runners(target, drafter), chain.with_models, strict=True):
        how = {"cache_format": level.cache_format, "dtype": level.decoder.dtype}
        runner.cache, runner.lengths = DecoderCache(level.kv, rows, **how), [0] * rows
        runner.states = level.states if level.own_cache else None
        runner.settled = [None] * rows


def disown(target: Checker, drafter: Drafter | None) -> None:
    """No runner holds a cache, so that a chain's can be freed."""
    for runner in _runners(target, drafter):
        runner.cache = runner.states = None


def drafters(drafter: Drafter | None) -> list[Drafter]:
    """Who drafts, outermost first."""
    found = []
    while drafter is not None:
        found.append(drafter)
        drafter = getattr(drafter, "inner", None)
    return found


def _runners(target: Checker, drafter: Drafter | None) -> list:
    """Those of all levels, the target's first."""
    last = [one.runner for one in drafters(drafter) if isinstance(one, ModelDrafter)]
    return [checker.runner for checker in checkers(target, drafter)] + last
