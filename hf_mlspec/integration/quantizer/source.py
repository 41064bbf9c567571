"""How does a checkpoint that another library wrote load as one of ours? transformers' quantizer interface, once more.

A config with a ``source`` stands for it, the ``quantization_config`` that the checkpoint came with. It reaches
from_pretrained in one of three ways: the user passes it (`MLSpecConfig.for_checkpoint`), it stands in the model's
config (`hf_mlspec.load`), or stock transformers would only say that a package is missing.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from ...checkpoints.anyprecision import AnyPrecisionReader
from ...checkpoints.readers import PACKAGES, is_readable, method_of
from ...nn.replace import attach_quantizer, detach_quantizer
from .checkpoint import PICKLED, Checkpoint, require_own_shards
from .gguf_loading import checkpoint_of
from .packed_quantizer import PackedQuantizer, register
from .packing import packed_modules
from .source_config import SOURCE_METHOD, SourceConfig
from .source_layers import convert_layers, put_sources, require_sources_fit, settings_of, warn_of_dense

_hooked: classmethod | None = None  # what stands at AutoHfQuantizer.merge_quantization_configs, while enabled


class SourceQuantizer(PackedQuantizer):
    """Reads another library's checkpoint: transformers loads its tensors into placeholders, and each becomes a packed
    layer. Then the model is one of ours, with `MLSpecQuantizer`."""

    def __init__(self, quantization_config: SourceConfig, **kwargs: Any) -> None:
        super().__init__(copy.deepcopy(quantization_config), **kwargs | {"pre_quantized": True})
        self._reader = self.quantization_config.reader

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        with torch.device("cpu"):  # transformers builds the model in a context of the meta device
            in_file = checkpoint_of(self._reader)
            checkpoint = in_file or self._read_headers(model, checkpoint_files or ())
            plans = put_sources(model, self._reader, checkpoint, in_file=in_file is not None)
            warn_of_dense(plans, model)
            require_sources_fit(model, checkpoint)
        return model

    def _read_headers(self, model: PreTrainedModel, checkpoint_files: Sequence[str]) -> Checkpoint:
        files = [str(file) for file in checkpoint_files]
        endings = (".safetensors", PICKLED) if getattr(self._reader, "pickled", False) else (".safetensors",)
        if not files or not all(file.endswith(endings) for file in files):
            raise ValueError(
                f"{self._reader.title} checkpoints are read from safetensors files, here are "
                f"{sorted({Path(file).suffix for file in files}) or 'none'}: convert them first"
            )
        require_own_shards(model.name_or_path, *(Path(file).parent for file in files))
        return Checkpoint.read(files)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        convert_layers(model)
        vars(model.config).pop(AnyPrecisionReader.method, None)  # it describes what the files held
        settings = settings_of(model)
        if settings is not None:
            attach_quantizer(model, settings)
            model.add_model_tags(["mlspec", settings["format"]])
        elif not any(packed_modules(model)):
            detach_quantizer(model)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Models whose layers are all alike become ours and are; others have no config that describes them."""
        return False


def enable() -> None:
    """Let from_pretrained take a `SourceConfig` for a checkpoint that has a config of its own, and read checkpoints
    for which stock transformers lacks a package. Done by `import hf_mlspec`; idempotent."""
    global _hooked
    if _hooked is None:
        _hooked = _choosing_merge(vars(AutoHfQuantizer)["merge_quantization_configs"])
        AutoHfQuantizer.merge_quantization_configs = _hooked


def disable() -> None:
    """Give transformers its own choice of configs back; beneath a wrapper of someone else, one that hands all on."""
    global _hooked
    if _hooked is not None and vars(AutoHfQuantizer)["merge_quantization_configs"] is _hooked:
        AutoHfQuantizer.merge_quantization_configs = _hooked.__func__.stock
    _hooked = None


def _choosing_merge(stock: classmethod) -> classmethod:
    @functools.wraps(stock.__func__)
    def merge_quantization_configs(cls, quantization_config, quantization_config_from_args=None):
        asked = quantization_config_from_args
        if _hooked is hooked and isinstance(asked, SourceConfig):
            return asked
        readable = asked is None and is_readable(quantization_config)
        if _hooked is hooked and readable and missing_packages(method_of(quantization_config)):
            return SourceConfig(quantization_config)
        return stock.__get__(None, cls)(quantization_config, asked)

    merge_quantization_configs.stock = stock
    hooked = classmethod(merge_quantization_configs)
    return hooked


def missing_packages(method: str) -> list[str]:
    """Those that stock transformers needs for checkpoints of a ``quant_method`` and that are not installed."""
    return [package for package in PACKAGES.get(method, ()) if importlib.util.find_spec(package) is None]


register(SOURCE_METHOD, SourceConfig, SourceQuantizer)
