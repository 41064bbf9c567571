"""How does transformers load and save a model whose linear weights are packed? Its quantizer interface, registered
here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from ..formats.weights import Mxfp4Weight
from ..nn.linear import Mxfp4Linear
from ..nn.switch import PrecisionSwitch
from .mlspec_config import QUANT_METHOD, MLSpecConfig


class MLSpecQuantizer(HfQuantizer):
    """Loads and saves packed models. Casting is ``hf_mlspec.direct_cast``, which shares the memory of a loaded model.
    """

    requires_calibration = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """ValueError when from_pretrained is asked to quantize on the fly."""
        if not self.pre_quantized:
            raise ValueError(
                "from_pretrained cannot quantize to mlspec while loading: load the model without quantization_config, "
                "then call hf_mlspec.direct_cast(model)"
            )

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        kept = set(self.quantization_config.modules_to_not_convert)
        switch = PrecisionSwitch("mxfp4", self.quantization_config.activation_bits)
        for name, module in list(model.named_modules(remove_duplicate=False)):
            if type(module) is nn.Linear and name not in kept:
                model.set_submodule(name, Mxfp4Linear.empty(module, name, switch))
        guard = rf"(^|\.){re.escape(_guard_name(model))}$"
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), guard}
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name, module in _packed_layers(model):
            weight = Mxfp4Weight(module.weight_packed, module.weight_scale, name)  # as read: nothing ran yet
            weight.validate(module.out_features, module.in_features)
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What save_pretrained writes: the model's tensors and one guard byte.

        Where hf_mlspec is not imported, transformers skips an unknown quantization and would run the model with random
        weights. The guard carries the name of a weight that stock code expects and a shape it cannot have, so that
        this load stops with a size mismatch.
        """
        return {**model.state_dict(), _guard_name(model): torch.zeros(1, dtype=torch.uint8)}, {}

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
        for name, module in list(_packed_layers(model)):
            dense = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            dense.weight, dense.bias = nn.Parameter(module.dequantized(dtype), requires_grad=False), module.bias
            model.set_submodule(name, dense)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _packed_layers(model: nn.Module) -> Iterator[tuple[str, Mxfp4Linear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Mxfp4Linear))


def _guard_name(model: nn.Module) -> str:
    name, _ = next(_packed_layers(model), (None, None))
    if name is None:
        raise ValueError(
            f"{type(model).__name__} holds no packed layer, though its config says quant_method {QUANT_METHOD!r}"
        )
    return f"{name}.weight"


def register() -> None:
    """Make ``quant_method: "mlspec"`` known to transformers; calling it again changes nothing."""
    if QUANT_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(QUANT_METHOD)(MLSpecConfig)
    if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(QUANT_METHOD)(MLSpecQuantizer)


register()
