"""What does a checkpoint in Any-Precision's layout hold? A folder of it, written bit by bit as the layout says."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor


def nested_codes(weight: Tensor, parent: int, seed: int) -> tuple[Tensor, dict[int, Tensor]]:
    """float ``[N, K]`` -> numbers int64 ``[N, K]`` of ``parent`` bits by the rank in their row, and of every width
    from ``seed`` a table float16 ``[N, 2^b]`` of the means of what shares a number."""
    wide = weight.float()
    ranks = wide.argsort(1).argsort(1)
    codes = ranks * 2**parent // wide.shape[1]
    tables = {}
    for bits in range(seed, parent + 1):
        index = codes >> parent - bits
        sums = torch.zeros(len(wide), 2**bits).scatter_add_(1, index, wide)
        counts = torch.zeros(len(wide), 2**bits).scatter_add_(1, index, torch.ones_like(wide))
        tables[bits] = (sums / counts.clamp(min=1)).half()
    return codes, tables


def words_of(codes: Tensor, parent: int) -> Tensor:
    """int32 ``[parent, N, K / 32]``: bit 31 - (8 s + j) of word t of a chunk of T is its weight 8 T s + 8 t + j."""
    planes = []
    for plane in range(parent):
        bits, chunks = codes >> parent - 1 - plane & 1, []
        for chunk in bits.split(1024, 1):
            parts = chunk.unflatten(1, (4, -1, 8))  # [N, s, t, j]
            places = (1 << 31 - torch.arange(32)).view(4, 1, 8)
            chunks.append((parts * places).sum((1, 3)))  # [N, t]
        planes.append(torch.cat(chunks, 1))
    words = torch.stack(planes)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def write_folder(source: Path, target: Path, parent: int = 4, seed: int = 3) -> dict[str, dict[int, Tensor]]:
    """The model in ``source`` as Any-Precision saves it: every linear but the head. -> the dequantized weights by name
    and width."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    state, weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}, {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, tables = nested_codes(state.pop(f"{name}.weight"), parent, seed)
            state[f"{name}.qweight"] = words_of(codes, parent)
            state |= {f"{name}.lut{bits}": table for bits, table in tables.items()}
            weights[name] = {bits: table.gather(1, codes >> parent - bits) for bits, table in tables.items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    target.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    config["anyprec"] = {"seed_precision": seed, "parent_precision": parent, "group_count": 1}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.save(state, target / "pytorch_model.bin")
    return weights
