"""How does the CPU decoder read the experts of a layer, where they lie?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...formats.mxfp4 import BLOCK
from ...nn.expert_modules import out_major
from ...nn.experts import PackedExperts
from ...ops.compiled_decoder import BF16, F32, INT4, MXFP4, NESTED, PLANES, ZIPPER, Experts, Weight
from ..architecture import ExpertBlock, UnknownArchitecture, as_read
from ..slots import require_experts

_DENSE = {torch.bfloat16: BF16, torch.float32: F32}
_PACKED = {"mxfp4": MXFP4, "int4": INT4, "nested": NESTED, "planes": PLANES}
_UP, _DOWN = "gate_up_proj", "down_proj"


def read_experts(block: ExpertBlock, read: Callable[[nn.Module, str], Weight]) -> Experts:
    """Weights that are shared, packed ones put in tiles. read: of a linear, those of a shared expert.

    UnknownArchitecture names what does not fit.
    """
    router, bias = block.router.float(), block.router_bias
    if block.shared_router is not None:
        router = torch.cat([router, block.shared_router.float()])
        bias = None if bias is None else torch.cat([bias, bias.new_zeros(1)])
    shared = {name: read(module, f"shared {name}") for name, module in block.shared.items()}
    if any(weight.order is not None or weight.rotation is not None for weight in shared.values()):
        raise UnknownArchitecture("its shared expert transforms its inputs")
    if any(own.format == ZIPPER or own.escape_rows is not None or own.resident_planes for own in shared.values()):
        raise UnknownArchitecture("its shared expert has a sparse part, rows with escapes, or planes that stream")
    require_experts(block, "CPU")
    weight = _packed if isinstance(block.experts, PackedExperts) else _dense
    return Experts(
        router.contiguous(),
        None if bias is None else bias.float(),
        block.chosen,
        block.renormalize,
        weight(block, _UP),
        weight(block, _DOWN),
        block.clamp,
        block.sigmoids,
        shared,
        block.weighs_inputs,
    )


def _dense(block: ExpertBlock, key: str) -> Weight:
    weight = getattr(block.experts, key)
    weight = out_major(weight) if block.original.transposed else weight.detach()
    out_features, in_features = block.original.sizes[key]
    weight = as_read(weight)
    return Weight(_DENSE[weight.dtype], weight, in_features, out_features, bias=_bias(block, key))


def _bias(block: ExpertBlock, key: str) -> Tensor | None:
    bias = block.biases.get(key)
    return None if bias is None else bias.float().contiguous()


def _packed(block: ExpertBlock, key: str) -> Weight:
    experts: PackedExperts = block.experts
    parts = experts.prepack_().parts(key)
    out_features, in_features = block.original.sizes[key]
    own: dict[str, Any] = {}
    if experts.format == "int4":
        own = {"zero": parts.zero}
    elif experts.format == "nested":
        escapes = {"escape_rows": parts.escape_index, "escape_weight": parts.escape_value}
        own = {"low": parts.low, "codebook": parts.codebook, **escapes}
    elif experts.format == "planes":
        own = {"zero_doubled": experts.zero_doubled(key)}
    return Weight(
        _PACKED[experts.format],
        parts[0],
        in_features,
        out_features,
        scale=parts.scale,
        bias=_bias(block, key),
        group_size=BLOCK if experts.format == "mxfp4" else experts.group_size,
        bits=experts.switch.bits,
        **own,
    )
