"""Which 4-bit weights does a folder of QuaRot's real quantization hold, and how was the model rotated?

Written by QuaRot's ``quantize_llama_checkpoint`` (arXiv 2404.00456), model_type "llama_quarot". Of every linear X

    X.weight         uint8    [out, in / 2]   two's complement nibbles -8..7, low nibble first
    X.weight_scales  float16  [out, 1]        value = integer * scale

o_proj and down_proj are the last of a sequence of modules: X is ``self_attn.o_proj.1`` and ``mlp.down_proj.2``.
``mlp.down_proj.0.had_rem_dim`` and ``self_attn.o_proj_hadamard.had_rem_dim`` ``[K, K]`` are there where the width is
no power of two. Embeddings and lm_head are float16, and rotated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats import Int4Weight
from ..formats.damage import require_positive
from .layer import Reader, ReadLayer, Stored, StoredLayer, require_tensor
from .llama_shape import LlamaShape
from .rotation import OnlineHadamard, RotatedPlan, Rotation, require_heads, stored_hadamard
from .scales import fitting_group, repeated

MODEL_TYPE = "llama_quarot"
NO_GROUP = "its inputs are no multiple of 32: no group of int4 divides them"
HADAMARD = "had_rem_dim"  # what a StoredLayer calls the K x K matrix of its online transform
PLACES = {"self_attn.o_proj": "self_attn.o_proj.1", "mlp.down_proj": "mlp.down_proj.2"}
_HADAMARDS = {
    "self_attn.o_proj": "self_attn.o_proj_hadamard.had_rem_dim",
    "mlp.down_proj": "mlp.down_proj.0.had_rem_dim",
}
_FLIP = 0x88  # the sign bits of two nibbles: two's complement <-> the codes 0..15 of int4, where 8 means 0


@dataclass(frozen=True)
class RotatedCheckpoint:
    """The tensors of a checkpoint, sorted.

    layers: the linears, by the names that transformers gives them. others: embeddings, lm_head, biases and norms whose
    own weights are used, as they are stored. unused: names of tensors that are not read. reader: has plans of the
    layers, each a `RotatedPlan`.
    """

    layers: Mapping[str, StoredLayer]
    others: Mapping[str, Stored]
    unused: tuple[str, ...]
    rotation: Rotation
    reader: Reader


def sort_folder(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> RotatedCheckpoint:
    """The tensors of all files of a folder, by name, and its config.json.

    ValueError naming what is wrong: another model_type, a tensor that is missing or of no known meaning, tied
    embeddings, heads whose rotations do not cancel.
    """
    if config.get("model_type") != MODEL_TYPE:
        raise ValueError(f"config.json: model_type is {config.get('model_type')!r}, expected {MODEL_TYPE!r}")
    return sort_tensors(tensors, LlamaShape.of_config(config))


def sort_tensors(tensors: Mapping[str, Stored], shape: LlamaShape) -> RotatedCheckpoint:
    """`sort_folder`, of a model of any type whose tensors have these names."""
    require_untied(shape, tensors)
    require_heads(shape.heads, shape.head_dim, "config.json")
    layers, read = {}, set()
    for prefix, linear, out_features, in_features in shape.named_linears():
        place = f"{prefix}.{PLACES.get(linear, linear)}"
        names = {"weight": f"{place}.weight", "weight_scales": f"{place}.weight_scales"}
        if linear in _HADAMARDS:
            names[HADAMARD] = f"{prefix}.{_HADAMARDS[linear]}"
        missing = [name for key, name in names.items() if name not in tensors and key != HADAMARD]
        if missing:
            raise ValueError(f"{missing[0]} is missing, the layout of {MODEL_TYPE} has it: download it again")
        held = {key: tensors[name] for key, name in names.items() if name in tensors}
        read |= set(names.values())
        layers[f"{prefix}.{linear}"] = StoredLayer(f"{prefix}.{linear}", in_features, out_features, held)
    # Norm weights are ignored, all of them. Their gains were folded into the linears before these were quantized, and
    # the norms of the layers are not stored; model.norm.weight is, by mistake: used, it would be applied twice.
    ignored = {f"{norm}.weight" for norm in shape.norms()}
    others, unused = sort_others((name for name in tensors if name not in read), tensors, shape, ignored)
    rotation = Rotation(True, shape.norms(), shape.head_dim, shape.heads, shape.intermediate_size)
    return RotatedCheckpoint(layers, others, unused, rotation, QuarotReader(shape))


def require_untied(shape: LlamaShape, tensors: Iterable[str]) -> None:
    """ValueError for a rotated model whose lm_head would be its embeddings: the last norm's gain is folded into one of
    them only."""
    if shape.tied or "lm_head.weight" not in tensors:
        raise ValueError(
            "lm_head.weight is missing or tied to the embeddings (tie_word_embeddings): a rotated checkpoint has the "
            "gain of model.norm in its lm_head and needs one of its own"
        )


def sort_others(
    names: Iterable[str], tensors: Mapping[str, Stored], shape: LlamaShape, ignored: set[str]
) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """What is no linear's weight: (used as it is stored, names that are not read); ValueError for a name of no known
    meaning, or without embeddings."""
    used = {"model.embed_tokens.weight", "lm_head.weight", *(f"{norm}.weight" for norm in shape.norms())}
    used |= {f"{prefix}.{linear}.bias" for prefix, linear, *_ in shape.named_linears()}
    others, unused = {}, []
    for name in names:
        if name in ignored or name.endswith("rotary_emb.inv_freq"):
            unused.append(name)
        elif name in used:
            others[name] = tensors[name]
        else:
            raise ValueError(f"{tensors[name].place}: this layout has no tensor of that name")
    if "model.embed_tokens.weight" not in others:
        raise ValueError("model.embed_tokens.weight is missing: download the checkpoint again")
    return others, tuple(unused)


def online_hadamard(layer: StoredLayer, shape: LlamaShape) -> OnlineHadamard | None:
    """What QuaRot's model multiplies the layer's input by; ValueError naming a matrix that is missing or is none."""
    what = f"{layer.name}: {HADAMARD}"
    if layer.name.endswith("self_attn.o_proj"):
        return stored_hadamard(layer.tensors.get(HADAMARD), shape.heads, what, shape.head_dim)
    if layer.name.endswith("mlp.down_proj"):
        return stored_hadamard(layer.tensors.get(HADAMARD), shape.intermediate_size, what)
    return None


class QuarotReader:
    """Reads the linears of `sort_folder`: symmetric int4, the scale of a row for each of its groups."""

    method = "quarot"
    title = "QuaRot"

    def __init__(self, shape: LlamaShape) -> None:
        self.shape = shape

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer is quantized."""
        return "weight_scales" in layer.tensors

    def plan(self, layer: StoredLayer) -> RotatedPlan:
        """int4; dense float32 where no group fits. ValueError or TypeError naming layer and tensor for one that is
        missing, of another shape or dtype, for a scale that is NaN, Inf, zero or negative, for no Hadamard matrix."""
        out_features, in_features = layer.out_features, layer.in_features
        stored = {
            "weight": require_tensor(layer, "weight", (torch.uint8,), (out_features, in_features // 2)),
            "weight_scales": require_tensor(layer, "weight_scales", (torch.float16,), (out_features, 1)),
        }
        require_positive(layer.name, "weight_scales", stored["weight_scales"].load())
        group = fitting_group(in_features, in_features)

        def read_layer(tensors: Mapping[str, Tensor]) -> ReadLayer:
            packed = tensors["weight"] ^ _FLIP
            return ReadLayer(row_scaled(layer.name, packed, tensors["weight_scales"], None, group))

        return RotatedPlan(
            layer, "QuaRot, 4 bits, a scale a row", stored, read_layer,
            **int4_or_dense(group), online=online_hadamard(layer, self.shape),
        )  # fmt: skip


def int4_or_dense(group: int | None, symmetric: bool = True) -> dict[str, Any]:
    """format, options and why_dense of a plan, by our group that fits."""
    if group is None:
        return {"why_dense": NO_GROUP}
    return {"format": "int4", "options": {"group_size": group, "symmetric": symmetric}}


def row_scaled(
    name: str, packed: Tensor, scales: Tensor, zeros: Tensor | None, group: int | None
) -> Int4Weight | Tensor:
    """uint8 ``[out, in / 2]`` codes 0..15, float16 ``[out, 1]`` scales, uint8 ``[out, 1]`` zeros or None (8) -> int4
    in groups of ``group``, or float32 ``[out, in]`` of the same values."""
    if group is None:
        low, high = (packed & 0x0F).float(), (packed >> 4).float()
        zero = 8.0 if zeros is None else zeros.float()
        return (torch.stack((low, high), -1).flatten(-2) - zero) * scales.float()
    times = packed.shape[1] * 2 // group
    zero = None if zeros is None else repeated(zeros, times)
    return Int4Weight(packed, repeated(scales, times), zero, name).validate(group_size=group)
