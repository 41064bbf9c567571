"""What does this package's quantization_config say of a model, as an object or as config.json has it?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

QUANT_METHOD = "mlspec"


def own_settings(model: nn.Module) -> Mapping[str, Any]:
    """{} where there is none, or one of another library."""
    found = getattr(getattr(model, "config", None), "quantization_config", None)
    said = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
    return said if said.get("quant_method") == QUANT_METHOD else {}


def packs_weights(settings: Mapping[str, Any]) -> bool:
    """Whether own settings are about weights, and not about the cache alone."""
    return bool(settings) and settings.get("format", "") is not None


def cache_settings(model: nn.Module) -> dict[str, Any]:
    """Own settings that are not about weights: the format of keys and values, {} without one."""
    word = own_settings(model).get("kv_cache")
    return {} if word is None else {"kv_cache": word}
