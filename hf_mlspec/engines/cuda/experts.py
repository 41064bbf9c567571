"""How does the CUDA decoder run the experts of a layer where their weights lie? The host never learns the routing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import ops
from ...formats import Parts
from ...formats.nested import NestedParts
from ...formats.planes import PlanesParts
from ...nn.expert_modules import out_major
from ...nn.experts import PackedExperts
from ...nn.plane_experts import PlaneExperts
from ...precision import Bits
from ..architecture import ExpertBlock, UnknownArchitecture
from ..slots import require_experts
from .weights import JoinedLinear, filled, joined

_UP, _DOWN = "gate_up_proj", "down_proj"
_MOST, _MOST_GROUPS = 1024, 64  # MLSPEC_CUDA_MOST_EXPERTS, MLSPEC_CUDA_MOST_GROUPS
_MOST_BY_CLUSTER = 256  # experts, of which one cluster chooses
_MOST_NORMED = 16384  # columns of a row that one kernel sums and norms
Routed = tuple[Tensor, Tensor, Tensor]  # of ops.route_rows
Gate = tuple[float, ...]  # slope, limit and activation of ops.dense_expert_rows; (): outputs are not gated


class DenseExperts:
    """One projection of all experts, ``[experts, out, in]``, bfloat16 or float32; bias ``[experts, out]`` or None."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, experts: Tensor, plan: Tensor, bits: Bits, gate: Gate = ()) -> Tensor:
        """``[n, in]`` or ``[pairs, in]`` -> ``[pairs, out]``, or with a gate the half; bits mean nothing to dense
        weights."""
        return ops.dense_expert_rows(x, self.weight, self.bias, experts, plan, *gate)


class FourBitExperts:
    """One projection of all experts in tiles, bias as of DenseExperts; own: what their switch said when it was
    read."""

    __slots__ = ("bias", "clip", "group_size", "out_features", "own", "tiles")

    def __init__(self, experts: PackedExperts, tiles: Parts, bias: Tensor | None, out_features: int):
        self.tiles, self.bias, self.out_features = tuple(tiles), bias, out_features
        self.own, self.clip = experts.switch.bits, experts.switch.activation_clip
        self.group_size = None if experts.format == "mxfp4" else experts.group_size

    def __call__(self, x: Tensor, experts: Tensor, plan: Tensor, bits: Bits, gate: Gate = ()) -> Tensor:
        """As DenseExperts, at 16, 8 or 4 activation bits, 0: the switch's."""
        width = bits.activation or self.own.activation
        if self.group_size is None:
            how = self.out_features, width, *gate
            return ops.mxfp4_expert_rows(x, *self.tiles, self.bias, experts, plan, *how)
        how = self.out_features, self.group_size, width, self.clip, *gate
        return ops.int4_expert_rows(x, *self.tiles, self.bias, experts, plan, *how)


class NestedTileExperts:
    """One projection of all experts in nested BF16, in tiles; bias as of DenseExperts."""

    __slots__ = ("bias", "codebook", "escapes", "out_features", "own", "tiles")

    def __init__(self, experts: PackedExperts, tiles: NestedParts, bias: Tensor | None, out_features: int):
        self.tiles, self.codebook, self.bias = (tiles.packed, tiles.scale, tiles.low), tiles.codebook, bias
        self.escapes = {"escape_rows": tiles.escape_index, "escape_weight": tiles.escape_value}
        self.out_features, self.own = out_features, experts.switch.bits

    def __call__(self, x: Tensor, experts: Tensor, plan: Tensor, bits: Bits, gate: Gate = ()) -> Tensor:
        """As DenseExperts, at (16, 16), (4, 16) or (4, 8) bits, 0: the switch's."""
        how = self.out_features, *filled(bits, self.own), *gate
        rest = self.codebook, self.bias, experts, plan
        return ops.nested_expert_rows(x, *self.tiles, *rest, *how, **self.escapes)


class PlaneTileExperts:
    """One projection of all experts in bit-planes, in tiles; bias as of DenseExperts."""

    __slots__ = ("bias", "how", "own", "tiles")

    def __init__(self, experts: PlaneExperts, tiles: PlanesParts, bias: Tensor | None, out_features: int):
        self.tiles, self.bias, self.own = (tiles.planes, tiles.scale), bias, experts.switch.bits
        self.how = out_features, experts.group_size, int(tiles.zero_doubled.flatten()[0])

    def __call__(self, x: Tensor, experts: Tensor, plan: Tensor, bits: Bits, gate: Gate = ()) -> Tensor:
        """As DenseExperts, times the first ``bits.weight`` planes, 0: the switch's."""
        planes = bits.weight or self.own.weight
        return ops.plane_expert_rows(x, *self.tiles, self.bias, experts, plan, *self.how, planes, *gate)


_PACKED = {
    "mxfp4": FourBitExperts, "int4": FourBitExperts, "nested": NestedTileExperts, "planes": PlaneTileExperts
}  # fmt: skip


