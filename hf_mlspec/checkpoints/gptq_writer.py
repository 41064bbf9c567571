"""How is a GPTQ checkpoint written? The tensors and the quantization_config that `GptqReader` and others read.

checkpoint_format "gptq", the first version, which every reader knows: zero points are stored one less, a whole word
at once, as GPTQModel does it. The layout is in gptq.py; values are the same bit for bit, scales float16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..formats import Mxfp4Weight, PackedWeight
from .codes import pack_words
from .gptq import BITS, ONES, GptqReader
from .scales import Groups
from .writing import Kind, codes_of, group_index, groups_of, kind_of

_WORD = 32  # bits


class GptqWriter:
    """Writes integers of 2, 3, 4 and 8 bits, all layers with the same bits and groups."""

    method, title = GptqReader.method, GptqReader.title

    def kind(self, weight: PackedWeight, order: Tensor | None = None) -> Kind:
        """As `Writer.kind`."""
        if isinstance(weight, Mxfp4Weight):
            raise ValueError(f"{weight.name} is MXFP4: GPTQ has integers only; compressed-tensors has MXFP4")
        kind = kind_of(weight, order)
        if kind.bits not in BITS:
            known = ", ".join(map(str, BITS[:-1]))
            raise ValueError(f"{weight.name} has {kind.bits} bits: GPTQ has {known} and {BITS[-1]}")
        if weight.out_features * kind.bits % _WORD:
            raise ValueError(
                f"{weight.name}: {weight.out_features} outputs of {kind.bits} bits fill no whole words of {_WORD}, as "
                "the zero points of GPTQ must"
            )
        _require_told(groups_of(weight, order), weight.name)
        return kind

    def tensors(self, weight: PackedWeight, order: Tensor | None = None) -> dict[str, Tensor]:
        """As `Writer.tensors`."""
        bits, groups = self.kind(weight, order).bits, groups_of(weight, order)
        zeros = groups.zero.t().contiguous()
        stored = pack_words(zeros, bits) - ONES[bits] if bits in ONES else pack_words((zeros - 1) & 7, bits)
        return {
            "qweight": pack_words(codes_of(weight, groups.order), bits).t().contiguous(),
            "qzeros": stored,
            "scales": groups.scale.t().contiguous(),
            "g_idx": group_index(groups, weight.in_features),
        }

    def config(self, kinds: Mapping[str, Kind], kept: Sequence[str]) -> dict[str, Any]:
        """As `Writer.config`. kept: dense layers, told by ``dynamic``; that the output head is one is known."""
        shape = {name: replace(kind, symmetric=True, ordered=False) for name, kind in kinds.items()}
        first = next(iter(kinds))
        other = next((name for name in kinds if shape[name] != shape[first]), None)
        if other is not None:
            raise ValueError(
                f"{other} has {kinds[other]}, {first} has {kinds[first]}: GPTQ has one number of bits and one size of "
                "groups for all layers; compressed-tensors can say both"
            )
        head = next((name for name in kinds if name.endswith("lm_head")), None)
        dense = {f"-:^{re.escape(name)}$": {} for name in kept if not name.endswith("lm_head")}
        return {
            "quant_method": self.method,
            "checkpoint_format": "gptq",
            "bits": kinds[first].bits,
            "group_size": kinds[first].group_size,
            "desc_act": any(kind.ordered for kind in kinds.values()),
            "sym": all(kind.symmetric for kind in kinds.values()),
            "lm_head": head is not None,
            **({"dynamic": dense} if dense else {}),
        }


def _require_told(groups: Groups, name: str) -> None:
    """ValueError where zero points, stored one less, would look like those of symmetric codes in the second version,
    and readers that know how often files name the wrong one would take them for that."""
    if bool((groups.zero == groups.middle + 1).all()):
        raise ValueError(
            f"{name}: all its zero points are {groups.middle + 1}, which GPTQ files store as {groups.middle} and "
            f"readers take for {groups.middle}; compressed-tensors can say them"
        )
