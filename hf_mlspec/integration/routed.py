"""Which router does a model have, how does it get one, and how is it saved with it?"""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ..routing.blocks import blocks_of
from ..routing.router import Router, require_every, require_file

ROUTER_FILE = "router.safetensors"  # its name beside the weights of a saved model


def route(
    model: PreTrainedModel, router: str | os.PathLike | Router | None, *, every: str | None = None
) -> PreTrainedModel:
    """Let a router pick how many planes each block reads for each prompt, from the next call of generate on.

    model: in bit-planes, from `from_pretrained(..., quantization_config=MLSpecConfig(format="planes"))`. router: a
    file of `mlspec route train`, or what `train_router` returned; None: all planes again. It is saved with the model.
    every: "prompt", one choice for a prompt and what follows; "step", one more for each token behind the prompt; None:
    as the router was trained. Returns the model. ValueError for a router of another model or another word, TypeError
    for another object.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if not hasattr(quantizer, "router"):
        raise ValueError(
            f"{type(model).__name__} is not in bit-planes of this package: load it with "
            "quantization_config=MLSpecConfig(format='planes')"
        )
    if every is not None:
        require_every(every)
    found = None if router is None else read_router(model, router).choosing(every)
    quantizer.router = found
    quantizer.quantization_config.router = None if found is None else ROUTER_FILE
    return model


def read_router(model: nn.Module, router: str | os.PathLike | Router) -> Router:
    """The router of a file, or the one given, for this model; errors as `route`."""
    if isinstance(router, Router):
        return router.require(blocks_of(model))
    if not isinstance(router, str | os.PathLike):
        raise TypeError(f"router is {router!r}, it must be the path of a file that `mlspec route train` wrote")
    return Router.load(router, blocks_of(model))


def check_router(model: nn.Module, path: str | os.PathLike) -> None:
    """What a router's header tells before weights are read: ValueError for one of other shapes, FileNotFoundError."""
    require_file(path, blocks_of(model))


def stored_router(model: nn.Module, name: str | os.PathLike, folder: Path | None) -> Path:
    """Where the router of a saved model is: beside its weights, or on the hub. FileNotFoundError names both."""
    if folder is not None and (folder / name).is_file():
        return folder / name
    try:
        return Path(cached_file(model.name_or_path, os.fspath(name)))
    except OSError as error:
        raise FileNotFoundError(
            f"{model.name_or_path} says that a router picks its planes, and has no {name}: copy it from where the "
            "model was saved, or take 'router' out of its config.json to read all planes"
        ) from error
