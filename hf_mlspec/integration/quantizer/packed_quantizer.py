"""What do all quantizers of packed layers tell transformers, and how does it come to know one?"""

from __future__ import annotations

from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin


class PackedQuantizer(HfQuantizer):
    """Packed layers stay in memory, do not learn, and can be compiled."""

    requires_calibration = False

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """ValueError for what packed layers cannot do."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map sends modules to disk ('auto' does where max_memory is short): packed layers stay in "
                "memory, leave 'disk' out; bit-planes can be streamed instead, MLSpecConfig(plane_budget=...)"
            )

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def register(method: str, config: type[QuantizationConfigMixin], quantizer: type[PackedQuantizer]) -> None:
    """Make a ``quant_method`` known to transformers; calling it again changes nothing."""
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(method)(config)
    if method not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(method)(quantizer)
