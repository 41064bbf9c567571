"""Which decoders were built over which model, and do they still fit it as it stands?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..nn.adapters import adapters_said
from ..nn.hooks import changes
from ..nn.packed import PackedLinear, PackedModule
from ..nn.shards import local
from ..nn.state import ModelState, state_of
from ..nn.switch import PrecisionSwitch
from ..nn.transforms import NONE, TransformedLinear
from ..precision import Bits
from .architecture import CPU, KNOWN, routing_said
from .capturing import capturing
from .rows import cache_format_of

Decoder = TypeVar("Decoder")
_VERSION = attrgetter("_version")
_building = threading.Lock()  # threads that ask for the same decoder get one


def drop_outdated(model: nn.Module) -> None:
    """Let go of decoders over a model that stands otherwise by now, and of the weights it had."""
    with _building:
        _keep_only(state_of(model), standing(model))


def _keep_only(state: ModelState, now: tuple) -> None:
    # Another thread may drop all of them meanwhile.
    state.decoders = {kind: built for kind, built in list(state.decoders.items()) if built[0] == now}


def up_to_date(
    model: nn.Module,
    kind: Callable[[nn.Module], Decoder],
    state: ModelState | None = None,
    *,
    may_build: Callable[[], bool] = lambda: True,
) -> Decoder | None:
    """The model's decoder of this class: the existing one, or a new one if there is none or the model changed.

    state: the model's, if the caller has it. may_build: asked before a new one is built; None is returned where it
    says no. A decoder that is out of date is dropped to free its memory, and so are weights that a moved model left
    on another device. Building a decoder reads the whole model and raises an error for unknown parts, so one that is
    still valid is not tested again.
    """
    with _building:
        state = state or state_of(model)
        if state.decoders:
            _keep_only(state, standing(model))
        if (kept := state.decoders.get(kind)) is not None:
            return kept[1]
        if not may_build():
            return None
        with capturing, walking_anew():
            decoder = kind(model)
        state.decoders[kind] = standing(model), decoder  # building may move weights
        return decoder


class Walk:
    """The modules and parameters of a model as somebody found them; what is not asked for is not found out."""

    def __init__(self, model: nn.Module):
        self.model, self.modules = model, modules_of(model)
        held = [own for module in self.modules if (own := module._parameters)]
        own = [p for some in held for p in some.values() if p is not None]
        self.parameters: list[Tensor] = list(dict(zip(map(id, own), own, strict=True)).values())
        if getattr(model, "_tp_size", None):  # of what processes share each looks at its part
            self.parameters = [local(p) for p in self.parameters]

    @cached_property
    def weights(self) -> tuple:
        """Where each parameter lies and how often it changed.

        What was made in inference mode counts no changes; assigning to `.data` does not change that.
        """
        try:
            changes = tuple(map(_VERSION, self.parameters))
        except RuntimeError:  # some of them count none
            changes = tuple(map(changes_of, self.parameters))
        return tuple(map(Tensor.data_ptr, self.parameters)), changes

    def of_kind(self, kind: type | tuple[type, ...]) -> list[nn.Module]:
        """The modules of these classes."""
        kinds = {own for own in set(map(type, self.modules)) if issubclass(own, kind)}
        return [module for module in self.modules if type(module) in kinds] if kinds else []


_walks: ContextVar[dict[int, Walk] | None] = ContextVar("walks", default=None)


def walk_of(model: nn.Module) -> Walk:
    """A walk over the model: of just now, or inside of `walking_once` that of the first time."""
    kept = _walks.get()
    if kept is None:
        return Walk(model)
    if id(model) not in kept:
        kept[id(model)] = Walk(model)  # it holds the model, so that no other one gets its id
    return kept[id(model)]


@contextmanager
def walking_once() -> Iterator[None]:
    """Inside, the models that this thread asks for stay as they are, but for what happens inside of `walking_anew`."""
    token = _walks.set({})
    try:
        yield
    finally:
        _walks.reset(token)


@contextmanager
def walking_anew() -> Iterator[None]:
    """Inside, weights may be moved and modules replaced: every walk is new, and what was found before is forgotten."""
    kept = _walks.get()
    token = _walks.set(None)
    try:
        yield
    finally:
        _walks.reset(token)
        if kept is not None:
            kept.clear()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """`list(model.modules())`, faster: every call of generate goes over the modules of all its models."""
    found, waiting = {}, [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            children = module._modules
            if children:
                waiting += [child for child in reversed(children.values()) if child is not None]
    return list(found.values())


def changes_of(parameter: Tensor) -> int:
    """How often a tensor was written to; 0 for one of inference mode, which does not count."""
    try:
        return 0 if parameter.is_inference() else parameter._version
    except RuntimeError:  # it was moved in inference mode, and its data is a view of a joined weight since
        return 0


def device_of(model: nn.Module) -> torch.device:
    """Where the first of a model's parameters is; the CPU for a model without any."""
    return next((parameter.device for parameter in model.parameters()), CPU)


