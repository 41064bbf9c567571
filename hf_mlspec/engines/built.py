"""Which decoders were built over which model, and do they still fit it as it stands?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..nn.packed import PackedLinear
from ..nn.state import ModelState, state_of
from ..nn.switch import PrecisionSwitch
from ..nn.transforms import NONE
from ..precision import Bits
from .architecture import CPU
from .rows import cache_format_of

Decoder = TypeVar("Decoder")
_building = threading.Lock()  # threads that ask for the same decoder get one
# Held while a graph is captured, and where somebody waits for a whole device, which would spoil the capture.
capturing = threading.Lock()


def drop_outdated(model: nn.Module) -> None:
    """Let go of decoders over a model that stands otherwise by now, and of the weights it had."""
    with _building:
        _keep_only(state_of(model), standing(model))


def _keep_only(state: ModelState, now: tuple) -> None:
    state.decoders = {kind: built for kind, built in state.decoders.items() if built[0] == now}


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
        if kind in state.decoders:
            return state.decoders[kind][1]
        if not may_build():
            return None
        with capturing:
            decoder = kind(model)
        state.decoders[kind] = standing(model), decoder  # building may move weights
        return decoder


def modules_of(model: nn.Module) -> list[nn.Module]:
    """`list(model.modules())`, faster: every call of generate goes over the modules of all its models."""
    found, waiting = {}, [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found.values())


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """`list(model.parameters())`, faster."""
    own = [p for module in modules_of(model) for p in module._parameters.values() if p is not None]
    return list({id(p): p for p in own}.values())


def device_of(model: nn.Module) -> torch.device:
    """Where the first of a model's parameters is; the CPU for a model without any."""
    return next((parameter.device for parameter in model.parameters()), CPU)


def fingerprint(model: nn.Module) -> tuple:
    """Where a model's weights lie and how often they changed: another one means that what was built is out of date.

    What was made in inference mode counts no changes; assigning to `.data` does not change that.
    """
    return tuple([(p.data_ptr(), _changes(p)) for p in parameters_of(model)])


def _changes(parameter: Tensor) -> int:
    try:
        return 0 if parameter.is_inference() else parameter._version
    except RuntimeError:  # it was moved in inference mode, and its data is a view of a joined weight since
        return 0


def standing(model: nn.Module) -> tuple:
    """All that a decoder over the model rests on: where the weights lie and how often they changed, what norms and
    biases hold, for decoders copied those, how packed layers multiply and transform their inputs, the format of its
    keys and values, and of every module its class, its mode, whether it has hooks and whether its forward was
    replaced.

    Vectors off the CPU are not read, which would wait for the device: there a write through `.data` goes unnoticed.
    """
    modules, parameters, packed, transforms = [], [], {}, []
    for module in modules_of(model):
        own = vars(module)
        hooked = bool(own["_forward_hooks"]), bool(own["_forward_pre_hooks"])
        modules.append((type(module), own["training"], *hooked, "forward" in own))
        parameters += [p for p in own["_parameters"].values() if p is not None]
        if isinstance(module, PackedLinear):
            packed[id(module.switch)] = module.switch
            if module.transform is not NONE:
                held = module.transform_tensors().values()
                transforms.append((module.transform, *[(tensor.data_ptr(), _changes(tensor)) for tensor in held]))
    weights = [(p.device, p.data_ptr(), _changes(p)) for p in parameters]
    vectors = [
        p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in parameters if p.ndim == 1 and p.is_cpu
    ]
    directed = getattr(getattr(model, "config", None), "use_bidirectional_attention", None)
    multiply = [switch.in_force for switch in packed.values()]
    said = directed, cache_format_of(model)
    return *said, tuple(modules), tuple(weights), hash(tuple(vectors)), tuple(multiply), tuple(transforms)


def switches(model: nn.Module) -> list[PrecisionSwitch]:
    """Those of a model's packed layers, each once."""
    return list({id(m.switch): m.switch for m in modules_of(model) if isinstance(m, PackedLinear)}.values())


def bit_choices(model: nn.Module) -> tuple[Bits, ...]:
    """What all packed layers of a model can be called with, the finest first; () where it has none."""
    first, *others = [switch.bit_choices for switch in switches(model)] or [()]
    return tuple([bits for bits in first if all(bits in choices for choices in others)])
