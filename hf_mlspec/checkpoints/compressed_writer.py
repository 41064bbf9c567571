"""How is a compressed-tensors checkpoint written? Packed integers and MXFP4, as `CompressedReader` reads them.

The layout is in compressed.py; values are the same bit for bit, scales float16. Act-order is told by weight_g_idx and
``actorder: "group"``, which versions of the library from August 2026 on refuse to load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats import Int4Weight, Mxfp4Weight, PackedWeight
from .codes import pack_words
from .compressed import CompressedReader
from .writing import Kind, codes_of, group_index, groups_of, kind_of

_VERSION = "0.14.0"  # of the library whose layout this is; earlier ones had other MXFP4 scales
_INTEGERS, _MXFP4, _MIXED = "pack-quantized", "mxfp4-pack-quantized", "mixed-precision"


class CompressedWriter:
    """Writes integers of 2 to 8 bits and MXFP4; layers of one model may differ."""

    method, title = CompressedReader.method, CompressedReader.title

    def kind(self, weight: PackedWeight, order: Tensor | None = None) -> Kind:
        """As `Writer.kind`."""
        kind = kind_of(weight, order)
        if kind.floating and kind.ordered:
            raise ValueError(f"{weight.name} is MXFP4 with ordered inputs: compressed-tensors orders integers only")
        return kind

    def tensors(self, weight: PackedWeight, order: Tensor | None = None) -> dict[str, Tensor]:
        """As `Writer.tensors`."""
        kind = self.kind(weight, order)
        if isinstance(weight, Mxfp4Weight):
            return {"weight_packed": weight.weight_packed, "weight_scale": weight.weight_scale}
        groups = groups_of(weight, order)
        if isinstance(weight, Int4Weight) and groups.order is None:
            words = weight.weight_packed.contiguous().view(torch.int32)
        else:
            words = pack_words(codes_of(weight, groups.order), groups.bits)
        shape = torch.tensor([weight.out_features, weight.in_features])
        found = {"weight_packed": words, "weight_scale": groups.scale, "weight_shape": shape}
        if not kind.symmetric:
            found["weight_zero_point"] = pack_words(groups.zero.t().contiguous(), groups.bits).t().contiguous()
        if groups.order is not None:
            found["weight_g_idx"] = group_index(groups, weight.in_features)
        return found

    def config(self, kinds: Mapping[str, Kind], kept: Sequence[str]) -> dict[str, Any]:
        """As `Writer.config`. Layers that differ are told by their names."""
        by_kind: dict[Kind, list[str]] = {}
        for name, kind in kinds.items():
            by_kind.setdefault(kind, []).append(name)
        groups = {
            f"group_{index}": _group(kind, ["Linear"] if len(by_kind) == 1 else names)
            for index, (kind, names) in enumerate(by_kind.items())
        }
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": self.method,
            "format": formats.pop() if len(formats) == 1 else _MIXED,
            "quantization_status": "compressed",
            "version": _VERSION,
            "config_groups": groups,
            "ignore": list(kept),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def _group(kind: Kind, targets: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": kind.bits,
        "type": "float" if kind.floating else "int",
        "symmetric": kind.symmetric,
        "strategy": "group",
        "group_size": kind.group_size,
        "dynamic": False,
        **({"actorder": "group"} if kind.ordered else {}),
        **({"scale_dtype": "torch.uint8"} if kind.floating else {}),
    }
    return {
        "targets": targets,
        "format": _MXFP4 if kind.floating else _INTEGERS,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
