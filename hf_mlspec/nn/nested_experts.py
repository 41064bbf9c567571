"""What replaces a module of experts whose BF16 weights hold their own draft?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..formats import NestedWeight, Parts
from ..formats.nested import NestedParts, fields_of, join
from .experts import PackedExperts, stack_experts
from .nested import ESCAPES, make_room
from .packed import PackedModule
from .switch import PrecisionSwitch

MOST_WHOLE_ROWS = 0.01  # of an expert's rows, but one at least: those kept whole, as many for every expert


class NestedExperts(PackedExperts):
    """The experts of a layer in nested BF16; called, like what it replaces, by the model's own routing block.

    For every projection X, out-major also where the dense module was not:

        parameter          on disk, in state_dict()     in tiles, from the first forward on (ops/nested/)
        X_packed           [experts, out, in / 2]       draft tiles of each expert
        X_scale            [experts, out, in / 32]      exponent tiles
        X_low              [experts, out, in]           low tiles
        X_high             [experts, out, in / 2]       [experts, 0]: in the low ones
        X_codebook         [experts, 8], all alike      the same
        X_escape_index     [n], or None                 rows of each expert that are kept whole [experts, k]
        X_escape_value     [n], or None                 these rows, exact [experts, k, in]
        X_bias             [experts, out], the very parameter of the original, where it has one

    An escape's index is (expert * out + row) * in + column. In tiles every expert keeps as many rows whole as the one
    with the most escapes has, those of its own escapes among them.

    At (16, 16) bits an expert's product is that of ``bf16_linear`` on the original weight; at (4, 16) and (4, 8) the
    draft's, which reads nothing else.
    """

    format = "nested"

    def __init__(
        self,
        module: nn.Module,
        format: str = "nested",
        switch: PrecisionSwitch | None = None,
        name: str = "experts",
        escapes: Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        """As PackedExperts; escapes: of each projection, for how many there is room."""
        super().__init__(module, format, switch, name, **options)
        self._room = dict(escapes or {})

    @classmethod
    def from_module(
        cls, module: nn.Module, format: str = "nested", switch: PrecisionSwitch | None = None, name: str = "experts",
        codebook: str = "lloyd_max",
    ) -> NestedExperts:  # fmt: skip
        """Nest the experts of ``module``, bfloat16; biases are shared. TypeError for another dtype, ValueError naming
        ``name`` for NaN or Inf."""
        experts = cls(module, format, switch, name)
        for key in experts.names:
            weight = NestedWeight.from_dense(experts.rows_of(module, key), codebook, f"{name}.{key}")
            experts.hold_rows_(key, weight.parts)
        return experts

    @classmethod
    def empty(
        cls, module: nn.Module, format: str = "nested", switch: PrecisionSwitch | None = None, name: str = "experts",
        **options: Any,
    ) -> NestedExperts:  # fmt: skip
        """As PackedExperts.empty, with room for escapes."""
        experts = super().empty(module, format, switch, name, **options)
        for key, count in experts._room.items():
            make_room(experts, key, (count,) if count else None, experts._parameters[f"{key}_low"].device)
        return experts

    def rows_of(self, module: nn.Module, key: str) -> Tensor:
        """Projection ``key`` of a dense module as ``[experts * out, in]``, its own memory where it is out-major."""
        dense = getattr(module, key).detach()
        dense = dense.transpose(1, 2) if self.original.transposed else dense
        return dense.reshape(-1, dense.shape[2])

    def hold_rows_(self, key: str, parts: Parts) -> None:
        """Take over the parts of a nested weight of all rows ``[experts * out, in]``: on disk, or in whole tiles with
        the rows that each expert keeps whole."""
        flat, count = NestedParts(*parts), self.original.num_experts
        stacked = [part.view(count, -1, *part.shape[1:]) for part in flat[:3]]
        high = flat.high.view(count, -1, *flat.high.shape[1:]) if flat.high.ndim > 1 else flat.high.new_empty(count, 0)
        codebook = flat.codebook.expand(count, -1).contiguous()
        self._register_parts(key, NestedParts(*stacked, high, codebook, *flat[5:]))

    def validate_parts(self, key: str, disk: NestedParts, name: str) -> None:
        out, in_features = self._size(key)
        for expert in range(self.original.num_experts):
            own = NestedParts(*[part[expert] for part in disk[:5]])
            NestedWeight(*own, name=f"{name}.{key} of expert {expert}").validate(out, in_features)
        odd = (disk.codebook != disk.codebook[0]).any(dim=1)
        if odd.any():
            raise ValueError(
                f"{name}.{key} of expert {int(odd.nonzero()[0])}: its codebook is not that of the first expert: the "
                "checkpoint is damaged"
            )
        rows = self.original.num_experts * out
        NestedWeight(*self._flat(disk), name=f"{name}.{key}").validate(rows, in_features)

    def dequantized(self, key: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Projection ``key`` as ``[experts, out, in]``: in bfloat16 and float32 exactly the weight it was made of."""
        whole = NestedWeight(*self._flat(self._on_disk(key))).dequantize(dtype)
        return whole.view(self.original.num_experts, *self.original.sizes[key])

    def dequantized_draft(self, key: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The draft's ``[experts, out, in]``."""
        draft = NestedWeight(*self._flat(self._on_disk(key))).dequantize_draft(dtype)
        return draft.view(self.original.num_experts, *self.original.sizes[key])

    def materialize(self, dtype: torch.dtype) -> PackedExperts:
        """ValueError: a copy beside the codes would be the model that nesting saves."""
        raise ValueError(f"{type(self).__name__} keeps no copy of its weights: hf_mlspec.unnest(model) makes it dense")

    @property
    def group_size(self) -> int:
        return self.record.group()

    def escaped_rows(self, key: str) -> int:
        """Rows that each expert keeps whole for the sake of escapes, once it is in tiles."""
        index = self._parameters[f"{key}_{ESCAPES[0]}"]
        if index is None:
            return 0
        return index.shape[1] if self.is_prepacked else _most_rows(index, self.original.num_experts, *self._size(key))

    def _multiply_planned(self, key: str, x: Tensor, experts: Tensor, plan: Tensor) -> Tensor:
        bias = self._parameters[f"{key}_bias"].detach().contiguous() if self.has_bias else None
        tiles = NestedParts(*self.prepack_().parts(key))
        held = tiles.packed, tiles.scale, tiles.low, tiles.codebook, bias, experts, plan, self._rows(key)
        escapes = {"escape_rows": tiles.escape_index, "escape_weight": tiles.escape_value}
        return ops.nested_expert_rows(x, *held, *self.switch.bits, **escapes)

    def _size(self, key: str) -> tuple[int, int]:
        return self.original.sizes[key]

    def _flat(self, disk: NestedParts) -> NestedParts:
        """Parts on disk as those of one weight ``[experts * out, in]``."""
        planes = [part.flatten(0, 1) for part in disk[:4]]
        return NestedParts(*planes, disk.codebook[0], *disk[5:])

    def _in_tiles(self, name: str) -> Parts:
        disk = NestedParts(*self.parts(name))
        draft, exponents, low = stack_experts(lambda _, *own: ops.prepack_nested(*own), tuple(disk[:4]))
        whole = self._whole_rows(name, disk)
        return NestedParts(draft, exponents, low, disk.high.new_empty(len(low), 0), disk.codebook, *whole)

    def _on_disk(self, name: str) -> Parts:
        held, in_tiles = self._in_one_layout(name)
        tiles = NestedParts(*held)
        if not in_tiles:
            return tiles
        out, in_features = self._size(name)
        held = tiles.packed, tiles.scale, tiles.low
        disk = NestedParts(*stack_experts(lambda _, *own: ops.unprepack_nested(*own, out), held), tiles.codebook)
        if tiles.escape_index is None:
            return disk
        first = torch.arange(len(tiles.low), device=tiles.low.device).unsqueeze(1) * out
        rows, exact = (first + tiles.escape_index).flatten(), tiles.escape_value.flatten(0, 1)
        # An escape has no field, and is not 0 in the exact row.
        field = fields_of(disk.low.flatten(0, 1)[rows], disk.high.flatten(0, 1)[rows])
        at, column = ((field == 0) & (exact != 0)).nonzero().unbind(1)
        return disk._replace(escape_index=rows[at] * in_features + column, escape_value=exact[at, column])

    def _whole_rows(self, key: str, disk: NestedParts) -> tuple[Tensor | None, Tensor | None]:
        """Of every expert equally many rows ``[experts, k]``, ascending, and their exact weights."""
        if disk.escape_index is None:
            return None, None
        count, (out, in_features) = self.original.num_experts, self._size(key)
        chosen = rows_kept_whole(disk.escape_index, count, out, in_features)
        rows = (torch.arange(count, device=chosen.device).unsqueeze(1) * out + chosen).flatten()
        exact = join(*[plane.flatten(0, 1)[rows] for plane in disk[:4]])
        place = torch.searchsorted(rows, disk.escape_index // in_features)
        exact[place, disk.escape_index % in_features] = disk.escape_value
        return chosen, exact.view(*chosen.shape, in_features)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        self.unprepack_()
        for key in self.names:
            given, own = state_dict.get(f"{prefix}{key}_{ESCAPES[0]}"), self._parameters[f"{key}_{ESCAPES[0]}"]
            if f"{prefix}{key}_low" in state_dict and getattr(given, "shape", None) != getattr(own, "shape", None):
                shape, device = None if given is None else tuple(given.shape), self._parameters[f"{key}_low"].device
                make_room(self, key, shape, device)
        super()._load_from_state_dict(state_dict, prefix, *args)


def require_whole(module: PackedModule, key: str, parts: Parts, name: str) -> None:
    """ValueError or TypeError for what is damaged in the parts on disk of a module's weight ``key``, whether it is a
    linear or holds experts."""
    if isinstance(module, PackedExperts):
        module.validate_parts(key, module.record.weight.PARTS(*parts), name)
    else:
        module.record.weight(*parts, name=name).validate(module.out_features, module.in_features)


def too_many_escapes(index: Tensor | None, experts: int, out: int, in_features: int) -> str | None:
    """Why experts are not nested: rows that would be kept whole; index: of escapes, as on disk."""
    if index is None or not len(index):
        return None
    most = _most_rows(index, experts, out, in_features)
    if most <= max(1, MOST_WHOLE_ROWS * out):
        return None
    return (
        f"{len(index)} values below 2^-30 of their block's largest, in {most} of {out} rows of one expert, at most "
        f"{MOST_WHOLE_ROWS:.0%} are nested"
    )


def rows_kept_whole(index: Tensor, experts: int, out: int, in_features: int) -> Tensor:
    """Rows of each expert ``[experts, k]``, ascending: those of escapes, and the first others of experts that have
    fewer. index: of escapes, as on disk."""
    escaped = torch.zeros(experts * out, dtype=torch.int8, device=index.device)
    escaped[index // in_features] = 1
    escaped = escaped.view(experts, out)
    most = int(escaped.sum(1).max())
    return escaped.sort(dim=1, descending=True, stable=True).indices[:, :most].sort(dim=1).values


def _most_rows(index: Tensor, experts: int, out: int, in_features: int) -> int:
    rows = (index // in_features).unique()
    return int(torch.bincount(rows // out, minlength=experts).max())
