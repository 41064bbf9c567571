"""How is a large checkpoint of each kind made in seconds? Random codes, in the layout that the kind has."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_mlspec

GROUP = 128
GPT_OSS = "gpt-oss"
KINDS = ("gptq", "gptq act-order", "awq", GPT_OSS)
LAYER_BYTES = {GPT_OSS: 58e6}  # of one layer's file; of the others:
DENSE_BYTES = 104e6
HIDDEN, INNER = 4096, 11008
_INNER_OF = {False: (HIDDEN, INNER), True: (128, 256)}  # by --quick
_EIGHT_SEVENS = 0x77777777  # zero points of 8, as GPTQ's first version stores them


def config(layers: int, quick: bool) -> LlamaConfig:
    """A Llama of that many layers; nearly all of its bytes are in linear layers."""
    hidden, inner = _INNER_OF[quick]
    return LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, vocab_size=512,
                       num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64)


def write(folder: Path, kind: str, layers: int, quick: bool) -> int:
    """The checkpoint in ``folder``; its bytes."""
    torch.manual_seed(0)
    if kind == GPT_OSS:
        return _write_gpt_oss(folder, layers, quick)
    shape = config(layers, quick)
    with torch.device("meta"):
        parameters = dict(LlamaForCausalLM(shape).named_parameters())
    tensors: dict[str, Tensor] = {}
    for place, (name, weight) in enumerate(parameters.items()):
        if name.endswith("_proj.weight"):
            made = _awq(*weight.shape) if kind == "awq" else _gptq(*weight.shape, place if "order" in kind else None)
            tensors |= {f"{name.removesuffix('weight')}{key}": tensor for key, tensor in made.items()}
        else:
            tensors[name] = torch.randn(weight.shape).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    own = {"bits": 4, "group_size": GROUP}
    own |= {"quant_method": "awq", "zero_point": True, "version": "gemm"} if kind == "awq" else {
        "quant_method": "gptq", "sym": True, "desc_act": "order" in kind}  # fmt: skip
    kept = shape.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "quantization_config": own}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return (folder / "model.safetensors").stat().st_size


def _write_gpt_oss(folder: Path, layers: int, quick: bool) -> int:
    """A mixture in the layout of gpt-oss's own files: experts in MXFP4, all else in BF16."""
    width, experts = (64, 4) if quick else (1024, 32)
    shape = GptOssConfig(hidden_size=width, intermediate_size=width, num_hidden_layers=layers, vocab_size=512,
                         num_attention_heads=width // 64, num_key_value_heads=max(1, width // 256), head_dim=64,
                         num_local_experts=experts)  # fmt: skip
    with torch.device("meta"):
        parameters = dict(GptOssForCausalLM(shape).named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, weight in parameters.items():
        if name.endswith(("gate_up_proj", "down_proj")):  # of experts [E, in, out]
            count, inputs, outputs = weight.shape
            blocks = (count, outputs, inputs // 32, 16)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, blocks[:3], dtype=torch.uint8)
        else:
            tensors[name] = torch.randn(weight.shape).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    own = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    kept = shape.to_dict() | {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16", "quantization_config": own}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return (folder / "model.safetensors").stat().st_size


def write_ours(source: Path, folder: Path) -> int:
    """The same codes in our own format; their bytes."""
    hf_mlspec.load(source, dtype=torch.bfloat16).save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def _scales(outputs: int, inputs: int) -> Tensor:
    return torch.empty(inputs // GROUP, outputs).uniform_(0.001, 0.002).half()


def _gptq(outputs: int, inputs: int, order: int | None) -> dict[str, Tensor]:
    """``order``: the seed of an order of the inputs; projections of one input have one of their own each here."""
    groups = torch.arange(inputs, dtype=torch.int32) // GROUP
    if order is not None:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(order))]
    zeros = torch.full((inputs // GROUP, outputs // 8), _EIGHT_SEVENS, dtype=torch.int32)
    return {"qweight": _words(inputs // 8, outputs), "qzeros": zeros, "scales": _scales(outputs, inputs),
            "g_idx": groups.contiguous()}  # fmt: skip


def _awq(outputs: int, inputs: int) -> dict[str, Tensor]:
    return {"qweight": _words(inputs, outputs // 8), "qzeros": _words(inputs // GROUP, outputs // 8),
            "scales": _scales(outputs, inputs)}  # fmt: skip
