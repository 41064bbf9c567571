"""How is a model made to decode through compiled steps from now on, and how is that undone?

Most modules stay as they are: a decoder reads BF16 and float32 weights in place, and packed weights are put into the
kernels' order in place. Only the linears of a model that no decoder knows give their place to others.
"""

from __future__ import annotations

import torch
from torch import nn

from .. import ops
from ..nn.adapters import of_adapters, without_wrapper
from ..nn.linear import KernelLinear, is_dense
from ..nn.state import say_once, state_of
from ..ops.compiled_decoder import has_compiled_decoder
from .architecture import UndescribedClass, UnknownArchitecture, described, recognise
from .choose import ENGINES, built_decoder, required_decoder


def prepare(model: nn.Module, engine: str | None = None) -> nn.Module:
    """Let `model` decode through compiled, batch-invariant steps: a token's bits do not depend on the rest of the
    call.

    Returns the model. No weight is copied; for the engine "cuda" the weights of q, k, v and of gate, up become views
    of one tensor. The classes that docs/guide/architectures.md calls compiled run as one compiled call per step, on a
    GPU as kernels that fit into a CUDA graph; so do classes in which a probe recognises the form of one of them, which
    is said once. Of others each linear runs through its kernel, with one warning. From then on plain `model.generate`
    (greedy and sampling) also decodes this way; an unsupported call runs in transformers' own loop, with one warning.
    Later changes of the weights, the PrecisionSwitch or adapters (PEFT) are detected, except through `.data`: a cast
    is not made again (it drafts worse, no token changes), and on a GPU norms and biases go unnoticed. A deep copy is
    not prepared.

    engine: None for the fastest, or as in SpeculationConfig: "cpu", "cuda", or "modules", whose linears then run
    through their kernels one by one.

    Raises KernelError if no kernels are built (with the command that builds them), TypeError if `model` is not a
    model, ValueError if it is on several devices or on one without kernels, if its weights are neither bfloat16 nor,
    on the CPU, float32, or if the engine cannot run it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare takes a model, not a {type(model).__name__}")
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"prepare: engine is {engine!r}, choose one of {', '.join(ENGINES)} or None for the fastest")
    given, model = model, without_wrapper(model, "prepare")
    device = _one_device(model)
    if device.type == "cpu" and engine != "cuda" and not has_compiled_decoder():
        raise ops.KernelError(f"prepare needs the compiled kernels: {ops.why_not_compiled()}")
    if device.type == "cuda":
        _require_gpu_serves(model, device)
    _serve(model, engine, device)
    state_of(model).prepared, state_of(model).engine = True, engine
    return given


def _serve(model: nn.Module, engine: str | None, device: torch.device) -> None:
    """Build the decoder that was asked for, or let kernels serve the linears."""
    if engine == "modules":
        _serve_linears(model, "that engine was asked for")
        return
    unknown = _why_unknown(model)
    if engine is not None:
        required_decoder(model, engine)
        return
    try:
        built_decoder(model, device.type)
    except UnknownArchitecture as error:
        _serve_linears(model, unknown or str(error))


def _why_unknown(model: nn.Module) -> str | None:
    """Why nothing is known of what a model's class computes; None where something is: it has a description, or a probe
    recognises a known form in it, whose evidence is said once."""
    try:
        described(model)
    except UndescribedClass:
        try:
            found = recognise(model)
        except UnknownArchitecture as error:
            return str(error)
        say_once(model, found.told(type(model).__name__))
    except UnknownArchitecture:
        pass  # which is said where it is built
    return None


def restore(model: nn.Module) -> nn.Module:
    """Undo `prepare`, also in a copy of a prepared model; other models are unchanged. Returns the model.

    Raises TypeError if `model` is not a model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"restore takes a model, not a {type(model).__name__}")
    given, model = model, without_wrapper(model, "restore")
    state = state_of(model)
    served = {id(module): module for module in model.modules() if type(module) is KernelLinear}
    if state.prepared or served:
        _replace(model, {key: module.given_up() for key, module in served.items()})
        state.prepared, state.engine = False, None
        state.drop_engines()
    return given


def _one_device(model: nn.Module) -> torch.device:
    """Where the model is; ValueError for several devices, or one that no kernels exist for."""
    places = list(dict.fromkeys(parameter.device for parameter in model.parameters()))
    if len(places) > 1:
        raise ValueError(
            f"prepare: the model is on {places[0]} and {places[1]}; a compiled decoder needs it on one device, "
            "load it without device_map, or with device_map={'': 0}"
        )
    device = places[0] if places else torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"prepare: the model is on {device}; there are compiled decoders for the CPU and for CUDA")
    return device


def _require_gpu_serves(model: nn.Module, device: torch.device) -> None:
    reason = ops.why_no_cuda_kernels(device)
    if reason is not None:
        raise ops.KernelError(f"prepare needs the CUDA kernels: {reason}")
    of_others = of_adapters(model)
    for name, module in model.named_modules():
        read = (is_dense(module) or isinstance(module, nn.Embedding)) and id(module) not in of_others
        if read and module.weight.dtype != torch.bfloat16:
            raise ValueError(
                f"prepare: {name}.weight is {module.weight.dtype} on {device}, where the kernels take bfloat16: load "
                "the model with dtype=torch.bfloat16"
            )


def _serve_linears(model: nn.Module, reason: str) -> None:
    linears = [m for m in model.modules() if is_dense(m)]
    odd = next((m for m in linears if m.weight.dtype not in (torch.bfloat16, torch.float32)), None)
    if odd is not None:
        raise ValueError(f"prepare: weights are {odd.weight.dtype}; load the model in bfloat16 or float32")
    if model in linears:
        raise ValueError(f"prepare: a single {type(model).__name__} is a layer: pass the model it is part of")
    _replace(model, {id(linear): KernelLinear.over(linear) for linear in linears if type(linear) is nn.Linear})
    count = f"the {len(linears)} linear layers of {type(model).__name__}"
    say_once(model, f"{count} run through the kernels one by one: {reason}")


def _replace(model: nn.Module, others: dict[int, nn.Module]) -> None:
    """Put another module in every place where a module of one of these ids stands."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children() leaves out a second name
            if id(child) in others:
                setattr(parent, name, others[id(child)])
