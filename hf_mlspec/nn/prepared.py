"""Which decoders were built over which model, and are they still true?"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..precision import Bits
from .packed import PackedLinear
from .replace import fingerprint
from .switch import PrecisionSwitch

logger = logging.getLogger(__name__)
Decoder = TypeVar("Decoder")


@dataclass
class Prepared:
    """What is remembered of a model: its decoder of each kind with the state it was built over, and who asked."""

    decoders: dict[type, tuple[tuple, object]] = field(default_factory=dict)
    asked: bool = False  # by the user, not by a call with levels


_prepared: weakref.WeakKeyDictionary[nn.Module, Prepared] = weakref.WeakKeyDictionary()
_said: set[str] = set()
_building = threading.Lock()  # threads that ask for the same decoder get one
# Held while a graph is captured, and where somebody waits for a whole device, which would spoil the capture.
capturing = threading.Lock()


def is_prepared(model: nn.Module) -> bool:
    """Whether the user called `prepare` on the model."""
    entry = _prepared.get(model)
    return entry is not None and entry.asked


def remember(model: nn.Module) -> None:
    """The user asked for compiled steps of this model."""
    _prepared.setdefault(model, Prepared()).asked = True


def forget(model: nn.Module) -> bool:
    """Drop every decoder of a model; whether there was anything to drop."""
    return _prepared.pop(model, None) is not None


def drop_decoders(model: nn.Module) -> None:
    """Let go of what was built over a model that no decoder takes now, and of the memory behind it."""
    if model in _prepared:
        _prepared[model].decoders.clear()


def drop_outdated(model: nn.Module) -> None:
    """Let go of decoders over weights that the model does not have any more, and of those weights."""
    with _building:
        if model in _prepared:
            _keep_only(_prepared[model], state(model))


def _keep_only(entry: Prepared, now: tuple) -> None:
    entry.decoders = {kind: built for kind, built in entry.decoders.items() if built[0] == now}


def up_to_date(model: nn.Module, kind: Callable[[nn.Module], Decoder]) -> Decoder:
    """The model's decoder of this class: the one there is, or a new one where there is none or the weights changed."""
    with _building:
        entry = _prepared.setdefault(model, Prepared())
        # What is out of date goes first: it holds memory, and weights that the model left behind on another device.
        _keep_only(entry, state(model))
        built = entry.decoders.get(kind)
        if built is not None:
            return built[1]
        with capturing:
            decoder = kind(model)
        entry.decoders[kind] = state(model), decoder  # building may move weights
        return decoder


def say(message: str) -> None:
    """Once per message, which names the class of the model."""
    if message not in _said:
        _said.add(message)
        logger.warning("%s", message)


def state(model: nn.Module) -> tuple:
    """The weights, what norms and biases hold, for decoders copied those, and how packed layers multiply.

    Vectors off the CPU are not read, which would wait for the device: there a write through `.data` goes unnoticed.
    """
    vectors = tuple(hash(_bytes(p)) for p in model.parameters() if p.ndim == 1 and p.is_cpu)
    return fingerprint(model), vectors, tuple((*s.bits, s.multiply) for s in switches(model))


def switches(model: nn.Module) -> list[PrecisionSwitch]:
    """Those of a model's packed layers, each once."""
    return list({id(m.switch): m.switch for m in model.modules() if isinstance(m, PackedLinear)}.values())


def bit_choices(model: nn.Module) -> tuple[Bits, ...]:
    """What all packed layers of a model can be called with, the finest first; () where it has none."""
    first, *others = [switch.bit_choices for switch in switches(model)] or [()]
    return tuple([bits for bits in first if all(bits in choices for choices in others)])


def _bytes(vector: Tensor) -> bytes:
    return vector.detach().contiguous().view(torch.uint8).numpy().tobytes()
