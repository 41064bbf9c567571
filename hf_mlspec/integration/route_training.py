"""How is a router trained for a model in a folder, on text files, and what does it choose for given prompts?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..calibration.samples import windows
from ..formats.planes import MAX_PLANES
from ..nn.settings import QUANT_METHOD
from ..routing.blocks import average_bits, blocks_of
from ..routing.passes import Routed
from ..routing.training import RouterRecipe, Step, Trained, train_router
from .json_object import read_object
from .levels.load import DTYPES, read_model, read_tokenizer, require_folder
from .quantizer.calibration_text import token_stream
from .quantizer.config import MLSpecConfig
from .request import max_positions, router_of, vocab_size
from .routed import read_router


@dataclass(frozen=True)
class RoutedFolder:
    """What a training was: the router, its teacher in words, queries and their tokens, seconds."""

    trained: Trained
    teacher: str
    queries: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Choice:
    """The planes of each block for one prompt, by the block's name, and their average for a weight."""

    widths: dict[str, int]
    bits: float


def train_folder(
    folder: str,
    data: Sequence[str],
    recipe: RouterRecipe,
    out: str | os.PathLike,
    *,
    samples: int = 256,
    tokens: int = 128,
    group_size: int = 128,
    dtype: str = "float32",
    device: str = "cpu",
    progress: Callable[[Step], None] | None = None,
) -> RoutedFolder:
    """Train a router for the model in ``folder`` and write it to ``out``.

    A dense model is its own teacher, and the router is for its bit-planes: 8, in groups of ``group_size``; of a model
    in bit-planes all of them teach. data: text files, of each the same number of ``samples`` windows of ``tokens``. A
    killed run goes on with the next call, from ``out`` + ".training". ValueError as `train_router`, and for a text
    that is too short.
    """
    require_folder(folder)
    rows = queries_of(data, read_tokenizer(folder), samples, tokens, recipe.seed)
    recipe.require(MAX_PLANES, rows)  # before a model is loaded
    packed = _is_packed(folder)
    model = load_planes(folder, dtype, device, group_size=group_size)
    if packed:
        teacher, said = model, "all planes"
    else:
        teacher, said = read_model(folder, DTYPES[dtype]).to(device), f"the dense model in {dtype}"
    _require_fit(model, rows)
    begin = time.perf_counter()
    checkpoint = Path(f"{os.fspath(out)}.training")
    found = train_router(model, teacher, rows.to(device), recipe, checkpoint=checkpoint, progress=progress)
    found.router.save(out)
    return RoutedFolder(found, said, len(rows), rows.shape[1], time.perf_counter() - begin)


def load_planes(folder: str, dtype: str, device: str, *, group_size: int = 128) -> PreTrainedModel:
    """The model of a folder in bit-planes: as it was saved, else its own weights in 8 of them."""
    options = {}
    if not _is_packed(folder):
        options["quantization_config"] = MLSpecConfig(format="planes", group_size=group_size)
    return read_model(folder, DTYPES[dtype], **options).to(device)


def queries_of(data: Sequence[str], tokenizer: Any, samples: int, tokens: int, seed: int) -> Tensor:
    """int64 ``[samples, tokens]``: windows of every file, as many of each. ValueError for a text that is too short,
    with its name and both numbers."""
    if tokens < 2:
        raise ValueError(f"tokens is {tokens}: a query takes at least 2, the second is to be told from the first")
    rows = []
    for place, file in enumerate(data):
        ids = token_stream(file, tokenizer)
        wanted = samples // len(data) + (place < samples % len(data))
        if len(ids) < 2:
            raise ValueError(f"the training text {file!r} has {len(ids)} tokens: a next token takes at least 2")
        try:
            rows += windows(ids, wanted, tokens, seed)
        except ValueError as error:
            raise ValueError(f"{file}: {str(error).replace('calibration', 'training')}") from error
    return torch.tensor(rows)


@torch.no_grad()
def choices_of(model: PreTrainedModel, router: Any, prompts: Sequence[list[int]]) -> list[Choice]:
    """What a router chooses for prompts of token ids; None for the model's own. ValueError without one, for a prompt
    without tokens, and as `route`."""
    router = router_of(model) if router is None else read_router(model, router)
    if router is None:
        raise ValueError("the model has no router of its own: name one with --router, `mlspec route train` writes it")
    blocks, found = blocks_of(model), []
    for index, ids in enumerate(prompts):
        if not ids:
            raise ValueError(f"prompt {index} has no tokens: a width is chosen from at least one")
        with Routed(router, blocks, [len(ids)]).over(model) as routed:
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
        widths = [line[0] for line in routed.widths]
        named = {block.name: width for block, width in zip(blocks, widths, strict=True)}
        found.append(Choice(named, average_bits(widths, blocks)))
    return found


def _is_packed(folder: str) -> bool:
    """Whether the model was saved in a format of this package; ValueError for another one than bit-planes."""
    told = read_object(Path(folder) / "config.json").get("quantization_config")
    if told is None:
        return False
    if told.get("quant_method") != QUANT_METHOD or told.get("format") not in ("planes", "bitplanes"):
        words = told.get("format") or told.get("quant_method")
        raise ValueError(f"{folder} is quantized ({words}): a router is for bit-planes; give the dense model")
    return True


def _require_fit(model: PreTrainedModel, rows: Tensor) -> None:
    if (most := max_positions(model)) is not None and rows.shape[1] > most:
        raise ValueError(f"tokens is {rows.shape[1]}, the model has {most} positions: take fewer")
    if int(rows.max()) >= (size := vocab_size(model)):
        raise ValueError(f"the text has token {int(rows.max())}, the model {size}: the tokenizer is another model's")
