"""How do the tests come by checkpoints of other libraries? Written code by code, as their layouts say."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Codes:
    """One layer: value = (code - zero) * scale[group]. code [out, in], zero [out, groups], scale [out, groups], group
    [in]."""

    code: np.ndarray
    zero: np.ndarray
    scale: torch.Tensor
    group: np.ndarray

    @property
    def values(self) -> torch.Tensor:
        """In the dtype of the scales, as those libraries compute it: whole numbers times scale."""
        steps = torch.from_numpy(self.code.astype(np.int64) - self.zero[:, self.group].astype(np.int64))
        return steps.to(self.scale.dtype) * self.scale[:, torch.from_numpy(self.group)]


def rounded(
    weight: torch.Tensor, bits: int, size: int, symmetric: bool, seed: int = 0, act_order: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Codes:  # fmt: skip
    """Round to nearest, in plain numpy. size: inputs a group, -1: all."""
    values = weight.detach().double().numpy()
    out, inputs = values.shape
    size = inputs if size == -1 else size
    group = np.arange(inputs) // size
    if act_order:
        group = np.random.default_rng(seed).permutation(group)
    count, top = -(-inputs // size), 2**bits - 1
    code, zero = np.zeros((out, inputs), np.int64), np.zeros((out, count), np.int64)
    scale = torch.zeros(out, count, dtype=dtype)
    for g in range(count):
        part = values[:, group == g]
        if symmetric:
            step, zero[:, g] = np.abs(part).max(1) / (2 ** (bits - 1) - 0.5), 2 ** (bits - 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            step = (high - low) / top
            zero[:, g] = np.clip(np.round(-low / step), 0, top)
        scale[:, g] = torch.from_numpy(step).to(dtype)
        own = scale[:, g].double().numpy()
        code[:, group == g] = np.clip(np.round(part / own[:, None]) + zero[:, g, None], 0, top)
    return Codes(code, zero, scale, group)


def bit_stream(codes: np.ndarray, bits: int) -> torch.Tensor:
    """[rows, n] -> int32 [rows, ceil(n * bits / 32)]: a number of Python for each row, cut into words."""
    words = -(-codes.shape[1] * bits // 32)
    if codes.shape[1] * bits % 32 == 0 and 32 % bits == 0:  # the same, where no code lies across two words
        shifts = np.arange(0, 32, bits, dtype=np.int64)
        whole = (codes.reshape(len(codes), words, -1).astype(np.int64) << shifts).sum(-1)
        return torch.from_numpy(whole.astype(np.uint32).view(np.int32).copy())
    rows = []
    for row in codes.tolist():
        number = sum(value << (bits * place) for place, value in enumerate(row))
        rows.append([number >> (32 * word) & 0xFFFFFFFF for word in range(words)])
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32).copy())


def gptq(codes: Codes, bits: int, version: int = 1, index: bool = True) -> dict[str, torch.Tensor]:
    """The tensors of a layer, as AutoGPTQ (version 1) and GPTQModel (2) save them."""
    zeros = bit_stream(codes.zero.T, bits)
    if version == 1:  # as GPTQModel makes it of version 2: 1 less in every code, a word at once
        ones = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
        zeros = zeros - ones[bits] if bits in ones else bit_stream((codes.zero.T - 1) % 8, bits)
    tensors = {
        "qweight": bit_stream(codes.code, bits).t().contiguous(),
        "qzeros": zeros,
        "scales": codes.scale.t().contiguous(),
    }
    return {**tensors, "g_idx": torch.from_numpy(codes.group.astype(np.int32))} if index else tensors


def awq(codes: Codes) -> dict[str, torch.Tensor]:
    """The tensors of a layer, as AutoAWQ saves them in its version "gemm"."""

    def interleaved(values: np.ndarray) -> torch.Tensor:  # [n, out]
        mixed = values.reshape(len(values), -1, 8)[:, :, AWQ_COLUMNS]
        return bit_stream(mixed.reshape(len(values), -1), 4)

    return {
        "qweight": interleaved(codes.code.T),
        "qzeros": interleaved(codes.zero.T),
        "scales": codes.scale.t().contiguous(),
    }


def awq_rows(codes: Codes, spare: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a layer, as AutoAWQ saves them in its version "gemv". spare: words more than groups need."""
    rows, groups = codes.zero.shape
    width = -(-groups // 8) + spare
    zero, scale = np.zeros((rows, 8 * width), codes.zero.dtype), torch.zeros(rows, 8 * width, dtype=codes.scale.dtype)
    zero[:, :groups], scale[:, :groups] = codes.zero, codes.scale
    return {"qweight": bit_stream(codes.code, 4), "qzeros": bit_stream(zero, 4), "scales": scale}


def awq_four_rows(codes: Codes, spare: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a layer, as AutoAWQ saves them in its version "gemv_fast". spare: rows of scales
    more than groups need."""
    rows, inputs = codes.code.shape
    of_pair = [0, 1, 8, 9, 16, 17, 24, 25]
    run = [first + of_pair[place] for first in (0, 2, 4, 6) for place in (0, 2, 4, 6, 1, 3, 5, 7)]
    words = np.zeros((rows // 4, inputs), np.int64)
    for four in range(rows // 4):
        for block in range(inputs // 64):
            beside = [
                codes.code[4 * four + row, 64 * block + 32 * half + place]
                for row in range(4) for half in (0, 1) for place in run
            ]  # fmt: skip
            for word in range(64):
                words[four, 64 * block + word] = sum(int(beside[4 * word + i]) << (4 * i) for i in range(4))
    count = codes.zero.shape[1]
    scales = torch.zeros(-(-count // 8) * 8 + spare, rows, dtype=codes.scale.dtype)
    products = torch.zeros_like(scales)
    scales[:count] = codes.scale.t()
    products[:count] = -(codes.scale.float() * torch.from_numpy(codes.zero).float()).to(scales.dtype).t()
    qweight = torch.from_numpy(words.astype(np.uint16).view(np.int16).copy())
    return {"qweight": qweight, "qzeros": products, "scales": scales}


def autoround(codes: Codes, bits: int, packing: str) -> dict[str, torch.Tensor]:
    """The tensors of a layer, as auto-round saves them. packing: "packing_format" of config.json."""
    if "awq" in packing:
        return awq(codes)
    less = packing == "auto_round:auto_gptq"  # no zero point may be 0
    return {
        "qweight": bit_stream(codes.code, bits).t().contiguous(),
        "qzeros": bit_stream(codes.zero.T - less, bits),
        "scales": codes.scale.t().contiguous(),
    }


def linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Those that such libraries quantize, by name: all but the output head."""
    head = model.get_output_embeddings()
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


def write(
    folder: Path, model: PreTrainedModel, layers: dict[str, dict[str, torch.Tensor]], config: dict,
    dtype: torch.dtype | None = None,
) -> Path:  # fmt: skip
    """A folder of ``model`` in which ``layers`` have these tensors in place of their weights."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, own in layers.items():
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stored, "quantization_config": config}))
    return folder


def dense_twin(folder: Path, model: PreTrainedModel, values: dict[str, torch.Tensor]) -> Path:
    """A folder of ``model`` with these weights, as they are after dequantization."""
    state = model.state_dict()
    state |= {f"{name}.weight": weight.to(model.dtype) for name, weight in values.items()}
    if folder.exists():
        shutil.rmtree(folder)
    model.save_pretrained(folder, state_dict=state)
    return folder
