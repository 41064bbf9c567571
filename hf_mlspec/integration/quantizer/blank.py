"""What would a checkpoint's model be made of? The model without memory, and a plan of every quantized layer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ...checkpoints.gguf_names import config_of
from ...checkpoints.layer import LayerPlan, Reader
from ..levels.load import LOAD_ERRORS, first_line, require_config
from .checkpoint import PICKLED, Checkpoint, require_own_shards
from .gguf_loading import checkpoint_of
from .gpt_oss_loading import is_original_folder
from .research import require_no_research
from .source_config import is_gguf, read_config, source_in
from .source_layers import put_sources, require_sources_fit


def blank_model(folder: str, dtype: torch.dtype | None = None, reader: Reader | None = None) -> PreTrainedModel:
    """The causal language model that config.json of ``folder``, or a GGUF file, describes, unquantized, on the meta
    device, in eval mode. reader: of the GGUF file. ValueError, in one line, where it describes none."""
    try:
        in_file = is_gguf(folder)
        config = AutoConfig.for_model(**config_of(reader.file)) if in_file else AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            plain = _without_quantization(config)
            model = AutoModelForCausalLM.from_config(plain, dtype=dtype or getattr(config, "dtype", None))
        _know_scales(model)
    except (*LOAD_ERRORS, AttributeError, TypeError) as error:
        raise ValueError(f"{folder!r} describes no causal language model: {first_line(error)}") from error
    return model.eval()


def _know_scales(model: PreTrainedModel) -> None:
    """Scales of embeddings are buffers that config.json tells: they need no memory to be known."""
    for module in model.modules():
        scale = getattr(module, "scalar_embed_scale", None)
        if scale is not None and "embed_scale" in module._buffers:
            module.embed_scale = torch.tensor(scale, device="cpu")


def _without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return plain


def quantization_of(name: str) -> dict[str, Any] | None:
    """The ``quantization_config`` of a folder or hub name, None where there is none; of a GGUF file what stands for
    it. ValueError, in one line, for a config.json that is missing or damaged."""
    if is_gguf(name):
        return {"quant_method": "gguf", "file": name}
    require_config(name, repr(name))
    require_no_research(name)
    if is_original_folder(name):
        raise ValueError(
            f"{name!r} is in the original layout of gpt-oss, which is neither inspected nor converted: "
            "hf_mlspec.load reads it, and save_pretrained writes it in the format of this package"
        )
    try:
        return source_in(read_config(name, {}), name)
    except (*LOAD_ERRORS, AttributeError, TypeError) as error:
        raise ValueError(f"the config.json of {name!r} cannot be read: {first_line(error)}") from error


def read_checkpoint(folder: str, reader: Reader | None = None) -> Checkpoint:
    """The headers of all safetensors files of ``folder``, or that of a GGUF file, which its ``reader`` has open.
    ValueError naming a file that is damaged, or where there is none."""
    if is_gguf(folder):
        return checkpoint_of(reader)
    require_own_shards(folder)
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files and getattr(reader, "pickled", False):
        files = sorted(Path(folder).glob(f"pytorch_model*{PICKLED}"))
    if not files:
        raise ValueError(f"{folder!r} holds no safetensors file: convert its weights first")
    return Checkpoint.read(files)


def plan_folder(
    folder: str, reader: Reader, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, list[LayerPlan]]:
    """The model of another library's checkpoint, with a `SourceLinear` for every quantized layer, and their plans.

    reader: that of its ``quantization_config``. Only headers are read, and what the plans need, such as scales.
    ValueError or TypeError naming what is not read, missing, damaged or of another model.
    """
    checkpoint, model = read_checkpoint(folder, reader), blank_model(folder, dtype, reader)
    plans = put_sources(model, reader, checkpoint)
    require_sources_fit(model, checkpoint)
    return model, plans
