"""In which format does a model keep keys and values? The quantization_config of this package says so."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..formats import CacheFormat, cache_format


def cache_format_of(model: nn.Module) -> CacheFormat | None:
    """None: as the model computes them. ValueError or TypeError for a word that is no format's."""
    found = getattr(getattr(model, "config", None), "quantization_config", None)
    if found is None:
        return None
    said = found if isinstance(found, Mapping) else vars(found)
    word = said.get("kv_cache") if said.get("quant_method") == "mlspec" else None
    return cache_format(word, "kv_cache of the model's quantization_config")
