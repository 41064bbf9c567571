"""How does a model larger than its device get its planes from the host or the disk, and where does it end?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..engines.built import drop_outdated, walk_of
from ..engines.memory import available
from ..nn.plane_source import PlaneCounts
from ..nn.planes import PlanesLinear
from ..nn.state import say_once
from ..ops import why_no_cuda_kernels
from ..routing.plane_budget import TOP_PLANES, Streaming, asked_to_stream
from ..routing.plane_loader import PlaneLoader
from ..routing.plane_slots import low_shapes, require_budget
from ..routing.plane_store import FileStore, HostStore


@torch.inference_mode(False)  # tensors made in that mode could not be written to outside of it
def stream_planes(
    model: PreTrainedModel,
    budget: int | str | None,
    *,
    top_planes: int = TOP_PLANES,
    device: str | int | torch.device | None = None,
    folder: str | os.PathLike | None = None,
) -> PreTrainedModel:
    """Keep only so many bytes of a model's bit-planes on its device, and stream the others when they are read.

    model: in bit-planes, on the CPU or on one GPU. budget: bytes, or "6GiB", for planes, their scales and what is
    fetched ahead; None: all planes are in memory again. top_planes: of every layer, always there; levels
    "planes1" up to it draft without a fetch. device: where the model runs; None: where it is. A model that is on the
    CPU goes to a GPU layer by layer. folder: a file there holds the other planes, which are otherwise in pinned host
    memory for a GPU, and for the CPU in a temporary file. Returns the model, which computes the same bits, compiled
    where it was before. ValueError for a budget below the top planes, with both numbers, and for a
    model that cannot be streamed; OSError where there is no place for the planes of a layer. After an error the model
    is as it was.
    """
    linears = {name: own for name, own in model.named_modules() if isinstance(own, PlanesLinear)}
    if budget is None:
        return _end(model)
    asked = asked_to_stream(budget, top_planes, folder, True)
    target = _device(model, linears, device, asked.top_planes)
    loader = _loader(model, linears, target, asked)
    home = model.get_input_embeddings().weight.device
    if home != target:
        try:
            model.to(target)
        except BaseException:
            try:
                loader.give_back(home=True)
            finally:
                model.to(home)
            raise
        if getattr(model, "hf_device_map", None):
            model.hf_device_map = {"": target}
    drop_outdated(model)
    return model


def _loader(
    model: nn.Module, linears: Mapping[str, PlanesLinear], target: torch.device, asked: Streaming
) -> PlaneLoader:
    shapes, in_file = low_shapes(linears, target, asked.top_planes), asked.folder is not None or target.type == "cpu"
    require_budget(linears, target, asked.budget, asked.top_planes)
    if in_file or not _fits_host(model, sum(count * size for count, size in shapes)):
        store = FileStore(list(linears), shapes, asked.folder)
    else:
        store = HostStore(shapes, pin=True)
    try:
        loader = PlaneLoader(linears, target, asked.budget, store, top=asked.top_planes)
    except BaseException:
        if source_of(model) is None:  # else some layers still read it
            store.close()
        raise
    if refusal := getattr(store, "refusal", ""):
        say_once(model, f"host memory could not be pinned ({refusal}): planes come from pageable memory, more slowly")
    return loader


def source_of(model: nn.Module) -> PlaneLoader | None:
    """What streams a model's planes, if they are."""
    return next((own.source for own in walk_of(model).of_kind(PlanesLinear) if own.source is not None), None)


def counting(model: nn.Module) -> AbstractContextManager[PlaneCounts | None]:
    """A block whose fetches for this model, by this thread, are counted in what it gives."""
    source = source_of(model)
    return nullcontext() if source is None else source.counting()


def drop_fetches(model: nn.Module) -> None:
    """Let go of streamed planes that are on their way, and set the counts of all to zero; resident ones stay."""
    source = source_of(model)
    if source is not None:
        source.reset()


AUTO = "auto"  # the device_map that `shared_out` serves
_SPREADING = frozenset({"balanced", "balanced_low_0", "sequential", "disk"})


