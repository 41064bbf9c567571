"""What stands for nn.Linear, and for the embedding tied to it, where a BF16 weight holds its own draft?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .. import ops
from ..formats import NestedWeight, Parts
from ..formats.nested import NestedParts, fields_of
from ..ops.nested import nested_fits_device
from .coded_embedding import CodedEmbedding, is_table
from .packed import PackedLinear
from .packed_formats import Packing, register_packing, stacked
from .switch import PrecisionSwitch

ESCAPES = ("escape_index", "escape_value")


def make_room(
    module: nn.Module, name: str, shape: tuple[int, ...] | torch.Size | None, device: torch.device
) -> None:
    """Parameters of ``module`` for escapes of its weight ``name`` in another number, None for none."""
    for part, dtype in zip(ESCAPES, (torch.int64, torch.bfloat16), strict=True):
        value = None
        if shape is not None:
            value = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)
        module.register_parameter(f"{name}_{part}", value)


class NestedLinear(PackedLinear):
    """``y = x W^T + b`` with W in nested BF16: 16.25 bits a weight, of which a draft reads 4.25 (formats/nested).

        parameter             on disk, in state_dict()    in tiles, from the first forward on (ops/nested/tiles.py)
        weight_packed         [out, in / 2]               draft_tiles
        weight_scale          [out, in / 32]              exponent_tiles
        weight_low            [out, in]                   low_tiles
        weight_high           [out, in / 2]               [0]: in low_tiles
        weight_codebook       [8]                         the same
        weight_escape_index   [n], or None                rows that have escapes [k]
        weight_escape_value   [n], or None                these rows, whole and exact [k, in]

    At (16, 16) bits the product is that of nn.Linear on the original weight, as ``bf16_linear`` sums it; at (4, 16)
    and (4, 8) the draft's, which reads nothing else.
    """

    format = "nested"

    @classmethod
    def in_tiles(cls, linear: nn.Linear, tiles: Parts, switch: PrecisionSwitch) -> NestedLinear:
        """Over ``linear``'s weight as tiles for its device (a ``NestedParts``); the bias is shared."""
        shape = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        layer = cls.empty(shape, switch=switch)
        layer._register_parts("weight", tiles)
        layer.bias = linear.bias
        return layer.train(linear.training)

    @classmethod
    def empty(
        cls,
        linear: nn.Linear,
        name: str = "weight",
        switch: PrecisionSwitch | None = None,
        escapes: int = 0,
        **options: Any,
    ) -> NestedLinear:
        """As PackedLinear.empty; escapes: for how many there is room."""
        layer = super().empty(linear, name, switch, **options)
        if escapes:
            make_room(layer, "weight", (escapes,), linear.weight.device)
        return layer

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """W as ``[out, in]``: in bfloat16 and float32 exactly the weight it was made of."""
        return super().dequantized(dtype)

    def dequantized_draft(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The draft's ``[out, in]``."""
        return self.packed_weight().dequantize_draft(dtype)

    def materialize(self, dtype: torch.dtype) -> PackedLinear:
        """ValueError: a copy beside the codes would be the model that nesting saves."""
        raise ValueError(f"{type(self).__name__} keeps no copy of its weight: hf_mlspec.unnest(model) makes it dense")

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}weight_{ESCAPES[0]}")
        self.unprepack_()
        own = self.weight_escape_index
        if f"{prefix}weight_low" in state_dict and getattr(given, "shape", None) != getattr(own, "shape", None):
            make_room(self, "weight", None if given is None else given.shape, self.weight_low.device)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        rows = 0 if self.weight_escape_index is None else len(self.weight_escape_index)
        escapes = f", {rows} {'rows with escapes' if self.is_prepacked else 'escapes'}" if rows else ""
        return f"{super().extra_repr()}, weight_bits={self.switch.bits.weight}{escapes}"


def _multiply(
    x: torch.Tensor, tiles: NestedParts, rows: int, bias: torch.Tensor | None, switch: PrecisionSwitch
) -> torch.Tensor:
    weight_bits, activation_bits = switch.bits
    escapes = {"escape_rows": tiles.escape_index, "escape_weight": tiles.escape_value} if weight_bits == 16 else {}
    return ops.nested_linear(
        x, tiles.packed, tiles.scale, tiles.low, tiles.codebook, rows, bias,
        weight_bits=weight_bits, activation_bits=activation_bits, **escapes,
    )  # fmt: skip


def _prepack(*parts: torch.Tensor | None) -> NestedParts:
    draft, exponents, low = ops.prepack_nested(*parts[:4])
    return _beside(*parts)._replace(packed=draft, scale=exponents, low=low)


def _beside(*parts: torch.Tensor | None) -> NestedParts:
    """In tiles the high planes are part of the low ones, and escapes are whole rows, which a product overwrites."""
    disk = NestedParts(*parts)
    rows, exact = NestedWeight(*disk).escape_rows() or (None, None)
    return NestedParts(None, None, None, disk.high.new_empty(0), disk.codebook, rows, exact)


