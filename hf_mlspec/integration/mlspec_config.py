"""What does config.json say about a model that hf_mlspec saved?"""

from __future__ import annotations

from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from ..formats.mxfp4 import require_rule
from ..nn.switch import require_activation_bits

QUANT_METHOD = "mlspec"


class MLSpecConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of config.json.

    format: ``"mxfp4"``. rule: the rounding rule the weights were cast with (formats/mxfp4.py); loading does not need
    it. activation_bits: 16, or 8 where activations are quantized as well; files that do not say have 16.
    modules_to_not_convert: full names of the layers that were kept; every other ``nn.Linear`` is packed.
    """

    def __init__(
        self,
        format: str = "mxfp4",
        rule: str = "ocp_floor",
        modules_to_not_convert: list[str] | None = None,
        quant_method: str = QUANT_METHOD,
        activation_bits: int = 16,
        **unknown: Any,
    ) -> None:
        if quant_method != QUANT_METHOD:
            raise ValueError(f"MLSpecConfig: quant_method is {quant_method!r}, expected {QUANT_METHOD!r}")
        if format != "mxfp4":
            raise ValueError(f"MLSpecConfig: format {format!r} is unknown to this version, it reads 'mxfp4'")
        if unknown:
            raise ValueError(f"MLSpecConfig: unknown settings {sorted(unknown)}; the model may need a newer hf_mlspec")
        require_rule(rule)
        self.quant_method, self.format, self.rule = quant_method, format, rule
        self.activation_bits = require_activation_bits(activation_bits, format)
        self.modules_to_not_convert = list(modules_to_not_convert or [])
