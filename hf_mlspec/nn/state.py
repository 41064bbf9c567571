"""What does the package remember of a model: what was built over it, what is kept for it, what was said of it?"""

from __future__ import annotations

import logging
import threading
import weakref
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
    chains: captured rounds of this target, the one used last behind the others.
    last_stats: the counts of its last call of generate with levels.
    warnings: what was said of it already.
    Nothing here may hold the model itself.
    """

    prepared: bool = False
    engine: str | None = None
    decoders: dict[type, tuple[tuple, Any]] = field(default_factory=dict)
    levels: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    chains: list[Any] = field(default_factory=list)
    last_stats: Any = None
    warnings: set[str] = field(default_factory=set)

    def drop_engines(self) -> None:
        """Let go of the decoders built over the model, and of the memory behind them; the next call builds anew."""
        self.decoders.clear()

    def clear(self) -> None:
        """Let go of everything but that the model is prepared, and the decoders of one that is."""
        if not self.prepared:
            self.drop_engines()
        self.levels.clear()
        self.chains.clear()
        self.last_stats = None
        self.warnings.clear()


# Of the models that were seen already; `state_of` also makes a new one.
states: weakref.WeakKeyDictionary[nn.Module, ModelState] = weakref.WeakKeyDictionary()
_adding = threading.RLock()  # threads that ask for the same state get one; a finalizer may ask in between


def state_of(model: nn.Module) -> ModelState:
    """The model's state: it lives as long as the model, and is empty when first asked for."""
    with _adding:
        return states.setdefault(model, ModelState())


def is_prepared(model: nn.Module) -> bool:
    """Whether the user called `prepare` on the model."""
    return state_of(model).prepared


def say_once(model: nn.Module, message: str, *, kind: str | None = None) -> None:
    """Log a warning the first time that this, or anything of this kind, is said of this model."""
    warnings, kind = state_of(model).warnings, kind or message
    if kind not in warnings:
        warnings.add(kind)
        logger.warning("%s", message)