def _unprepack(*tiles_and_rows: torch.Tensor | int | None) -> NestedParts:
    *parts, rows = tiles_and_rows
    tiles = NestedParts(*parts)
    disk = NestedParts(*ops.unprepack_nested(tiles.packed, tiles.scale, tiles.low, rows), tiles.codebook)
    if tiles.escape_index is None:
        return disk
    # An escape has no field, and is not 0 in the exact row.
    field = fields_of(disk.low[tiles.escape_index], disk.high[tiles.escape_index])
    row, column = ((field == 0) & (tiles.escape_value != 0)).nonzero().unbind(1)
    index = tiles.escape_index[row] * disk.low.shape[1] + column
    return disk._replace(escape_index=index, escape_value=tiles.escape_value[row, column])


def _join(weights: Sequence[NestedParts]) -> NestedParts:
    first, index, value = 0, [], []
    for parts in weights:
        rows, in_features = parts.low.shape
        if parts.escape_index is not None:
            index.append(parts.escape_index + first * in_features)
            value.append(parts.escape_value)
        first += rows
    planes = [stacked([getattr(parts, name) for parts in weights]) for name in ("packed", "scale", "low", "high")]
    escapes = (torch.cat(index), torch.cat(value)) if index else (None, None)
    return NestedParts(*planes, weights[0].codebook, *escapes)


register_packing(Packing(NestedLinear, _prepack, _unprepack, _multiply, nested_fits_device, _beside, _join))


class NestedEmbedding(CodedEmbedding):
    """Rows of a table that is the weight of a NestedLinear, the output head it is tied to, exactly.

    It has no parameters: it reads those of the head, which it holds outside of the module tree. So a state_dict has
    the table once, under the head, and copies, moves and pickles of a model keep the two together.
    """

    weightless = (", it reads the nested one of the output head: hf_mlspec.unnest(model) first, change the table, and "
                  "nest it again")  # fmt: skip

    def __init__(self, head: NestedLinear, embedding: nn.Embedding) -> None:
        """In place of ``embedding``. TypeError where it does more than look rows up and scale them, ValueError where
        its table is not of the head's shape or not on its device."""
        super().__init__()
        if not is_table(embedding):
            raise TypeError(
                f"a {type(embedding).__name__} may do more than look up rows and scale them: leave head and table in "
                "BF16"
            )
        shape = embedding.num_embeddings, embedding.embedding_dim
        if shape != (head.out_features, head.in_features) or embedding.weight.device != head.weight_low.device:
            raise ValueError(
                f"the table is {list(shape)} on {embedding.weight.device}, the head's weight "
                f"{[head.out_features, head.in_features]} on {head.weight_low.device}: they are not tied"
            )
        self._head, self._kind = (head,), type(embedding)
        self.num_embeddings, self.embedding_dim = shape
        self.padding_idx = embedding.padding_idx
        scale = getattr(embedding, "embed_scale", None)  # Gemma's
        self._own_scale = None if scale is None else torch.as_tensor(scale).detach().clone()
        # As the embedding's own forward has it: rounded to the table's dtype.
        self.embed_scale = None if scale is None else float(self._own_scale.to(self.dtype))
        self.train(embedding.training)

    @property
    def head(self) -> NestedLinear:
        """Whose weight it reads."""
        return self._head[0]

    def shares(self, linear: nn.Module) -> bool:
        """Whether the table is this linear's weight."""
        return self.head is linear

    def dense(self, weight: nn.Parameter) -> nn.Embedding:
        """The embedding it replaced, over ``weight``."""
        scaled = () if self._own_scale is None else (self._own_scale.item(),)
        with torch.device("meta"):
            table = self._kind(self.num_embeddings, self.embedding_dim, self.padding_idx, *scaled)
        table.weight = weight
        if scaled:
            table.embed_scale = self._own_scale.to(weight.device)
        return table.train(self.training)

    def tiles(self) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor | None]]:
        """What ``ops.nested_rows`` takes behind ids: tiles and their number of rows; and its escapes."""
        held = self.head.prepack_().parts("weight")
        tiles = held.packed, held.scale, held.low, self.num_embeddings
        return tiles, {"escape_rows": held.escape_index, "escape_weight": held.escape_value}

    def _rows(self, ids: torch.Tensor, scale: float) -> torch.Tensor:
        tiles, escapes = self.tiles()
        return ops.nested_rows(ids, *tiles, scale, **escapes)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> NestedEmbedding:
        """Moves the head as well: a cast of a nested model holds it nowhere else. A second move changes nothing."""
        super()._apply(fn, recurse)
        self.head._apply(fn)
        return self

    def extra_repr(self) -> str:
        return self._said(", nested in the output head")
