"""Which engine does a model get? The fastest that can run it, or the one that was asked for.

One warning per model says why it did not get a faster one; `why_by_module` returns the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .. import ops
from ..nn.state import ModelState, is_prepared, say_once, state_of, states_of
from ..ops.compiled_decoder import has_compiled_decoder
from .architecture import UnknownArchitecture
from .built import device_of, up_to_date, walk_of
from .cpu.decoder import CpuDecoder
from .cpu.engine import CpuEngine
from .cuda.decoder import CudaDecoder
from .cuda.engine import CudaEngine
from .engine import Engine
from .modules.engine import ModuleEngine, bare_forward
from .modules.stateful import StatefulEngine
from .modules.states import row_by_row

ENGINES = ("modules", "cpu", "cuda")
_DECODERS = {"cpu": CpuDecoder, "cuda": CudaDecoder}
_OVER_DECODERS = {"cpu": CpuEngine, "cuda": CudaEngine}


def engine_of(
    model: nn.Module,
    *,
    name: str | None = None,
    prepare: bool = True,
    required: bool = True,
    capacity: int = 0,
    num_positions: int | None = None,
    state: ModelState | None = None,
) -> Engine:
    """An engine over the model, not yet started.

    name: one of ENGINES, None: the fastest. prepare: also give a decoder to models that `hf_mlspec.prepare` did not
    get. required: whether the named engine is required; otherwise the modules replace it, with one warning. capacity:
    slots per row of the cache at first. num_positions: positions of the model, None: no limit. state: the model's
    state, if the caller has it. Raises KernelError or ValueError with the reason if the named engine is required and
    cannot run the model.
    """
    state = state or state_of(model)
    word = _word(model, state, name, prepare)
    if name in _DECODERS and required:
        decoder = required_decoder(model, name)
    else:
        decoder = None if word == "modules" else _decoder(model, state, word, word in (name, state.engine))
    if decoder is not None:
        return _OVER_DECODERS[word](model, decoder, capacity=capacity, num_positions=num_positions)
    made = StatefulEngine if row_by_row(model) else ModuleEngine
    return made(
        model,
        forward=bare_forward(model),
        capacity=capacity,
        num_embeddings=model.get_input_embeddings().num_embeddings,
        num_positions=num_positions,
    )


def engines_of(
    models: Sequence[nn.Module],
    num_positions: Sequence[int | None],
    *,
    name: str | None = None,
    prepare: bool = True,
    required: bool = False,
    capacity: int = 0,
) -> list[Engine]:
    """An engine over each of a chain's models, the target first, as `engine_of` gives them.

    num_positions: of every model. name: of the engine for all of them; None: the one that `hf_mlspec.prepare` was
    asked for of each, for other levels (unless prepare is False) the target's, else the fastest. required: whether the
    named engine is a must for the target; levels may run module by module.
    """
    states = states_of(models)
    followed = states[0].engine if prepare else None
    return [
        engine_of(
            model,
            name=name or state.engine or followed,
            prepare=prepare,
            required=required and place == 0,
            capacity=capacity,
            num_positions=most,
            state=state,
        )
        for place, (model, most, state) in enumerate(zip(models, num_positions, states, strict=True))
    ]


def word_of(model: nn.Module, *, name: str | None = None, prepare: bool = True) -> str:
    """The engine that a model gets if that serves it: the named one, else the one that `hf_mlspec.prepare` was asked
    for, else the fastest where the model is."""
    return _word(model, state_of(model), name, prepare)


def _word(model: nn.Module, state: ModelState, name: str | None, prepare: bool) -> str:
    if name is not None:
        return name
    if state.engine is not None:
        return state.engine
    if not prepare and not state.prepared:
        return "modules"
    return "cuda" if device_of(model).type == "cuda" else "cpu"


def decoder_of(model: nn.Module, word: str) -> CpuDecoder | CudaDecoder | None:
    """The model's decoder for the "cpu" or "cuda" engine, built on first use and again when weights changed.

    None if there is none: no kernels for it, autocast, a model on another device, or one that the decoder does not
    know. The last gives one warning here; ops warns about missing CPU kernels.
    """
    return _decoder(model, state_of(model), word)


def built_decoder(model: nn.Module, word: str) -> CpuDecoder | CudaDecoder:
    """The model's decoder for the "cpu" or "cuda" engine, whatever else stands against its use; UnknownArchitecture
    where it does not know the model."""
    return up_to_date(model, _DECODERS[word])


def _decoder(
    model: nn.Module, state: ModelState, word: str, asked: bool = False
) -> CpuDecoder | CudaDecoder | None:
    """asked: for this very engine; then whatever stands against it is said."""
    reason = _unserved(model, state, word)
    if reason is None:

        def may_build() -> bool:
            return word == "cuda" or state.prepared or _is_whole(model)

        try:
            return up_to_date(model, _DECODERS[word], state, may_build=may_build)
        except UnknownArchitecture as error:
            reason = error
    if isinstance(reason, UnknownArchitecture):
        state.drop_engines()
    if isinstance(reason, UnknownArchitecture) or (reason is not None and asked):
        say_once(model, f"{type(model).__name__} runs module by module: {reason}")
    return None


def required_decoder(model: nn.Module, word: str) -> CpuDecoder | CudaDecoder:
    """The model's decoder for the "cpu" or "cuda" engine; KernelError without kernels, ValueError where it cannot
    serve the model as it stands."""
    if word == "cpu" and not has_compiled_decoder():
        raise ops.KernelError(f"engine 'cpu' needs the compiled kernels: {ops.why_not_compiled()}")
    state = state_of(model)
    reason = _unserved(model, state, word)
    if reason is None:
        try:
            return up_to_date(model, _DECODERS[word], state)
        except UnknownArchitecture as error:
            reason = error
    raise ValueError(
        f"engine {word!r} cannot run this {type(model).__name__}: {reason}; leave out engine= for the fastest that can"
    )


def move_weights(model: nn.Module, *, name: str | None, prepare: bool) -> None:
    """Build the CUDA decoder now where the model is to get one: it puts weights side by side, and views of them that
    were made before would be out of date."""
    if word_of(model, name=name, prepare=prepare) == "cuda":
        decoder_of(model, "cuda")


def why_by_module(model: nn.Module, *, name: str | None, prepare: bool) -> str:
    """Why `engine_of` runs a model module by module."""
    word = word_of(model, name=name, prepare=prepare)
    if word == "modules":
        return "prepare=False" if name is None and not is_prepared(model) else "engine='modules'"
    if word == "cpu" and not has_compiled_decoder():
        return "no compiled kernels"
    try:
        built_decoder(model, word)
    except UnknownArchitecture as error:
        return str(error)
    return str(_unserved(model, state_of(model), word) or "autocast")


def _unserved(model: nn.Module, state: ModelState, word: str) -> UnknownArchitecture | str | None:
    """Why no decoder for this engine can be asked of the model at all; as an error where the user is to be told."""
    device = device_of(model)
    if torch.is_autocast_enabled("cpu" if word == "cpu" else device.type):
        return "autocast"
    if word == "cpu":
        if CpuDecoder not in state.decoders and not has_compiled_decoder():
            return "no compiled kernels"
        return f"it is on {device}, and the CPU decoder runs on the CPU" if device.type == "cuda" else None
    reason = ops.why_no_cuda_kernels(device) if device.type == "cuda" else None
    return None if reason is None else UnknownArchitecture(reason)


def _is_whole(model: nn.Module) -> bool:
    """Whether all of a model is on the CPU; a decoder elsewhere is built for those only who asked."""
    return all(parameter.is_cpu for parameter in walk_of(model).parameters)
