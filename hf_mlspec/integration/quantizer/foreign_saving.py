"""How is a model saved as a checkpoint of another library? Each layer is read back before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...checkpoints.readers import reader_for
from ...checkpoints.writers import written
from ...checkpoints.writing import Kind, Writer
from ...formats import PackedWeight
from ...nn.linear import is_dense
from ...nn.packed import PackedLinear
from ...nn.replace import detach_quantizer
from ...nn.transforms import NONE, ORDER
from .blank import plan_folder
from .packing import packed_modules
from .saving import bytes_needed, staging


def save_as(
    model: PreTrainedModel,
    writer: Writer,
    folder: Path,
    max_shard_size: str = "5GB",
    beside: Callable[[Path], Any] = lambda staged: None,
) -> tuple[dict[str, Kind], list[str]]:
    """Save a model of packed linear layers as ``writer`` has it; -> the kinds of the layers, by name, and the dense
    linear layers.

    The model is used up: it has no quantizer any more. beside: writes other files into the folder it is given, which
    take their places in ``folder`` with the weights, config.json last. Raises ValueError naming layer and reason,
    before anything is written, for what the layout cannot say; OSError if the disk is full, as save_pretrained.
    """
    weights = {name: plain_weight(name, module, writer.title) for name, module in packed_modules(model)}
    if not weights:
        raise ValueError(f"{type(model).__name__} holds no packed layer that {writer.title} files could hold")
    kinds = {name: writer.kind(*weight) for name, weight in weights.items()}
    kept = sorted(name for name, module in model.named_modules(remove_duplicate=False) if is_dense(module))
    config = writer.config(kinds, kept)
    state = _state(model, {name: written(writer, *weight) for name, weight in weights.items()})
    detach_quantizer(model)
    model.config.quantization_config = config
    with staging(folder, bytes_needed(state.values())) as staged:
        model.save_pretrained(staged, state_dict=state, max_shard_size=max_shard_size)
        plan_folder(str(staged), reader_for(config))
        beside(staged)
    return kinds, kept


def plain_weight(name: str, module: torch.nn.Module, title: str) -> tuple[PackedWeight, torch.Tensor | None]:
    """The weight of a packed linear layer, and the order of its inputs or None. ValueError naming the layer, and
    ``title``, which such files are called, for other modules and transforms."""
    if not isinstance(module, PackedLinear):
        raise ValueError(f"{name} is packed as {type(module).__name__}: {title} files hold linear layers only")
    if module.transform is NONE:
        order = None
    elif module.transform is ORDER:
        order = module.transform_order.detach().cpu().long()
    else:
        raise ValueError(f"{name} transforms its inputs ({module.transform.word}): {title} files can only order them")
    return replace(module.packed_weight(), name=name), order


def _state(model: PreTrainedModel, layers: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The state dict of a model with other tensors for these layers; biases stay."""
    state = model.state_dict()
    for name, tensors in layers.items():
        for own in model.get_submodule(name).state_dict():
            if own != "bias":
                del state[f"{name}.{own}"]
        state |= {f"{name}.{own}": tensor for own, tensor in tensors.items()}
    return state