Projection = DenseExperts | FourBitExperts | NestedTileExperts | PlaneTileExperts


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """What the experts of a layer add, before it is summed: as `ops.weighted_rows` takes it."""

    rows: Tensor
    weights: Tensor
    shared: Tensor | None

    def summed(self) -> Tensor:
        """``[n, hidden]``"""
        return ops.weighted_rows(self.rows, self.weights, self.shared)

    def normed(self, total: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The RMS norm of the sum with total, and that sum."""
        if total.shape[1] > _MOST_NORMED:
            return ops.rms_norm(self.summed(), weight, eps, total)
        return ops.weighted_norm_rows(self.rows, self.weights, self.shared, total, weight, eps)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """What stands in a layer for gate, up and down.

    router: ``[count, hidden]``, with a shared expert one row more; router_bias: float32, one a row, or None. clamp: of
    `ops.gated_pairs`, None where gate comes before up; what comes in turns `up` gates itself, the other where
    gates_halves. shared: gate and up as one, and down, or (). extra_bytes: of what could not be shared with the model.
    norms_one: whether one kernel norms and routes a row. sigmoids: bias, groups, chosen groups and scale of
    `ops.route_rows`, () where experts are chosen by softmax.
    """

    router: Tensor
    router_bias: Tensor | None
    count: int
    chosen: int
    renormalize: bool
    up: Projection
    down: Projection
    clamp: tuple[float, float] | None
    gates_halves: bool
    norms_one: bool
    shared: tuple[JoinedLinear, ...]
    extra_bytes: int
    sigmoids: tuple

    def norms(self, total: Tensor) -> bool:
        """Whether `norm_and_route` takes these rows."""
        return self.norms_one and len(total) == 1

    def norm_and_route(
        self, added: Tensor, total: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Routed]:
        """``[1, hidden]`` -> the RMS norm of the sum, the sum, and where it goes."""
        how = self.count, self.chosen, int(self.renormalize), *(self.sigmoids or (None, 1, 1, 1.0))
        normed, total, *routed = ops.norm_route_row(added, total, weight, eps, self.router, self.router_bias, *how)
        return normed, total, tuple(routed)

    def __call__(self, normed: Tensor, activation: int, bits: Bits, routed: Routed | None = None) -> ExpertRows:
        """``[n, hidden]`` -> what the experts add. activation: a number of ops.rows.ACTIVATIONS. routed: None where it
        is not known yet."""
        how = self.count, self.chosen, int(self.renormalize)
        if routed is None:
            routed = ops.route_rows(normed, self.router, self.router_bias, *how, *self.sigmoids)
        experts, weights, plan = routed
        if self.clamp is not None:
            inner = self.up(normed, experts, plan, bits, self.clamp)
        elif self.gates_halves:
            inner = self.up(normed, experts, plan, bits, (0.0, 0.0, activation))
        else:
            inner = ops.gated(self.up(normed, experts, plan, bits), activation)
        rows = self.down(inner, experts, plan, bits)
        beside = None
        if self.shared:
            gate_up, down = self.shared
            beside = down(ops.gated(gate_up(normed, bits), activation), bits)
        return ExpertRows(rows, weights, beside)


def expert_layer(block: ExpertBlock) -> ExpertLayer:
    """The experts of a layer; their weights stay where they are, packed ones are put in tiles, dense ones that are
    ``[in, out]`` are laid out the other way. UnknownArchitecture names what does not fit."""
    require_experts(block, "CUDA")
    router, extra_bytes, shared = block.router, 0, ()
    bias = None if block.router_bias is None else block.router_bias.float()
    if block.shared_router is not None:
        wide = router.dtype != block.shared_router.dtype
        router = torch.cat([row.float() if wide else row for row in (router, block.shared_router)])
        bias = None if bias is None else torch.cat([bias, bias.new_zeros(1)])
        extra_bytes = router.nbytes
    if block.shared:
        gate_up = joined([block.shared["gate"], block.shared["up"]], "shared gate, up")
        shared = gate_up, joined([block.shared["down"]], "shared down")
    projections = []
    for key in (_UP, _DOWN):
        own = block.biases.get(key)
        if isinstance(block.experts, PackedExperts):
            tiles = block.experts.prepack_().parts(key)
            kind = _PACKED[block.experts.format]
            projections.append(kind(block.experts, tiles, own, block.original.sizes[key][0]))
        else:
            weight = getattr(block.experts, key)
            dense = out_major(weight) if block.original.transposed else weight.detach()
            projections.append(DenseExperts(dense, own))
    count, clamp = block.original.num_experts, block.clamp
    how, own = (count, block.chosen, block.renormalize), block.sigmoids
    sigmoids = () if own is None else (own.bias, own.groups, own.chosen_groups, own.scale)
    halves = block.original.sizes[_UP][0] % ops.GATED_OUTPUTS == 0
    gates = clamp, halves, _norms_one(router, count)
    return ExpertLayer(router.contiguous(), bias, *how, *projections, *gates, shared, extra_bytes, sigmoids)


def _norms_one(router: Tensor, count: int) -> bool:
    hopper = router.device.type != "cuda" or torch.cuda.get_device_capability(router.device) >= (9, 0)
    return hopper and count <= _MOST_BY_CLUSTER and router.shape[1] <= ops.MOST_ROUTED


def require_served_experts(block: ExpertBlock, row_bytes: int) -> None:
    """UnknownArchitecture where the kernels of a GPU do not take the sizes of a layer's experts, or where they lie."""
    if block.original.num_experts > _MOST:
        raise UnknownArchitecture(f"it has {block.original.num_experts} experts a layer, the GPU kernels take {_MOST}")
    groups = 1 if block.sigmoids is None else block.sigmoids.groups
    if groups > _MOST_GROUPS:
        raise UnknownArchitecture(f"it has {groups} groups of experts, the GPU kernels take {_MOST_GROUPS}")
    for key, (_, inputs) in block.original.sizes.items():
        if inputs * 2 % row_bytes:
            raise UnknownArchitecture(f"its experts' {key} has {inputs} inputs, the GPU kernels take multiples of 8")
        weight = getattr(block.experts, key, None)
        if weight is not None and weight.data_ptr() % row_bytes:
            where = f"does not start at a multiple of {row_bytes} bytes in memory"
            raise UnknownArchitecture(f"its experts' {key} {where}")
