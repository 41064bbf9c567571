"""How does transformers quantize, load and save a model of packed weights?

Its quantizer interface, registered here.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.quantizers_utils import get_module_from_name

from ...checkpoints.safetensors_file import CHECKSUMS_KEY, checksums
from ...formats import cache_format
from ...nn.castable import require_plain_inputs
from ...nn.expert_modules import ExpertModule, is_experts
from ...nn.nest import unnest
from ...nn.packed import PackedLinear, PackedModule
from ...nn.plane_experts import PlaneExperts
from ...nn.transforms import NONE
from ...routing.router import Router
from ..dtype import dtype_named
from ..request import head_size
from ..routed import ROUTER_FILE, check_router, read_router, stored_router
from ..streamed import AUTO, device_of_map, shared_out, stream_planes
from .calibrated_loading import calibrate_loaded, prepare_to_calibrate
from .checkpoint import Checkpoint, require_own_shards, require_packed, require_plain, require_sources
from .config import QUANT_METHOD, MLSpecConfig
from .ends import put_empty_embedding, put_ends, require_ends
from .every_expert import require_every_expert
from .nested_loading import (
    escapes_of,
    nest_loaded,
    nest_tied,
    plain_experts,
    require_here,
    require_nestable,
    require_unshared,
    tied_to_tables,
    with_plain_tables,
)
from .packed_quantizer import PackedQuantizer, register
from .packing import (
    choose_kept,
    packed_modules,
    packed_parameters,
    put_packed,
    require_groups_fit,
    source_parameters,
    warn_of_unpackable,
)
from .tensors import QuantizeTensor


class MLSpecQuantizer(PackedQuantizer):
    """Quantizes a model while it loads, and loads and saves packed ones. ``hf_mlspec.direct_cast``, which shares the
    memory of a model that is already loaded, gives its drafts this quantizer, too."""

    def __init__(self, quantization_config: MLSpecConfig, **kwargs: Any) -> None:
        super().__init__(copy.deepcopy(quantization_config), **kwargs)  # the user's object serves other models, too
        self._quantize: QuantizeTensor | None = None
        self._samples: list[torch.Tensor] = []
        self._checked = False
        self._folder: Path | None = None
        self._device: Any = None  # where planes are streamed to,
        self._streaming = self.quantization_config.streaming  # and how
        self._model: PreTrainedModel | None = None  # while its device map is sought
        self.router: Router | None = None  # of bit-planes: integration/routed.py

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """ValueError for what packed layers, and planes that are streamed, cannot do."""
        if self.quantization_config.streaming is not None:
            device_of_map(device_map)
        super().validate_environment(*args, device_map=device_map, **kwargs)

    def update_device_map(self, device_map: Any) -> Any:
        """A model whose planes are streamed is loaded to the CPU, and goes to its device layer by layer."""
        if self._streaming is None:
            return device_map
        self._device = device_of_map(device_map)
        return device_map if device_map in (None, AUTO) else {"": torch.device("cpu")}

    def adjust_max_memory(self, max_memory: dict[str, int | str]) -> dict[str, int | str]:
        """What accelerate fills of a model with device_map="auto": where planes are to be streamed, the CPU first."""
        if self._model is None:
            return max_memory
        found, self._model = shared_out(self._model, max_memory, self._streaming), None
        if found is None:
            return max_memory
        self._device, self._streaming = found
        return {"cpu": sys.maxsize}

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """For device maps: an unquantized tensor is freed as soon as it is quantized."""
        return 0 if self.param_needs_quantization(model, param_name) else param.element_size()

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether ``param_name`` is an unquantized tensor that a packed module needs."""
        module, name = get_module_from_name(model, param_name)
        return isinstance(module, PackedModule) and name in module.names

    def get_quantize_ops(self) -> QuantizeTensor:
        """What makes 4-bit codes of such a tensor."""
        assert self._quantize is not None, "asked for before the model was prepared"
        return self._quantize

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        if checkpoint_files:
            require_own_shards(model.name_or_path, *(Path(file).parent for file in checkpoint_files))
        _require_heads(model, self.quantization_config.kv_cache)
        if self.quantization_config.record is None:
            return model
        if self.quantization_config.record.stays_whole:
            require_unshared(model, self.quantization_config)
        files = [file for file in checkpoint_files or () if str(file).endswith(".safetensors")]
        checkpoint = Checkpoint.read(files) if files and len(files) == len(checkpoint_files) else None
        transform = self.quantization_config.transform
        if self._packs_ends:
            require_ends(model, "MLSpecConfig: head_and_embedding")
        if self.pre_quantized:
            self._prepare_to_load(model, checkpoint)
        elif transform != NONE.word:
            raise ValueError(f"MLSpecConfig: transform is {transform!r}: quantizing chooses none, leave it out")
        elif self.quantization_config.request is not None:
            self._samples = prepare_to_calibrate(model, self.quantization_config, checkpoint)
        elif self._nests:
            require_nestable(model, self.quantization_config)
        else:
            self._prepare_to_quantize(model, checkpoint)
        self._model = model
        if self.quantization_config.router is not None:
            self._folder = Path(checkpoint_files[0]).parent if checkpoint_files else None
            check_router(model, self._router_path(model))
        return model

    def _router_path(self, model: PreTrainedModel) -> Path:
        """Beside the weights of a packed model, else where the user said."""
        router = self.quantization_config.router
        return stored_router(model, router, self._folder) if self.pre_quantized else Path(router)

    @property
    def _nests(self) -> bool:
        """Whether the format is one that a model takes on in place, after it was loaded."""
        record = self.quantization_config.record
        return record is not None and record.in_place

    @property
    def _packs_ends(self) -> bool:
        """Whether head and embedding become codes once they are loaded."""
        return self.quantization_config.head_and_embedding and not self.pre_quantized

    def _prepare_to_load(self, model: PreTrainedModel, checkpoint: Checkpoint | None) -> None:
        config = self.quantization_config
        if checkpoint is not None:
            require_plain(checkpoint, model)
        kept = set(config.modules_to_not_convert)
        if self._nests:
            kept |= tied_to_tables(model)  # nested once they are loaded: on disk such a pair is one plain tensor
            kept |= plain_experts(model, checkpoint) if checkpoint is not None else set()
        if config.weights == PlaneExperts.format and checkpoint is not None:  # earlier versions left experts dense
            kept |= plain_experts(model, checkpoint, "planes")
        escapes = escapes_of(checkpoint) if checkpoint is not None else {}
        put_packed(model, config, kept, with_sources=False, escapes=escapes)
        if config.head_and_embedding:
            put_empty_embedding(model, config)
        guard = _guard_name(model).removeprefix(f"{model.base_model_prefix}.")  # a base model's has no prefix
        guard = rf"(^|\.){re.escape(guard)}$"
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), guard}
        if checkpoint is not None:
            require_packed(checkpoint, model, packed_parameters(model))
            self._checked = True

    def _prepare_to_quantize(self, model: PreTrainedModel, checkpoint: Checkpoint | None) -> None:
        config = self.quantization_config
        if config.record.why_not_quantized:
            why = config.record.why_not_quantized
            raise ValueError(f"MLSpecConfig: no model is quantized to {config.format!r}: {why}")
        defaults = self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules, add_default_skips=True)
        kept = choose_kept(model, config, defaults)
        require_groups_fit(model, config, kept)
        warn_of_unpackable(model, config, kept)
        put_packed(model, config, kept, with_sources=True)
        config.modules_to_not_convert = sorted(kept)
        sources = source_parameters(model)
        if checkpoint is not None:
            require_every_expert(checkpoint, model)
            require_sources(checkpoint, model, sources)
        self._quantize = QuantizeTensor(config, len(sources))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self._model = None
        if self.quantization_config.record is None:
            return model
        if self.quantization_config.request is not None:
            calibrate_loaded(model, self.quantization_config, self._samples)
            return put_ends(model, model.config.quantization_config) if self._packs_ends else model
        if self._quantize is not None:
            self._quantize.close()
            self._quantize = None
        waiting = sorted(source_parameters(model))
        if waiting:
            raise ValueError(
                f"{len(waiting)} weights that were to be quantized were not among what was loaded, the first is "
                f"{waiting[0]}: give the whole checkpoint"
            )
        if self.quantization_config.record.stays_whole:
            require_here(model, self.quantization_config)
        for name, module in packed_modules(model):
            for parameter in (tensor for own in module.names for tensor in module.held(own)):
                if parameter is not None:
                    _require_loaded(name, parameter.requires_grad_(False), self._checked or not self.pre_quantized)
            if self.pre_quantized and not self._checked:
                _require_valid(name, module)
        if self._nests and self.pre_quantized:
            nest_tied(model, self.quantization_config)
        elif self._nests:
            nest_loaded(model, self.quantization_config)
        if self._packs_ends:
            put_ends(model, self.quantization_config)
        if self.quantization_config.router is not None:
            every = self.quantization_config.router_every
            self.router = read_router(model, self._router_path(model)).choosing(every)
            self.quantization_config.router = ROUTER_FILE  # its name wherever the model is saved
        if (streaming := self._streaming) is not None:
            how = {"top_planes": streaming.top_planes, "folder": streaming.folder, "device": self._device}
            stream_planes(model, streaming.budget, **how)
        model.add_model_tags([QUANT_METHOD, self.quantization_config.format])
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What save_pretrained writes: the model's tensors under their names in the model, one guard byte, and in the
        metadata of every file the CRC-32 of all tensors. Of a model without packed weights what stock code writes.

        Where hf_mlspec is not imported, transformers skips an unknown quantization and would run the model with random
        weights. The guard carries the name of a weight that stock code expects and a shape it cannot have, so that
        this load stops with a size mismatch.
        """
        if self.quantization_config.record is None:
            return super().get_state_dict_and_metadata(model)
        model._weight_conversions = []  # a packed tensor has no older name, and cannot be split as a wide one
        state = with_plain_tables(model, model.state_dict(), self.quantization_config)
        state[_guard_name(model)] = torch.zeros(1, dtype=torch.uint8)
        return state, {CHECKSUMS_KEY: json.dumps(checksums(state))}

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str) -> PreTrainedModel:
        if self.quantization_config.record is None:
            return model
        require_plain_inputs(model, "dequantize", or_dense=True)
        dtype = dtype_named(dtype)  # a word in the config once it was saved
        if self._nests:
            nested = [name for name, _ in packed_modules(model)]
            unnest(model)
            dense = [model.get_submodule(name) for name in nested]
            keys = [ExpertModule.of(own, "").sizes if is_experts(own) else ("weight",) for own in dense]
            for weight in (getattr(own, key) for own, names in zip(dense, keys, strict=True) for key in names):
                weight.data = weight.data.to(dtype)  # a tied table holds the same parameter
        for name, module in list(packed_modules(model)):
            linear = isinstance(module, PackedLinear)
            wide = _wide_linear(module, dtype) if linear else module.dequantized_module(dtype)
            model.set_submodule(name, wide.train(module.training))
        model._weight_conversions = None  # saved under the names that transformers gives such a model
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True


def _require_loaded(name: str, parameter: nn.Parameter, was_there: bool) -> None:
    if parameter.is_meta:
        raise ValueError(
            f"{name} was offloaded by the device map or was not in the checkpoint: packed layers stay in memory, give "
            "a device_map that offloads nothing and the whole checkpoint"
        )
    # transformers fills what it did not find with whatever the memory holds, and marks what it did.
    if not (was_there or getattr(parameter, "_is_hf_initialized", False)):
        raise ValueError(
            f"{name}: its packed tensors (one has shape {list(parameter.shape)}) were not all among what was loaded: "
            "give the whole checkpoint"
        )


def _require_valid(name: str, module: PackedModule) -> None:
    if isinstance(module, PackedLinear):
        for key, tensor in module.transform_tensors().items() if module.transform.check is not None else ():
            module.transform.check(module.in_features)(name, f"transform_{key}", tensor)
        replace(module.packed_weight(), name=name).validate(module.out_features, module.in_features)
    else:
        module.validate(name)


def _wide_linear(layer: PackedLinear, dtype: torch.dtype) -> nn.Linear:
    wide = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    wide.weight, wide.bias = nn.Parameter(layer.dequantized_plain(dtype), requires_grad=False), layer.bias
    return wide


def _guard_name(model: nn.Module) -> str:
    found = sorted(packed_modules(model), key=lambda entry: not isinstance(entry[1], PackedLinear))  # stable
    if not found:
        raise ValueError(
            f"{type(model).__name__} holds no packed layer, though its config says quant_method {QUANT_METHOD!r}"
        )
    name, module = found[0]
    return f"{name}.{module.names[0]}"


def _require_heads(model: PreTrainedModel, kv_cache: str | None) -> None:
    """ValueError for keys and values in a format that does not take the size of a head."""
    size = head_size(model)
    if kv_cache is None or size is None:
        return
    try:
        cache_format(kv_cache, "kv_cache").width(size)
    except ValueError as error:
        raise ValueError(f"MLSpecConfig: kv_cache is {kv_cache!r}, which this model cannot have: {error}") from error


register(QUANT_METHOD, MLSpecConfig, MLSpecQuantizer)
