"""How does a checkpoint of any kind become a model that this package runs? One call, whoever wrote it."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from .dtype import dtype_named
from .levels.words import require_no_head
from .quantizer.checkpoint import require_own_shards, stored_dtype
from .quantizer.gguf_loading import load_gguf
from .quantizer.gpt_oss_loading import is_original_folder, load_original
from .quantizer.research import require_no_research
from .quantizer.source_config import find_gguf, loading_options, read_config


def load(name: str | os.PathLike, *, dtype: torch.dtype | str | None = None, **options: Any) -> PreTrainedModel:
    """The causal language model of a folder, a hub name or a GGUF file, in eval mode: unquantized, of this package, or
    a checkpoint of GPTQ, AWQ or compressed-tensors, which this package reads whatever else is installed.

    dtype: of what is not packed; None: the checkpoint's own, but bfloat16 for a GGUF file and where it is float16,
    which the decoder of GPUs does not take, and that of the CPU copies to float32. options: of from_pretrained, also
    ``gguf_file`` in a folder. Raises ValueError or TypeError, naming file and tensor, for a checkpoint that is damaged
    or not read, and ValueError for a word that is no dtype.
    """
    path, given = os.fspath(name), options.pop("torch_dtype", None)
    dtype = dtype_named(given if dtype is None else dtype)
    require_own_shards(path)
    file = find_gguf(path, options)
    if file is not None:
        options.pop("gguf_file", None)
        return _ready(load_gguf(file, dtype=dtype, **options))
    require_no_research(path)
    require_no_head(path)
    if is_original_folder(path):
        return _ready(load_original(path, dtype=dtype, **options))
    reading = loading_options(path, options)
    if dtype is None:
        config = reading.get("config") or read_config(path, options)
        stored = getattr(config, "dtype", None) or stored_dtype(path)
        dtype = torch.bfloat16 if stored == torch.float16 else "auto"
    return _ready(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options | reading))


def _ready(found: Any) -> Any:
    """In eval mode; with ``output_loading_info`` the model is the first of two."""
    (found[0] if isinstance(found, tuple) else found).eval()
    return found
