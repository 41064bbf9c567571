"""Which decoders were built over which model, and do they still fit its weights?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..nn.architecture import CPU
from ..nn.packed import PackedLinear
from ..nn.replace import fingerprint
from ..nn.state import ModelState, state_of
from ..nn.switch import PrecisionSwitch
from ..precision import Bits

Decoder = TypeVar("Decoder")
_building = threading.Lock()  # threads that ask for the same decoder get one
# Held while a graph is captured, and where somebody waits for a whole device, which would spoil the capture.
capturing = threading.Lock()


def drop_outdated(model: nn.Module) -> None:
    """Let go of decoders over weights that the model does not have any more, and of those weights."""
    with _building:
        _keep_only(state_of(model), weights_of(model))


def _keep_only(state: ModelState, now: tuple) -> None:
    state.decoders = {kind: built for kind, built in state.decoders.items() if built[0] == now}


def up_to_date(model: nn.Module, kind: Callable[[nn.Module], Decoder]) -> Decoder:
    """The model's decoder of this class: the one there is, or a new one where there is none or the weights changed."""
    with _building:
        state = state_of(model)
        # What is out of date goes first: it holds memory, and weights that the model left behind on another device.
        _keep_only(state, weights_of(model))
        built = state.decoders.get(kind)
        if built is not None:
            return built[1]
        with capturing:
            decoder = kind(model)
        state.decoders[kind] = weights_of(model), decoder  # building may move weights
        return decoder


def device_of(model: nn.Module) -> torch.device:
    """Where the first of a model's parameters is; the CPU for a model without any."""
    return next((parameter.device for parameter in model.parameters()), CPU)


def weights_of(model: nn.Module) -> tuple:
    """Where the weights lie and how often they changed, what norms and biases hold, for decoders copied those, and how
    packed layers multiply.

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
