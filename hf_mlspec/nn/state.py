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
    kept: what the rooms above keep for the next call, each under a name of its own. It must not hold the model.
    warnings: what was said of it already.
    """

    prepared: bool = False
    engine: str | None = None
    decoders: dict[type, tuple[tuple, Any]] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    warnings: set[str] = field(default_factory=set)

    def drop_engines(self) -> None:
        """Let go of the decoders built over the model, and of the memory behind them; the next call builds anew."""
        self.decoders.clear()

    def drop_kept(self) -> None:
        """Let go of everything that is kept for the next call."""
        self.kept.clear()


# Of the models that were seen already; `state_of` also makes a new one.
states: weakref.WeakKeyDictionary[nn.Module, ModelState] = weakref.WeakKeyDictionary()
_adding = threading.Lock()  # threads that ask for the same state get one


def state_of(model: nn.Module) -> ModelState:
    """The model's state: it lives as long as the model, and is empty when first asked for."""
    with _adding:
        return states.setdefault(model, ModelState())


def is_prepared(model: nn.Module) -> bool:
    """Whether the user called `prepare` on the model."""
    return state_of(model).prepared


def say_once(model: nn.Module, message: str) -> None:
    """Log a warning the first time that this is said of this model."""
    warnings = state_of(model).warnings
    if message not in warnings:
        warnings.add(message)
        logger.warning("%s", message)
