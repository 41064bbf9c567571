"""How does a GGUF file become a model? Its metadata gives the config, its blocks the packed layers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from ...checkpoints.gguf import GgufReader, dense, stored_layer
from ...checkpoints.gguf_names import config_of, parameters
from ...checkpoints.layer import Reader
from ..dtype import dtype_or_bfloat16
from .checkpoint import Checkpoint
from .source_config import SourceConfig, require_no_other


def load_gguf(name: str | os.PathLike, *, dtype: torch.dtype | str | None = None, **options: Any) -> PreTrainedModel:
    """The causal language model of a GGUF file. dtype: of what is not packed; None and "auto": bfloat16. options: of
    from_pretrained. ValueError naming the file for one that is damaged, or of an architecture that is not read."""
    require_no_other(options.pop("quantization_config", None), name)
    dtype = dtype_or_bfloat16(dtype)
    reading = source_of(name)
    config, plain = AutoConfig.for_model(**config_of(reading.reader.file)), plain_parameters(reading.reader, dtype)
    if quantized(reading.reader):
        options["quantization_config"] = reading
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded = kind.from_pretrained(None, config=config, state_dict=plain, dtype=dtype, **options)
    (loaded[0] if isinstance(loaded, tuple) else loaded).config._name_or_path = os.fspath(name)
    return loaded


def source_of(name: str | os.PathLike) -> SourceConfig:
    """What reads a GGUF file. ValueError naming the file for one that is damaged, or of a model that is not read."""
    return SourceConfig({"quant_method": GgufReader.method, "file": os.fspath(name)})


def plain_parameters(reader: GgufReader, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All parameters in ``dtype`` but those that are read as packed layers."""
    packed = quantized(reader)
    return {
        key: dense(tensor, dtype, reader.rows.get(key.rpartition(".")[0]))
        for key, tensor in parameters(reader.file).items()
        if key not in packed
    }


def quantized(reader: GgufReader) -> set[str]:
    """Names of the parameters that are read as packed layers: linear weights in blocks. Tables are dequantized."""
    return {
        name
        for name, tensor in parameters(reader.file).items()
        if name.endswith("_proj.weight") or name == "lm_head.weight"
        if reader.holds(stored_layer(name.removesuffix(".weight"), tensor))
    }


def checkpoint_of(reader: Reader) -> Checkpoint | None:
    """The tensors of a checkpoint whose files name them otherwise, by the model's names; None where they do not."""
    own = getattr(reader, "tensors", None)
    if own is not None:
        return Checkpoint(dict(own), {Path(tensor.file): {} for tensor in own.values()})
    if not isinstance(reader, GgufReader):
        return None
    return Checkpoint(dict(parameters(reader.file)), {reader.file.path: {}})
