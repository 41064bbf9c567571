"""How does one BF16 model become a checkpoint of each kind? Rounded to the nearest code, laid out as the kind has it.

Nothing of hf_mlspec's readers is used: what they read is compared with the values that are returned here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_mlspec

GROUP = 128
_AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
_NIBBLES = torch.arange(0, 32, 4)
Values = dict[str, Tensor]  # the weights that a checkpoint means, float32 [out, in], by name


def _words(codes: Tensor) -> Tensor:
    """int64 codes [..., 8 n] -> int32 [..., n], the first in the lowest bits."""
    return (codes.unflatten(-1, (-1, 8)) << _NIBBLES).sum(-1).to(torch.uint32).view(torch.int32)


def _rounded(weight: Tensor, symmetric: bool, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes, zero points, float16 scales, the group of every input, and the values."""
    inputs = weight.shape[1]
    order = torch.arange(inputs) if order is None else order
    group = torch.empty(inputs, dtype=torch.int64)
    group[order] = torch.arange(inputs) // GROUP
    parts = weight.float()[:, order].unflatten(-1, (-1, GROUP))
    if symmetric:
        scale = (parts.abs().amax(-1) / 7.5).half()
        zero = torch.full(scale.shape, 8)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).half()
        zero = (-low / scale.float()).round().clamp(0, 15).long()
    codes = (weight.float() / scale.float()[:, group]).round().long() + zero[:, group]
    codes = codes.clamp(0, 15)
    return codes, zero, scale, group, (codes - zero[:, group]).float() * scale.float()[:, group]


def _gptq(weight: Tensor, order: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    codes, zero, scale, group, values = _rounded(weight, True, order)
    tensors = {"qweight": _words(codes).t(), "qzeros": _words(zero.t() - 1), "scales": scale.t(), "g_idx": group.int()}
    return tensors, values


def _awq(weight: Tensor, order: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    codes, zero, scale, _, values = _rounded(weight, False, None)

    def interleaved(numbers: Tensor) -> Tensor:
        return _words(numbers.t().unflatten(-1, (-1, 8))[..., _AWQ_COLUMNS].flatten(-2))

    return {"qweight": interleaved(codes), "qzeros": interleaved(zero), "scales": scale.t()}, values


def _compressed(weight: Tensor, order: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP, dynamic=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    scale = (weight.float().unflatten(-1, (-1, GROUP)).abs().amax(-1) / 7.5).bfloat16()
    packed = PackedQuantizationCompressor.compress({"weight": weight.bfloat16(), "weight_scale": scale}, scheme)
    steps = packed["weight_packed"].unsqueeze(-1) >> _NIBBLES & 15
    return packed, (steps.flatten(-2) - 8).float() * scale.float().repeat_interleave(GROUP, -1)


_CONFIG = {"bits": 4, "group_size": GROUP}
KINDS: dict[str, tuple[dict, Callable[[Tensor, Tensor | None], tuple[dict[str, Tensor], Tensor]] | None]] = {
    "ours": ({}, None),
    "gptq": ({"quant_method": "gptq", "sym": True, "desc_act": False, **_CONFIG}, _gptq),
    "gptq act-order": ({"quant_method": "gptq", "sym": True, "desc_act": True, **_CONFIG}, _gptq),
    "awq": ({"quant_method": "awq", "zero_point": True, "version": "gemm", **_CONFIG}, _awq),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
         "config_groups": {}, "ignore": ["lm_head"]}, _compressed),
}  # fmt: skip


def linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """All but the output head."""
    head = model.get_output_embeddings()
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


def write(source: Path, folder: Path, kind: str) -> Values:
    """The checkpoint in ``folder``, and what it means; of "ours" as it is loaded again."""
    if kind == "ours":
        config = hf_mlspec.MLSpecConfig(format="int4", group_size=GROUP)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=config)
        model.save_pretrained(folder)
        return {f"{name}.weight": layer.dequantized() for name, layer in _packed(model).items()}
    own, save = KINDS[kind]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tensors, values = load_file(folder / "model.safetensors"), {}
    for place, (name, linear) in enumerate(linears(model).items()):
        # What reads one input has one order of it, as these libraries have it.
        mixed = torch.Generator().manual_seed(place if name.endswith(("o_proj", "down_proj")) else 1000 + place // 7)
        order = torch.randperm(linear.in_features, generator=mixed) if "order" in kind else None
        found, values[f"{name}.weight"] = save(tensors.pop(f"{name}.weight"), order)
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in found.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": own}))
    for file in source.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    return values


def _packed(model: PreTrainedModel) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "dequantized")}
