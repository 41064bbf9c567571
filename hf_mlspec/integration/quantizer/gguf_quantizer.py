"""How does `from_pretrained(folder, gguf_file=...)` read the file into packed layers? transformers' quantizer
interface for GGUF, which is asked for the file's header, its dtype and its tensors.

transformers reads the config of the file itself, and leaves out biases, sizes of heads and rotary positions that
files have. What the file says of those takes its place.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from ...checkpoints.gguf_names import config_of
from .gguf_loading import plain_parameters, quantized
from .packed_quantizer import register
from .source import SourceQuantizer
from .source_config import GGUF_SOURCE_METHOD, SOURCE_METHOD, GgufSourceConfig

# What transformers may read otherwise, or not at all.
_OF_THE_FILE = ("rope_parameters", "head_dim", "attention_bias", "mlp_bias", "rms_norm_eps", "architectures")


class GgufSourceQuantizer(SourceQuantizer):
    """Reads the file that from_pretrained is given as ``gguf_file``."""

    def __init__(self, quantization_config: GgufSourceConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.quantization_config.quant_method = QuantizationMethod.GGUF  # others are refused beside gguf_file
        self._named = False

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The config, before a model is made of it, as the file has it."""
        own = AutoConfig.for_model(**config_of(self._reader.file))
        if type(config) is not type(own):
            raise ValueError(
                f"{self._reader.file.path} is of a {own.model_type} model, the config is {type(config).__name__}: "
                "leave config out"
            )
        for name in _OF_THE_FILE:
            if hasattr(own, name):
                setattr(config, name, getattr(own, name))
        return config

    update_tp_plan = update_attn_implementation  # of transformers 5.17, which has no other moment for it

    def read_header(self, file: str) -> None:
        """ValueError unless it is the file that was asked for, and holds layers in blocks."""
        own = self._reader.file.path
        if not os.path.samefile(file, own):
            raise ValueError(
                f"gguf_file is {file!r}, quantization_config was made for {str(own)!r}: name one file in both"
            )
        if not quantized(self._reader):
            raise ValueError(f"{str(own)!r} holds no layer in blocks of codes: leave quantization_config out")
        self._named = True

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Of what is not packed: bfloat16 where nobody asks for another."""
        return torch.bfloat16 if dtype is None else dtype

    def get_state_dict(self, file: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """The parameters that are not packed; layers read theirs themselves."""
        return plain_parameters(self._reader, model.dtype)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        own = str(self._reader.file.path)
        if not self._named:
            raise ValueError(f"quantization_config was made for {own!r}: name the file as gguf_file, too")
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
        if not isinstance(model, kind):
            raise ValueError(f"{own!r} is read as {kind.__name__}, not as {type(model).__name__}: load that class")
        return super()._process_model_before_weight_loading(model, **kwargs)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self.quantization_config.quant_method = model.quantization_method = SOURCE_METHOD
        model._weight_conversions = None
        return super()._process_model_after_weight_loading(model, **kwargs)


register(GGUF_SOURCE_METHOD, GgufSourceConfig, GgufSourceQuantizer)
