"""In which format does a model keep keys and values? The quantization_config of this package says so."""

from __future__ import annotations

from torch import nn

from ..formats import CacheFormat, cache_format
from ..nn.settings import own_settings


def cache_format_of(model: nn.Module) -> CacheFormat | None:
    """None: as the model computes them. ValueError or TypeError for a word that is no format's."""
    return cache_format(own_settings(model).get("kv_cache"), "kv_cache of the model's quantization_config")
