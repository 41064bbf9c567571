"""How do the output head and the embedding of a model in zipper weights become codes, too?"""

from __future__ import annotations

import re

import torch
from torch import nn
from transformers import PreTrainedModel

from ...formats import FORMATS
from ...nn.adapters import adapted_names
from ...nn.castable import has_dense_weight
from ...nn.coded_embedding import is_table
from ...nn.replace import untie_head
from ...nn.switch import precision_switch
from ...nn.zipper import ZipperLinear
from ...nn.zipper_embedding import ZipperEmbedding
from .config import MLSpecConfig


def pack_head_and_embedding(model: PreTrainedModel) -> PreTrainedModel:
    """Round the output head and the embedding of a model in zipper weights to codes, in place; -> the model.

    They get the split of the other layers. The head is multiplied as these are: both parts in a check, the low one in
    a "zipper-low" draft. A row of the embedding is read whole, in about 5.5 bits an element (4.5 in mode "paper"). A
    head that was tied gets a weight of its own, and the config says so. It is what
    ``MLSpecConfig(format="zipper", head_and_embedding=True)`` does while loading; the model is saved and loaded so.

    ValueError, before anything changes, for a model that is not in zipper weights, in another dtype than bfloat16,
    with adapters on its head, with another embedding than a plain or scaled one, or a width that blocks of 32 do not
    divide. A second call changes nothing.
    """
    config = getattr(model.config, "quantization_config", None)
    if not isinstance(config, MLSpecConfig) or config.record is not FORMATS["zipper"]:
        raise ValueError(
            f"pack_head_and_embedding: {type(model).__name__} is not in zipper weights; load it with "
            "quantization_config=MLSpecConfig(format='zipper', head_and_embedding=True)"
        )
    if config.head_and_embedding and isinstance(model.get_input_embeddings(), ZipperEmbedding):
        return model
    require_ends(model, "pack_head_and_embedding")
    return put_ends(model, config)


def require_ends(model: PreTrainedModel, action: str) -> None:
    """ValueError, which begins with ``action``, where head or embedding cannot be codes. They need no memory yet."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not has_dense_weight(head):
        kind = "no output head" if head is None else f"a {type(head).__name__} for an output head"
        raise ValueError(f"{action}: {type(model).__name__} has {kind}: leave head and embedding as they are")
    if adapted_names(model):
        raise ValueError(f"{action}: layers carry adapters: merge them first (peft: model.merge_and_unload())")
    if not is_table(table):
        raise ValueError(
            f"{action}: a {type(table).__name__} may do more than look up rows and scale them: leave head and "
            "embedding as they are"
        )
    if table.weight.dtype != torch.bfloat16 or head.weight.dtype != torch.bfloat16:
        raise ValueError(
            f"{action}: the embedding is {table.weight.dtype} and the head {head.weight.dtype}, rows of codes are "
            "bfloat16: load the model with dtype=torch.bfloat16 (--dtype bfloat16)"
        )
    for what, width in (("embedding", table.embedding_dim), ("head", head.in_features)):
        FORMATS["zipper"].require_fit(width, f"{action}: the {what}")


def put_ends(model: PreTrainedModel, config: MLSpecConfig) -> PreTrainedModel:
    """``pack_head_and_embedding`` of a model that fits; the config gets the names."""
    (head_path, head), (path, table) = _ends(model)
    switch, how = precision_switch(model), config.format_settings
    packed = ZipperLinear.from_linear(head, name=f"{head_path}.weight", switch=switch, **how)
    rows = ZipperEmbedding.from_embedding(table, name=f"{path}.weight", switch=switch, **how)
    model.set_submodule(head_path, packed)
    model.set_submodule(path, rows)
    untie_head(model)
    tell_ends(config, head_path)
    return model


def put_empty_embedding(model: PreTrainedModel, config: MLSpecConfig) -> None:
    """Room for the rows of a packed model that is about to be loaded; its head has been replaced with the linears."""
    table = model.get_input_embeddings()
    path = next(name for name, module in model.named_modules() if module is table)
    require_loadable(table, path)
    rows = ZipperEmbedding.empty(table, f"{path}.weight", precision_switch(model), **config.format_settings)
    model.set_submodule(path, rows)
    # Empty, and absent from folders of versions that did not save it.
    ignored = {*(model._keys_to_ignore_on_load_missing or ()), rf"(^|\.){re.escape(path)}\.row_like$"}
    model._keys_to_ignore_on_load_missing = ignored


def require_loadable(table: nn.Module, path: str) -> None:
    """ValueError for an embedding that is loaded in another dtype than its rows have."""
    if is_table(table) and table.weight.dtype != torch.bfloat16:
        raise ValueError(
            f"{path}: its rows are codes, which are read as bfloat16, and the model is to be loaded in "
            f"{table.weight.dtype}: load it with dtype=torch.bfloat16"
        )


def tell_ends(config: MLSpecConfig, head_path: str) -> None:
    """Say in the config that head and embedding are packed."""
    config.head_and_embedding = True
    config.modules_to_not_convert = [name for name in config.modules_to_not_convert if name != head_path]


def _ends(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Path and module of the head and of the embedding."""
    paths = {id(module): name for name, module in model.named_modules()}
    return [(paths[id(end)], end) for end in (model.get_output_embeddings(), model.get_input_embeddings())]
