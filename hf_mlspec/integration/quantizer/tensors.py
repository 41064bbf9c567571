"""How does a tensor become packed codes on its way from disk into the model?"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils import logging

from ...nn.experts import PackedExperts
from .config import MLSpecConfig
from .mapped_memory import let_go


class QuantizeTensor(ConversionOps):
    """transformers calls ``convert`` with one unpacked tensor, after its own renaming and merging (of experts), and
    stores the result. One object serves a whole load and shows its progress.
    """

    def __init__(self, config: MLSpecConfig, total: int) -> None:
        self._settings = config.format_settings
        # transformers' own bar: it honours disable_progress_bar() and HF_HUB_DISABLE_PROGRESS_BARS.
        self._bar = logging.tqdm(total=total, desc=f"Quantizing to {config.format}", unit="tensor", leave=False)

    def __deepcopy__(self, memo: dict) -> QuantizeTensor:
        return self

    def convert(
        self,
        input_dict: dict[str, Any],
        *args: Any,
        full_layer_name: str,
        model: PreTrainedModel,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The codes, scales and zero points of one unpacked tensor, by their full names."""
        (value,) = input_dict.values()
        wide = value[0] if isinstance(value, list) else value
        module, name = get_module_from_name(model, full_layer_name)
        try:
            packed = self._quantize(module, name, wide, full_layer_name)
        except (TypeError, ValueError) as error:
            return _Refused(error)
        let_go(wide)
        del module._parameters[name]
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        self._bar.update()
        prefix = full_layer_name.removesuffix(name)
        return {prefix + part: nn.Parameter(tensor, requires_grad=False) for part, tensor in packed.items()}

    def _quantize(self, module: nn.Module, name: str, wide: torch.Tensor, path: str) -> dict[str, torch.Tensor]:
        try:
            if isinstance(module, PackedExperts):
                return module.quantized(name, wide, path.removesuffix(f".{name}"), **self._settings)
            _require_shape(wide, module._parameters[name], path)
            weight = module.record.weight.from_dense(wide, **self._settings, name=path)
        except TypeError as error:
            raise TypeError(f"{path}: {error}") from error
        parts = zip(module.record.parts, weight.parts, strict=True)
        return {f"{name}_{part}": tensor for part, tensor in parts if tensor is not None}

    def close(self) -> None:
        """Take the progress bar away."""
        self._bar.close()


def _require_shape(wide: torch.Tensor, expected: nn.Parameter, path: str) -> None:
    shape = expected.to_local().shape if isinstance(expected, DTensor) else expected.shape
    if wide.shape != shape:
        raise ValueError(f"{path} has shape {list(wide.shape)}, config.json makes it {list(shape)}: they do not fit")


class _Refused(dict):
    """The result of a tensor that cannot be quantized: an error for whoever reads it.

    transformers catches what ``convert`` raises, goes on to load the whole model, and then raises an error that names
    no tensor. What it raises while it stores a result ends the load at once, in our words.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def items(self) -> NoReturn:
        """Raises."""
        raise self._error
