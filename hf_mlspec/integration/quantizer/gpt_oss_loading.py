"""How does a gpt-oss folder in its original layout become a model? As transformers' layout, under other names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from ...checkpoints.gpt_oss_original import config_of, is_original, parameters
from ...checkpoints.layer import Reader
from ..dtype import dtype_or_bfloat16
from ..json_object import read_object
from .checkpoint import Checkpoint, require_own_shards
from .gguf_loading import checkpoint_of
from .source_config import SourceConfig, require_no_other
from .source_layers import put_sources, require_sources_fit

_FIXED_LIMIT = 7.0  # of transformers 5.17, whose config does not have it


def is_original_folder(name: str | os.PathLike) -> bool:
    """Whether it is a folder in gpt-oss's original layout. ValueError naming a config.json that is damaged."""
    file = Path(name) / "config.json"
    return file.is_file() and is_original(read_object(file))


def load_original(
    name: str | os.PathLike, *, dtype: torch.dtype | str | None = None, **options: Any
) -> PreTrainedModel:
    """The causal language model of such a folder. dtype: of what is not packed; None and "auto": bfloat16. options:
    of from_pretrained. ValueError or TypeError naming file and tensor for what is damaged, missing or of another
    model."""
    folder = Path(name)
    require_no_other(options.pop("quantization_config", None), name)
    require_own_shards(str(folder))
    dtype = dtype_or_bfloat16(dtype)
    words = config_of(read_object(folder / "config.json"), str(folder / "config.json"))
    stored = Checkpoint.read(sorted(folder.glob("*.safetensors")))
    found = parameters(stored.tensors, words, str(folder))
    reading = SourceConfig({"quant_method": "mxfp4"})
    reading.reader.tensors = found
    config = AutoConfig.for_model(**words)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    _require_fits(kind, config, reading.reader)
    plain = {key: tensor.load() for key, tensor in found.items()}
    loaded = kind.from_pretrained(
        None, config=config, state_dict=plain, dtype=dtype, quantization_config=reading, **options
    )
    (loaded[0] if isinstance(loaded, tuple) else loaded).config._name_or_path = os.fspath(name)
    return loaded


def _require_fits(kind: type[PreTrainedModel], config: PreTrainedConfig, reader: Reader) -> None:
    """As when the model is made, and before anything of its size is read."""
    checkpoint = checkpoint_of(reader)
    if config.swiglu_limit != _FIXED_LIMIT and not hasattr(type(config), "swiglu_limit"):
        raise ValueError(
            f"swiglu_limit is {config.swiglu_limit}, this transformers computes with {_FIXED_LIMIT}: upgrade it"
        )
    with torch.device("meta"):
        model = kind(config)
    put_sources(model, reader, checkpoint)
    require_sources_fit(model, checkpoint)
