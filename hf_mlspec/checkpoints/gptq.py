"""How is a GPTQ checkpoint read? Codes in words along the inputs, zero points along the outputs, a group every input.

    X.qweight  int32  [in * bits / 32, out]      codes of a column, lowest bits first, 2, 3, 4 or 8 bits each
    X.qzeros   int32  [groups, out * bits / 32]  zero points, stored one less ("v1") or as they are ("v2")
    X.scales   float  [groups, out]
    X.g_idx    int32  [in]                       the group of every input; missing: consecutive groups

value = (code - zero) * scale. With act-order (desc_act) the inputs of a group are not consecutive: the columns are put
in the order of the groups, and the layer's inputs take the same order.

Source: arXiv 2210.17323; the layout is that of AutoGPTQ and GPTQModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops import pack_gptq_words
from .codes import order_of_groups, unpack_words
from .layer import LayerPlan, ReadLayer, StoredLayer, require_tensor
from .scales import Groups, choose_format, column_scales, packed_layer, planned

BITS = (2, 3, 4, 8)
_V1, _V2 = "gptq", "gptq_v2"
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a 1 in every code of a word, by the bits of a code
_OTHER_LAYOUTS = ("marlin", "gptq_marlin", "gptq_p", "bitblas", "qqq", "eora")


class GptqReader:
    """Reads folders of AutoGPTQ and GPTQModel: 2, 3, 4 and 8 bits, any groups, both ways to store zero points,
    act-order, and settings of single layers (``dynamic``), which the shapes tell."""

    method, title = "gptq", "GPTQ"
    widths: tuple[int, ...] = BITS  # of a code

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: ``quantization_config`` of config.json, or what quantize_config.json holds. ValueError for a layout
        that is not GPTQ's own."""
        layout = "marlin" if config.get("is_marlin_format") else str(config.get("checkpoint_format", _V1)).lower()
        if layout not in (_V1, _V2):
            known = "a repacked form for one kind of kernel" if layout in _OTHER_LAYOUTS else "unknown here"
            raise ValueError(
                f"this GPTQ checkpoint has checkpoint_format {layout!r}, {known}: {_V1!r} and {_V2!r} are read; "
                "convert it back with the tool that wrote it"
            )
        self._first_version = layout == _V1
        self._dynamic = bool(config.get("dynamic"))
        self._bits = config.get("bits")
        self._size = config.get("group_size")
        self._act_order = bool(config.get("desc_act"))

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer has words of codes."""
        return "qweight" in layer.tensors

    def plan(self, layer: StoredLayer) -> LayerPlan:
        """ValueError or TypeError naming layer and tensor, as `Reader.plan`."""
        bits = self._bits_of(layer)
        words = require_tensor(
            layer, "qweight", (torch.int32,), (layer.in_features * bits // 32, layer.out_features)
        )
        groups = self._groups(layer, bits)
        choice = choose_format(layer, groups)

        def read(tensors: Mapping[str, Tensor]) -> ReadLayer:
            words = tensors["qweight"]
            if bits != 4 or choice.format != "int4":
                return packed_layer(layer, groups, choice, unpack_words(words.t(), bits, layer.in_features))
            packed = pack_gptq_words(words.contiguous(), groups.order)
            return packed_layer(layer, groups, choice, packed, ordered=True)

        return planned(layer, self.title, groups, choice, {"qweight": words}, read)

    def _bits_of(self, layer: StoredLayer) -> int:
        shape = layer.tensors["qweight"].shape
        told = self._bits if self._bits in self.widths else "2, 3, 4 or 8"
        bits, rest = divmod(shape[0] * 32, layer.in_features) if len(shape) == 2 else (0, 1)
        if rest or bits not in self.widths or (self._bits not in (None, bits) and not self._dynamic):
            raise ValueError(
                f"{layer.tensors['qweight'].place} has shape {list(shape)}: {layer.in_features} inputs in "
                f"{shape[0]} words are no codes of {told} bits; "
                "config.json is of another model, or the file is damaged"
            )
        return bits

    def _groups(self, layer: StoredLayer, bits: int) -> Groups:
        size, scale = column_scales(layer, self._size_of(layer))
        count = scale.shape[1]
        zeros = require_tensor(layer, "qzeros", (torch.int32,), (count, -(-layer.out_features * bits // 32)))
        zero = self._zeros(zeros.load(), bits, layer.out_features, zeros.place)
        return Groups.of(bits, size, scale, zero.t().contiguous(), self._order(layer, size))

    def _size_of(self, layer: StoredLayer) -> object:
        """The config's size of a group; None where a rule of its own may give the layer another, which shapes tell."""
        there = layer.tensors.get("scales")
        if not self._dynamic or there is None or not isinstance(self._size, int) or self._size <= 0:
            return None if self._dynamic else self._size
        return self._size if there.shape[:1] == (-(-layer.in_features // self._size),) else None

    def _order(self, layer: StoredLayer, size: int) -> Tensor | None:
        """Of act-order. Without it files may leave the groups of inputs out, empty or all 0: they are consecutive."""
        there = layer.tensors.get("g_idx")
        if not self._act_order and (there is None or tuple(there.shape) == (0,)):
            return None
        index = require_tensor(layer, "g_idx", (torch.int32, torch.int64), (layer.in_features,))
        groups = index.load()
        if not self._act_order and not bool(groups.any()):
            return None
        return order_of_groups(groups, size, index.place)

    def _zeros(self, words: Tensor, bits: int, out_features: int, place: str) -> Tensor:
        """uint8 ``[groups, out]``. Some files say v1 and are v2, or the reverse: of symmetric codes the number tells,
        all are the middle, or all are one less. The first version was made by taking 1 from every code of a whole
        word at once, so that 0 borrows from its neighbour; it is undone the same way."""
        stored, middle = unpack_words(words, bits, out_features), 1 << (bits - 1)
        low, high = (int(number) for number in stored.aminmax())
        if low == high and low in (middle - 1, middle):
            return torch.full_like(stored, middle)
        if not self._first_version:
            return stored
        return unpack_words(words + ONES[bits], bits, out_features) if bits in ONES else (stored + 1) & 7
