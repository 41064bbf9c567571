"""How does a checkpoint of any kind become a model that this package runs? One call, whoever wrote it."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .quantizer.gguf_loading import load_gguf
from .quantizer.source_config import is_gguf, loading_options


def load(name: str | os.PathLike, *, dtype: torch.dtype | str | None = None, **options: Any) -> PreTrainedModel:
    """The causal language model of a folder, a hub name or a GGUF file, in eval mode: unquantized, of this package, or
    a checkpoint of GPTQ, AWQ or compressed-tensors, which this package reads whatever else is installed.

    dtype: of what is not packed; None: the checkpoint's own, but bfloat16 for a GGUF file and where it is float16,
    which no compiled decoder takes. options: of from_pretrained. Raises ValueError or TypeError, naming file and
    tensor, for a checkpoint that is damaged or not read.
    """
    path = os.fspath(name)
    if is_gguf(path):
        return load_gguf(path, dtype=dtype, **options).eval()
    reading = loading_options(path)
    if dtype is None:
        config = reading.get("config") or AutoConfig.from_pretrained(path)
        stored = getattr(config, "dtype", None)
        dtype = torch.bfloat16 if stored == torch.float16 else "auto"
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **reading | options).eval()