def fingerprint(model: nn.Module) -> tuple:
    """Where a model's weights lie and how often they changed: another one means that what was built is out of date."""
    return walk_of(model).weights


def standing(model: nn.Module) -> tuple:
    """All that a decoder over the model rests on: where the weights lie and how often they changed, what norms and
    biases hold, for decoders copied those, where routers send tokens, how packed layers multiply and transform their
    inputs, which adapters add to what, the format of its keys and values, and of every module its class, its mode,
    whether it has hooks and whether its forward was replaced.

    Vectors off the CPU are not read, which would wait for the device: there a write through `.data` goes unnoticed.
    """
    walk = walk_of(model)
    own = list(map(vars, walk.modules))
    modules = (
        tuple(map(type, walk.modules)),
        tuple([has["training"] for has in own]),
        tuple([place for place, has in enumerate(own) if has["_forward_hooks"] and changes(has["_forward_hooks"])]),
        tuple([place for place, has in enumerate(own) if has["_forward_pre_hooks"]]),
        tuple([place for place, has in enumerate(own) if "forward" in has]),
    )
    packed = walk.of_kind(PackedModule)
    multiply = [switch.in_force for switch in {id(m.switch): m.switch for m in packed}.values()]
    transforms = [
        (m.transform, *[(tensor.data_ptr(), changes_of(tensor)) for tensor in m.transform_tensors().values()])
        for m in walk.of_kind((PackedLinear, TransformedLinear))
        if m.transform is not NONE
    ]
    directed = getattr(getattr(model, "config", None), "use_bidirectional_attention", None)
    said = directed, cache_format_of(model), _routing(model, walk), adapters_said(walk.modules), *multiply
    places = tuple([p.device for p in walk.parameters])
    return said, modules, places, walk.weights, _held(walk.parameters), tuple(transforms)


def _held(parameters: list[nn.Parameter]) -> int:
    """A hash of what vectors on the CPU hold."""
    vectors: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if p.ndim == 1 and p.is_cpu:
            vectors.setdefault(p.dtype, []).append(p.data)
    return hash(tuple([torch.cat(some).view(torch.uint8).numpy().tobytes() for some in vectors.values()]))


def _routing(model: nn.Module, walk: Walk) -> tuple:
    """What the routers and experts of a mixture say beside their weights."""
    entry = KNOWN.get(type(model).__name__)
    return () if entry is None or entry.experts is None else routing_said(entry.experts, walk.modules)


def switches(model: nn.Module) -> list[PrecisionSwitch]:
    """Those of a model's packed layers, each once."""
    return list({id(m.switch): m.switch for m in walk_of(model).of_kind(PackedModule)}.values())


def bit_choices(model: nn.Module) -> tuple[Bits, ...]:
    """What all packed layers of a model can be called with, the finest first; () where it has none."""
    first, *others = [switch.bit_choices for switch in switches(model)] or [()]
    return tuple([bits for bits in first if all(bits in choices for choices in others)])
