"""How is a compressed-tensors checkpoint read? The layout of llm-compressor: integers of 2 to 8 bits, and MXFP4.

    pack-quantized, integers                                        mxfp4-pack-quantized
    X.weight_packed      int32  [out, ceil(in * bits / 32)]         uint8  [out, in / 2], low nibble first
    X.weight_scale       float  [out, groups], [out, 1] or [1]      uint8  [out, in / 32], E8M0
    X.weight_zero_point  int32  [ceil(out * bits / 32), groups]     -
    X.weight_shape       int64  [2]: out, in                        -
    X.weight_g_idx       int32  [in], the group of every input      -

Codes and zero points are stored with 2^(bits - 1) added: value = (code - zero) * scale with both as stored, and zero
2^(bits - 1) where there is no tensor of them. At 4 bits the bytes of the codes are those of our int4, and MXFP4's are
those of our MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats import Mxfp4Weight
from ..formats.damage import NAN_SCALE
from ..formats.mxfp4 import BLOCK
from .codes import as_bytes, order_of_groups, unpack_words
from .layer import LayerPlan, ReadLayer, StoredLayer, require_tensor
from .scales import SCALES, Groups, choose_format, group_size, packed_layer, planned, require_scales

_BITS = range(2, 9)
_WRONG_MXFP4 = "0.13.0"  # its MXFP4 scales are four times too small
_FORMATS = ("pack-quantized", "mxfp4-pack-quantized", "mixed-precision", None)


class CompressedReader:
    """Reads folders of compressed-tensors: integer weights of 2 to 8 bits packed in words, and MXFP4."""

    method, title = "compressed-tensors", "compressed-tensors"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: ``quantization_config`` of config.json. ValueError for a format that is not read, sparse weights, or
        a version whose MXFP4 scales are wrong."""
        formats = [config.get("format"), *(group.get("format") for group in _schemes(config))]
        unknown = next((word for word in formats if word not in _FORMATS), None)
        if unknown is not None:
            known = ", ".join(word for word in _FORMATS if word)
            raise ValueError(f"this checkpoint is compressed-tensors of format {unknown!r}: {known} are read")
        sparse = config.get("sparsity_config") or {}
        sparsity = sparse.get("format", "dense") if isinstance(sparse, Mapping) else sparse
        if sparsity != "dense":
            raise ValueError(f"this checkpoint is sparse ({sparsity!r:.60}): only dense weights are read")
        if config.get("quantization_status") not in (None, "compressed"):
            raise ValueError(
                f"this checkpoint's quantization_status is {config['quantization_status']!r}, not 'compressed': its "
                "weights are not quantized yet; save it with save_compressed=True"
            )
        if config.get("transform_config"):
            raise ValueError(
                "this checkpoint's weights were rotated (transform_config): a model that does not rotate its inputs, "
                "too, would compute something else, and none here does yet"
            )
        schemes = [group["weights"] for group in _schemes(config) if isinstance(group.get("weights"), Mapping)]
        self._zero_points = bool(schemes) and not any(scheme.get("symmetric", True) for scheme in schemes)
        self._act_order = bool(schemes) and all(scheme.get("actorder") == "group" for scheme in schemes)
        sizes = [scheme.get("group_size") for scheme in schemes]
        for size in sizes:
            if size is not None and type(size) is not int:
                raise ValueError(f"this checkpoint has a scheme with group_size {size!r:.60}, a number is read: its "
                                 "config.json is damaged; download it again")
        self._size = sizes[0] if sizes and sizes.count(sizes[0]) == len(sizes) else None
        self._wrong_mxfp4 = str(config.get("version", "")) == _WRONG_MXFP4

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer has packed codes."""
        return "weight_packed" in layer.tensors

    def plan(self, layer: StoredLayer) -> LayerPlan:
        """ValueError or TypeError naming layer and tensor, as `Reader.plan`."""
        if "weight_global_scale" in layer.tensors:
            raise ValueError(f"{layer.name} is NVFP4 (it has a weight_global_scale): this format is not read")
        packed = layer.tensors["weight_packed"]
        return self._mxfp4(layer) if packed.dtype == torch.uint8 else self._integers(layer)

    def _mxfp4(self, layer: StoredLayer) -> LayerPlan:
        if self._wrong_mxfp4:
            raise ValueError(
                f"{layer.name}: MXFP4 files of compressed-tensors {_WRONG_MXFP4} hold scales four times too small (a "
                "fault of that version): write the checkpoint again with 0.14 or later"
            )
        if layer.in_features % BLOCK:
            raise ValueError(f"{layer.name}: {layer.in_features} inputs are no multiple of MXFP4's blocks of {BLOCK}")
        shape = layer.out_features, layer.in_features
        packed = require_tensor(layer, "weight_packed", (torch.uint8,), (shape[0], shape[1] // 2))
        scale = require_tensor(layer, "weight_scale", (torch.uint8,), (shape[0], shape[1] // BLOCK))
        if bool((scale.load() == NAN_SCALE).any()):
            raise ValueError(f"{scale.place} holds NaN codes ({NAN_SCALE}): it was written from NaN, or is damaged")

        def read(tensors: Mapping[str, Tensor]) -> ReadLayer:
            weight = Mxfp4Weight(tensors["weight_packed"], tensors["weight_scale"], name=layer.name)
            return ReadLayer(weight.validate(*shape))

        return LayerPlan(layer, "compressed-tensors, MXFP4", {"weight_packed": packed, "weight_scale": scale}, read,
                         "mxfp4")  # fmt: skip

    def _integers(self, layer: StoredLayer) -> LayerPlan:
        bits = _bits_of(layer)
        columns = -(-layer.in_features * bits // 32)
        packed = require_tensor(layer, "weight_packed", (torch.int32,), (layer.out_features, columns))
        groups = self._groups(layer, bits)
        choice = choose_format(layer, groups)
        as_on_disk = bits == 4 and choice.format == "int4"

        def read(tensors: Mapping[str, Tensor]) -> ReadLayer:
            words = tensors["weight_packed"]
            if as_on_disk:
                return packed_layer(layer, groups, choice, as_bytes(words))
            return packed_layer(layer, groups, choice, unpack_words(words, bits, layer.in_features))

        return planned(layer, self.title, groups, choice, {"weight_packed": packed}, read)

    def _groups(self, layer: StoredLayer, bits: int) -> Groups:
        out, stored = layer.out_features, layer.tensors.get("weight_scale")
        shape = tuple(stored.shape) if stored is not None else (out, 1)
        count = shape[1] if len(shape) == 2 and shape[0] == out and shape[1] else 1
        expected = shape if shape in ((1,), (1, 1)) else (out, count)
        scales = require_tensor(layer, "weight_scale", SCALES, expected)
        scale = require_scales(scales, scales.load()).reshape(-1, count).expand(out, count).contiguous()
        if self._size and count > 1 and layer.in_features % self._size:
            raise ValueError(f"{scales.place}: groups of {self._size} do not divide {layer.in_features} inputs")
        size = group_size(layer, self._size, count, scales.place)
        order = None
        if "weight_g_idx" in layer.tensors or self._act_order:
            index = require_tensor(layer, "weight_g_idx", (torch.int32, torch.int64), (layer.in_features,))
            groups = index.load()
            order = None if bool((groups == -1).all()) else order_of_groups(groups, size, index.place)  # -1: without
        return Groups.of(bits, size, scale, self._zeros(layer, bits, count), order)

    def _zeros(self, layer: StoredLayer, bits: int, count: int) -> Tensor:
        """uint8 ``[out, groups]``; older files have them as they are, int8, also of symmetric layers."""
        out, middle = layer.out_features, 1 << (bits - 1)
        stored = layer.tensors.get("weight_zero_point")
        if stored is None and not self._zero_points:
            return torch.full((out, count), middle, dtype=torch.uint8)
        if stored is not None and stored.dtype == torch.int8:
            points = require_tensor(layer, "weight_zero_point", (torch.int8,), (out, count)).load().to(torch.int16)
            if bool((points < -middle).any()) or bool((points >= middle).any()):
                raise ValueError(f"{stored.place} holds zero points beyond {bits} bits: the checkpoint is damaged")
            return (points + middle).to(torch.uint8)
        points = require_tensor(layer, "weight_zero_point", (torch.int32,), (-(-out * bits // 32), count))
        return unpack_words(points.load().t(), bits, out).t().contiguous()


def _schemes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups")
    return [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []


def _bits_of(layer: StoredLayer) -> int:
    """The shapes tell it: ceil(in * bits / 32) words. ValueError where none fits, or where weight_shape is another."""
    packed, told = layer.tensors["weight_packed"], layer.tensors.get("weight_shape")
    own = [layer.out_features, layer.in_features]
    says = told.load().tolist() if told is not None else own
    if says != own:
        raise ValueError(f"{told.place} says {says}, config.json makes the layer {own}: they are of different models")
    words = packed.shape[-1] if packed.shape else 0
    fitting = [bits for bits in _BITS if -(-layer.in_features * bits // 32) == words]
    if not fitting:
        raise ValueError(
            f"{packed.place} has shape {list(packed.shape)}: {layer.in_features} inputs in {words} words are no codes "
            "of 2 to 8 bits; config.json is of another model, or the file is damaged"
        )
    return fitting[0]
