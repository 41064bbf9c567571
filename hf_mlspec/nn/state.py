"""Which state does the package keep per model: engines, levels, statistics, and warnings already given?"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


@dataclass
class ModelState:
    """Of one model; a deep copy of the model has a state of its own, which is empty.

    prepared: the user called `prepare` on it. engine: the engine asked for there, None: the fastest.
    decoders: by class, the decoder and the weights' fingerprint that it was built over.
    levels: by word and options, what was built from level words for this target and the fingerprint it was built over.
    costs: by engine, bits and threads, what a forward pass costs. checks: by the same, when that is timed again.
    memories: by a chain's levels, what its controller learned in earlier calls. learned: by the same, the file that
        keeps this for other processes. shelved: by the same, what is known of calls that left the levels out.
        openings: by the same, what calls begin with.
    known: by what calls name of their levels, what is known of the chain of those.
    chains: captured rounds of this target, the one used last behind the others.
    last_stats: the counts of its last call of generate with levels.
    alike: the fingerprint at which all processes that share its target had the same weights of it.
    warnings: those already given.
    Nothing here may hold the model itself.
    """

    prepared: bool = False
    engine: str | None = None
    decoders: dict[type, tuple[tuple, Any]] = field(default_factory=dict)
    levels: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    costs: dict[tuple, Any] = field(default_factory=dict)
    checks: dict[tuple, Any] = field(default_factory=dict)
    memories: dict[tuple, Any] = field(default_factory=dict)
    learned: dict[tuple, Any] = field(default_factory=dict)
    shelved: dict[tuple, Any] = field(default_factory=dict)
    openings: dict[tuple, Any] = field(default_factory=dict)
    known: dict[tuple, Any] = field(default_factory=dict)
    chains: list[Any] = field(default_factory=list)
    last_stats: Any = None
    alike: tuple | None = None
    warnings: set[str] = field(default_factory=set)

    def drop_engines(self) -> None:
        """Free the decoders built over the model and their memory; the next call builds them again."""
        self.decoders.clear()
        self.costs.clear()
        self.checks.clear()
        self.openings.clear()
        self.known.clear()

    def clear(self) -> None:
        """Free everything, except that a prepared model stays prepared and keeps its decoders."""
        if not self.prepared:
            self.drop_engines()
        self.levels.clear()
        self.costs.clear()
        self.checks.clear()
        self.memories.clear()
        self.learned.clear()
        self.shelved.clear()
        self.openings.clear()
        self.known.clear()
        self.chains.clear()
        self.last_stats, self.alike = None, None
        self.warnings.clear()


states: weakref.WeakKeyDictionary[nn.Module, ModelState] = weakref.WeakKeyDictionary()


def state_of(model: nn.Module) -> ModelState:
    """The model's state: it lives as long as the model, and is empty when first asked for.

    Threads that ask for the same one get one, without a lock: one would be held while garbage is collected, whose
    finalizers take others.
    """
    return states.get(model) or states.setdefault(model, ModelState())


def states_of(models: Iterable[nn.Module]) -> list[ModelState]:
    """`state_of` each of them."""
    return [state_of(model) for model in models]


def is_prepared(model: nn.Module) -> bool:
    """Whether the user called `prepare` on the model."""
    return state_of(model).prepared


def say_once(model: nn.Module, message: str, *, kind: str | None = None) -> None:
    """Log a warning unless it, or one of the same kind, was already given for this model."""
    warnings, kind = state_of(model).warnings, kind or message
    if kind not in warnings:
        warnings.add(kind)
        logger.warning("%s", message)