def device_of_map(device_map: Any) -> Any:
    """The one device of a device_map, or "auto"; ValueError by name for what spreads a model, None for no map."""
    if device_map is None:
        return None
    places = set(device_map.values()) if isinstance(device_map, Mapping) else {device_map}
    words = _SPREADING & {str(place) for place in places}
    if words or len(places) != 1:
        said = ", ".join(sorted(words or {str(place) for place in places}))
        raise ValueError(
            f"device_map says {said}, and planes are streamed to one device: name it, as with device_map='cuda', or "
            "say 'auto'; plane_folder stands for offload_folder"
        )
    return next(iter(places))


def shared_out(
    model: PreTrainedModel, max_memory: Mapping[Any, int], asked: Streaming | None
) -> tuple[torch.device, Streaming] | None:
    """Where a model in bit-planes goes that is loaded with device_map="auto", and how it streams its planes there.

    max_memory: bytes by device, as accelerate would fill them. asked: what the config says of streaming. None: it says
    nothing, and the devices hold the model, so that nothing is left to the host or the disk. Else the first GPU with
    memory takes all but planes, and planes as far as its memory goes; without a GPU the CPU, and a file. ValueError
    where the device has no room for what is not planes.
    """
    devices = [own for own, size in max_memory.items() if own not in ("cpu", "disk") and size > 0]
    planes = {id(part) for own in model.modules() if isinstance(own, PlanesLinear) for part in own.parameters()}
    tied = model.all_tied_weights_keys  # as yet weights of their own
    sizes = {id(part): part.nbytes for name, part in model.named_parameters() if name not in tied}
    room = sum(max_memory.get(own, 0) for own in devices or ["cpu"])
    if asked is None and (not planes or sum(sizes.values()) <= room):
        return None
    first = devices[0] if devices else "cpu"
    place = torch.device("cuda", first) if isinstance(first, int) else torch.device(first)
    rest = sum(size for own, size in sizes.items() if own not in planes)
    room = max_memory.get(first, 0) - rest
    if room <= 0:
        raise ValueError(
            f"max_memory of {first!r} is {max_memory.get(first, 0):,} bytes, and what is not in bit-planes takes "
            f"{rest:,}: give more, or another device"
        )
    how = asked or Streaming(room, TOP_PLANES, None)
    return place, how._replace(budget=min(how.budget, room))


def _end(model: PreTrainedModel) -> PreTrainedModel:
    loader = source_of(model)
    if loader is not None:
        drop_outdated(model)  # their memory may be needed
        try:
            loader.give_back()
        finally:
            drop_outdated(model)
    return model


def _device(model: PreTrainedModel, linears: Mapping[str, PlanesLinear], device: Any, top: int) -> torch.device:
    """Where the model is to run; ValueError where its planes cannot be streamed there."""
    if not linears:
        raise ValueError(
            f"{type(model).__name__} holds no bit-planes: load it with MLSpecConfig(format='planes') to stream them"
        )
    if any(own.source is not None for own in linears.values()):
        raise ValueError(
            "the planes of this model are streamed already: end it first, hf_mlspec.stream_planes(model, None)"
        )
    empty = next((name for name, own in linears.items() if any(part.is_meta for part in own.parameters())), None)
    if empty is not None:
        raise ValueError(f"{empty} has no memory as yet (it is on the meta device): load its weights first")
    fewest = min(own.num_planes for own in linears.values())
    if fewest <= top:
        raise ValueError(f"top_planes is {top} and the model has {fewest} planes: keep fewer, or do not stream them")
    hooked = [name for name, own in model.named_modules() if hasattr(own, "_hf_hook")]
    places = {own.weight_planes.device for own in linears.values()}
    if hooked or len(places) > 1:
        raise ValueError(
            "accelerate spread this model over devices or offloads it, and planes are streamed to one device: load it "
            "without device_map and max_memory"
        )
    named = f"cuda:{device}" if type(device) is int else device
    target = next(iter(places)) if named is None else torch.device(named)
    if target.type == "cuda":
        target = torch.device("cuda", torch.cuda.current_device() if target.index is None else target.index)
        if (reason := why_no_cuda_kernels(target)) is not None:
            raise ValueError(f"planes are streamed to GPUs with compiled kernels: {reason}")
    elif target.type != "cpu":
        raise ValueError(f"planes are streamed to CUDA devices and the CPU, not to {target}")
    return target


def _fits_host(model: nn.Module, needed: int) -> bool:
    free = available(torch.device("cpu"))
    if free is not None and needed > free:
        say_once(model, f"{needed:,} bytes of planes do not fit the host's {free:,}: they come from a file")
        return False
    return True
