"""How do the tests come by mixtures that other libraries quantized? Matrix by matrix, as the files have them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from hf_mlspec.formats import Mxfp4Weight
from tests.foreign_checkpoints import Codes, awq, bit_stream, gptq, rounded

_SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2, "num_experts_per_tok": 2,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**_SHAPE, head_dim=16, intermediate_size=96, moe_intermediate_size=96, num_experts=4),
    "mixtral": MixtralConfig(**_SHAPE, intermediate_size=96, num_local_experts=4),
    "olmoe": OlmoeConfig(**_SHAPE, intermediate_size=96, num_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**_SHAPE, intermediate_size=96, moe_intermediate_size=96, num_experts=4,
                                shared_expert_intermediate_size=128),
}  # fmt: skip
# quant_method -> quantization_config, options of `rounded`.
KINDS = {
    "gptq": ({"bits": 4, "sym": True, "desc_act": False}, {"symmetric": True}),
    "gptq-8": ({"bits": 8, "sym": True, "desc_act": False}, {"symmetric": True}),
    "gptq-zeros": ({"bits": 4, "sym": False, "desc_act": False}, {"symmetric": False}),
    "awq": ({"bits": 4, "zero_point": True, "version": "gemm"}, {"symmetric": False}),
    "auto-round": ({"bits": 4, "sym": True, "packing_format": "auto_round:auto_gptq"}, {"symmetric": True}),
    "compressed-tensors": ({"format": "pack-quantized"}, {"symmetric": True}),
    "mxfp4": ({"format": "mxfp4-pack-quantized"}, {}),
}
_METHODS = {"gptq-zeros": "gptq", "gptq-8": "gptq", "mxfp4": "compressed-tensors"}
_EXPERT_WORDS = ("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")


def mixture(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model in eval mode."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=dtype).eval()


def quantized_layers(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of what such libraries quantize: attention, experts, shared experts; neither routers nor the gate of a
    shared expert."""
    words = (*_EXPERT_WORDS, "q_proj", "k_proj", "v_proj", "o_proj")
    names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    return [name for name in names if name.rpartition(".")[2] in words]


def compressed(codes: Codes) -> dict[str, torch.Tensor]:
    """The tensors of a symmetric 4-bit layer in compressed-tensors' pack-quantized."""
    shape = torch.tensor(codes.code.shape, dtype=torch.int64)
    return {"weight_packed": bit_stream(codes.code, 4), "weight_scale": codes.scale, "weight_shape": shape}


def stored(weight: torch.Tensor, kind: str, size: int = 32, **more) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of one layer, and the values that they mean."""
    if kind == "mxfp4":
        packed = Mxfp4Weight.from_dense(weight.float())
        return {"weight_packed": packed.weight_packed, "weight_scale": packed.weight_scale}, packed.dequantize()
    own, options = KINDS[kind]
    codes = rounded(weight.float(), own.get("bits", 4), size, **{**options, **more})
    writers = {"awq": awq, "compressed-tensors": compressed}
    tensors = writers[kind](codes) if kind in writers else gptq(codes, own["bits"])
    steps = torch.from_numpy(codes.code - codes.zero[:, codes.group]).double()
    return tensors, steps * codes.scale.double()[:, torch.from_numpy(np.asarray(codes.group))]


def write_mixture(
    folder: Path, model: PreTrainedModel, kind: str, size: int = 32
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of ``model`` in which attention and experts are quantized, and the values by the names in the files."""
    model.save_pretrained(folder)
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in quantized_layers(tensors):
        own, values[name] = stored(tensors.pop(f"{name}.weight"), kind, size)
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"quant_method": _METHODS.get(kind, kind), "group_size": size, **KINDS[kind][0]}
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "quantization_config": config}))
    return folder, values


def of_expert(values: dict[str, torch.Tensor], layer: int, expert: int) -> dict[str, torch.Tensor]:
    """Values of one expert by transformers' names: gate above up, and down."""
    words = {
        name.rpartition(".")[2]: value for name, value in values.items()
        if f"layers.{layer}." in name and f".experts.{expert}." in name
    }  # fmt: skip
    gate, up, down = ("w1", "w3", "w2") if "w1" in words else ("gate_proj", "up_proj", "down_proj")
    return {"gate_up_proj": torch.cat([words[gate], words[up]]), "down_proj": words[down]}
