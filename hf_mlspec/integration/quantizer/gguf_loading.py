"""How does a GGUF file become a model? Its metadata gives the config, its blocks the packed layers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from ...checkpoints.gguf import GgufReader, dense, stored_layer
from ...checkpoints.gguf_file import GgufTensor, open_gguf
from ...checkpoints.gguf_names import config_of, parameters, row_orders
from .checkpoint import Checkpoint
from .source_config import SOURCE_METHOD


def load_gguf(name: str | os.PathLike, *, dtype: torch.dtype | str | None = None, **options: Any) -> PreTrainedModel:
    """The causal language model of a GGUF file. dtype: of what is not packed; None and "auto": bfloat16. options: of
    from_pretrained. ValueError naming the file for one that is damaged, or of an architecture that is not read."""
    dtype = torch.bfloat16 if dtype in (None, "auto") else dtype
    file = open_gguf(name)
    source = {"quant_method": "gguf", "file": os.fspath(name)}
    config = AutoConfig.for_model(**config_of(file))
    found, orders = parameters(file), row_orders(file)
    quantized = _quantized(found, GgufReader(orders))
    if quantized:
        config.quantization_config = {"quant_method": SOURCE_METHOD, "source": source}
    plain = {
        key: dense(tensor, dtype, orders.get(key.rpartition(".")[0]))
        for key, tensor in found.items()
        if key not in quantized
    }
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded = kind.from_pretrained(None, config=config, state_dict=plain, dtype=dtype, **options)
    (loaded[0] if isinstance(loaded, tuple) else loaded).config._name_or_path = os.fspath(name)
    return loaded


def _quantized(found: Mapping[str, GgufTensor], reader: GgufReader) -> set[str]:
    """Names of the parameters that are read as packed layers: linear weights in blocks. Tables are dequantized."""
    return {
        name
        for name, tensor in found.items()
        if name.endswith("_proj.weight") or name == "lm_head.weight"
        if reader.holds(stored_layer(name.removesuffix(".weight"), tensor))
    }


def checkpoint_of(source: dict[str, Any]) -> Checkpoint | None:
    """The tensors of the file that a ``source`` of this kind names, by the model's names; None for another kind."""
    if source.get("quant_method") != "gguf":
        return None
    file = open_gguf(source["file"])
    return Checkpoint(dict(parameters(file)), {Path(source["file"]): {}})
