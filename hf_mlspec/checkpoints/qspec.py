"""Which layers does a released QSpec checkpoint hold, where Qwen's has several of them in one tensor?

QSpec (arXiv 2410.11305) released weights of QuaRot: symmetric 4-bit integers with a scale a row. Two model_types:

    llama_quarot   the layout of checkpoints/quarot.py
    qwen2_quarot   the same with ``self_attn.qkv_proj`` (rows of q, then k, then v, with a bias) and
                   ``mlp.gate_up_proj`` (rows of gate, then up)

What cannot be known: whether a file has gate and up the other way round. Both have the same shape and numbers of one
kind; nothing in a file tells them apart. The model_type decides, and qwen2_quarot has gate first. (QSpec's program
fuses [up; gate] for Llama, in memory; a file of model_type llama_quarot with a fused tensor is refused for that
reason.) Files of qwen2_quarot were not at hand: for o_proj and down_proj both spellings are read, with the indices of
quarot.py and without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layer import Stored
from .llama_shape import LlamaShape
from .quarot import MODEL_TYPE, PLACES, RotatedCheckpoint, sort_folder, sort_tensors

QWEN_TYPE = "qwen2_quarot"
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_PARTS = ("weight", "weight_scales", "bias")


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows ``first`` to ``last`` - 1 of a stored tensor, as a `Stored`."""

    whole: Stored
    first: int
    last: int

    @property
    def dtype(self) -> torch.dtype | None:
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.last - self.first, *self.whole.shape[1:])

    @property
    def place(self) -> str:
        """``rows of tensor in file``, for messages."""
        return f"rows {self.first} to {self.last - 1} of {self.whole.place}"

    def load(self) -> Tensor:
        """A copy of them."""
        return self.whole.load()[self.first : self.last].clone()


def sort_checkpoint(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> RotatedCheckpoint:
    """The tensors of all files, by name, and config.json. Biases of fused tensors are split like their weights.

    ValueError naming what is wrong: another model_type, fused tensors of llama_quarot, a fused tensor of another
    number of rows, one that is there whole and in parts, and whatever `sort_folder` refuses.
    """
    if config.get("model_type") == MODEL_TYPE:
        several = (*_FUSED, "mlp.up_gate_proj")
        fused = sorted(name for name in tensors if any(f".{whole}." in name for whole in several))
        if fused:
            raise ValueError(
                f"{fused[0]} holds several layers in one tensor, {MODEL_TYPE} has none of these: in which order they "
                "lie is not known"
            )
        return sort_folder(tensors, config)
    if config.get("model_type") != QWEN_TYPE:
        raise ValueError(
            f"config.json: model_type is {config.get('model_type')!r}, expected {MODEL_TYPE!r} or {QWEN_TYPE!r}"
        )
    shape = LlamaShape.of_config(config)
    return sort_tensors(split_tensors(tensors, shape), shape)


def split_tensors(tensors: Mapping[str, Stored], shape: LlamaShape) -> dict[str, Stored]:
    """The tensors of a qwen2_quarot checkpoint under the names of the layers within them, o_proj and down_proj with
    their indices. ValueError as of `sort_checkpoint`."""
    out = dict(tensors)
    for index in range(shape.num_layers):
        prefix = f"model.layers.{index}"
        for whole, parts in _FUSED.items():
            for kind in _PARTS:
                _split(out, f"{prefix}.{whole}.{kind}", [f"{prefix}.{part}.{kind}" for part in parts],
                       [shape.linears[part][0] for part in parts])  # fmt: skip
        for plain, indexed in PLACES.items():
            for kind in ("weight", "weight_scales"):
                _rename(out, f"{prefix}.{plain}.{kind}", f"{prefix}.{indexed}.{kind}")
    return out


def _split(tensors: dict[str, Stored], name: str, parts: list[str], rows: list[int]) -> None:
    whole = tensors.get(name)
    if whole is None:
        return
    there = [part for part in parts if part in tensors]
    if there:
        raise ValueError(f"{whole.place} and {there[0]} hold the same layer: which was used is not known")
    if not whole.shape or whole.shape[0] != sum(rows):
        raise ValueError(
            f"{whole.place} has shape {list(whole.shape)}, expected {sum(rows)} rows, {' + '.join(map(str, rows))}: "
            "config.json is of another model, or the file is damaged"
        )
    del tensors[name]
    first = 0
    for part, count in zip(parts, rows, strict=True):
        tensors[part] = StoredRows(whole, first, first + count)
        first += count


def _rename(tensors: dict[str, Stored], plain: str, indexed: str) -> None:
    if plain not in tensors:
        return
    if indexed in tensors:
        raise ValueError(f"{tensors[plain].place} and {indexed} hold the same layer: which was used is not known")
    tensors[indexed] = tensors.pop(plain)
