"""In which format does a model keep keys and values? Its quantization_config says so."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..formats import CacheFormat, cache_format


def cache_format_of(model: nn.Module) -> CacheFormat | None:
    """None: as the model computes them. ValueError or TypeError for a word that is no format's."""
    found = getattr(getattr(model, "config", None), "quantization_config", None)
    word = found.get("kv_cache") if isinstance(found, Mapping) else getattr(found, "kv_cache", None)
    return None if word is None else cache_format(word, "kv_cache of the model's quantization_config")
