"""How are the experts of a gpt-oss checkpoint read? MXFP4 in transformers' names, every expert's rows as ours.

    experts.gate_up_proj_blocks  uint8  [experts, 2 * inner, hidden / 32, 16]   two codes a byte, low nibble first
    experts.gate_up_proj_scales  uint8  [experts, 2 * inner, hidden / 32]       E8M0
    experts.down_proj_blocks     uint8  [experts, hidden, inner / 32, 16]
    experts.down_proj_scales     uint8  [experts, hidden, inner / 32]

Only experts are quantized; rows of gate and up alternate, as the model's own gating has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, uint8

from ..formats.damage import NAN_SCALE
from ..formats.mxfp4 import BLOCK, Mxfp4Parts
from .layer import Stored, StoredLayer, require_tensor

_BLOCK_BYTES = BLOCK // 2


class GptOssReader:
    """Reads the experts of folders whose quant_method is "mxfp4"."""

    method, title = "mxfp4", "MXFP4 of gpt-oss"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: ``quantization_config`` of config.json; it says nothing that the tensors do not say."""
        self.tensors: Mapping[str, Stored] | None = None  # by transformers' names, where the files have others

    def holds(self, layer: StoredLayer) -> bool:
        """No linear layer is quantized."""
        return False

    def plan(self, layer: StoredLayer) -> NoReturn:
        """Never asked for."""
        raise ValueError(f"{layer.name}: linear layers of this kind of checkpoint are not quantized")


def expert_tensors(layer: StoredLayer, projection: str, experts: int) -> dict[str, Stored]:
    """Blocks and scales of one projection of all experts, by name, checked; {} where it is not quantized. ``layer``:
    the module of experts, with the sizes of the projection. ValueError or TypeError naming tensor and numbers."""
    blocks, scales = f"{projection}_blocks", f"{projection}_scales"
    if blocks not in layer.tensors and scales not in layer.tensors:
        return {}
    count, rest = divmod(layer.in_features, BLOCK)
    if rest:
        raise ValueError(f"{layer.name}.{projection}: {layer.in_features} inputs are no multiple of {BLOCK}")
    shape = experts, layer.out_features, count
    found = {
        blocks: require_tensor(layer, blocks, (uint8,), (*shape, _BLOCK_BYTES)),
        scales: require_tensor(layer, scales, (uint8,), shape),
    }
    if bool((found[scales].load() == NAN_SCALE).any()):
        place = found[scales].place
        raise ValueError(f"{place} holds NaN codes ({NAN_SCALE}): it was written from NaN, or is damaged")
    return found


def read_experts(blocks: Tensor, scales: Tensor) -> Mxfp4Parts:
    """The parts on disk of one projection, uint8 ``[experts, out, in / 2]`` and ``[experts, out, in / 32]``: the same
    memory."""
    return Mxfp4Parts(blocks.flatten(-2), scales)
