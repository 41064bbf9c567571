"""Which integers, in which order, are behind the weights of Atom's simulated quantization?

Atom (arXiv 2310.19102) writes no quantized weights. It writes the order in which it puts columns, a torch.save of

    layers.{i}.self_attn.{q,k,v,o}_proj.{input,output}    int64 [in] or [out], permutations
    layers.{i}.mlp.{gate,up,down}_proj.{input,output}

and its model's state_dict can be saved with weights that are already dequantized, W' = W[:, input], columns with
outliers last. gate and up have their rows in the order of down's ``input``, too; q, k, v and o keep their rows. The
last 128 columns are 8-bit integers with a scale a row, the others 4-bit ones in groups of 128. No scale is stored: the
integers are recovered from the values (grids.py), on GPTQ's grid as on that of rounding to nearest: both have
integers -8..7 and differ in their step. That two adjacent rows share a group's step, as Atom's scripts have it, is not
required. ``output`` is not used for Llama, and only checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..formats.damage import require_finite
from .codes import require_order
from .grids import Grid, recover_grid
from .layer import HeldTensor, LayerPlan, ReadLayer, Stored, StoredLayer, require_tensor
from .llama_shape import LlamaShape
from .pickles import read_pickle

GROUP = 128
KEPT = 128  # columns of 8 bits, the last
WHY_DENSE = (
    "its outliers have codes to 127 and its steps are as exact as its weights; format int4-int8 has outlier codes to "
    "119 and float16 steps"
)
_KEY = re.compile(r"layers\.(\d+)\.((?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj)\.(input|output)")
_ALIKE = (("self_attn.k_proj", "self_attn.q_proj"), ("self_attn.k_proj", "self_attn.v_proj"),
          ("mlp.gate_proj", "mlp.up_proj"))  # fmt: skip
_ORDERS = (torch.int64, torch.int16)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INPUT_ORDER, ROW_ORDER = "input_order", "row_order"  # what a StoredLayer calls them


@dataclass(frozen=True, eq=False)
class AtomLayer:
    """One layer's integers, columns and rows in Atom's order.

    codes4: int8 ``[out, in - 128]``, -8..7. scale4: float32 ``[out, (in - 128) / 128]``. codes8: int8 ``[out, 128]``,
    -127..127. scale8: float32 ``[out]``. dtype: of the weights. order: int64 ``[in]``, column j is input order[j].
    row_order: int64 ``[out]``, row r is output row_order[r]; None: the rows as they come.
    """

    codes4: Tensor
    scale4: Tensor
    codes8: Tensor
    scale8: Tensor
    dtype: torch.dtype
    order: Tensor
    row_order: Tensor | None = None

    def dequantize(self) -> Tensor:
        """``[out, in]``, columns and rows in the model's own order."""
        fours = self.codes4.unflatten(-1, (-1, GROUP)).float() * self.scale4.unsqueeze(-1)
        eights = self.codes8.float() * self.scale8.unsqueeze(-1)
        whole = torch.cat((fours.flatten(1), eights), 1).to(self.dtype)
        return own_order(whole, self.order, self.row_order)


def own_order(weight: Tensor, order: Tensor, row_order: Tensor | None) -> Tensor:
    """``[out, in]`` in Atom's order -> in the model's own."""
    out = torch.empty_like(weight)
    out[:, order] = weight
    if row_order is None:
        return out
    rows = torch.empty_like(out)
    rows[row_order] = out
    return rows


def read_orders(file: Path, config: Mapping[str, Any]) -> dict[str, HeldTensor]:
    """Atom's ``*_reorder_index_*.pt`` and the model's config.json -> int64 permutations by their keys.

    ValueError naming file and key: no such dictionary, a key of no known meaning (Mixtral's, too) or missing, an order
    of another dtype than int64 and int16 or that is no permutation, q, k and v or gate and up in different orders.
    """
    shape = LlamaShape.of_config(config)
    held = read_pickle(file)
    if not isinstance(held, Mapping):
        raise ValueError(f"{file} holds a {type(held).__name__}, a dictionary of orders was expected")
    orders = {}
    for key, order in held.items():
        parsed = _KEY.fullmatch(key) if isinstance(key, str) else None
        if parsed is None or int(parsed[1]) >= shape.num_layers:
            raise ValueError(f"{file}: {key!r} is no linear of a Llama with {shape.num_layers} layers")
        if not isinstance(order, Tensor) or order.dtype not in _ORDERS:
            kind = order.dtype if isinstance(order, Tensor) else type(order).__name__
            raise ValueError(f"{key} in {file} is {kind}, expected torch.int64 or torch.int16")
        out_features, in_features = shape.linears[parsed[2]]
        require_order(order, in_features if parsed[3] == "input" else out_features, f"{key} in {file}")
        orders[key] = HeldTensor(f"{key} in {file}", order.long())
    _require_alike(orders, shape, file)
    return orders


def _require_alike(orders: Mapping[str, HeldTensor], shape: LlamaShape, file: Path) -> None:
    for index in range(shape.num_layers):
        missing = [key for linear in shape.linears if (key := f"layers.{index}.{linear}.input") not in orders]
        if missing:
            raise ValueError(f"{missing[0]} is missing in {file}: the order of its weight's columns is not known")
        for one, other in _ALIKE:
            one, other = f"layers.{index}.{one}.input", f"layers.{index}.{other}.input"
            if not torch.equal(orders[one].tensor, orders[other].tensor):
                raise ValueError(f"{one} and {other} in {file} differ: both linears read one input, in one order")


def sort_state(
    tensors: Mapping[str, Stored], orders: Mapping[str, HeldTensor], config: Mapping[str, Any]
) -> tuple[dict[str, StoredLayer], dict[str, Stored]]:
    """A state_dict of Atom's model by the names of transformers, `read_orders` and config.json -> (the linears by
    name, everything else as it is). ValueError naming a weight that is missing."""
    shape = LlamaShape.of_config(config)
    layers, rest = {}, dict(tensors)
    for prefix, linear, out_features, in_features in shape.named_linears():
        name = f"{prefix}.{linear}"
        if f"{name}.weight" not in tensors:
            raise ValueError(f"{name}.weight is missing: the state_dict is of another model, or not whole")
        stored = {"weight": rest.pop(f"{name}.weight"), INPUT_ORDER: orders[f"{name.removeprefix('model.')}.input"]}
        if linear in ("mlp.gate_proj", "mlp.up_proj"):
            stored[ROW_ORDER] = orders[f"{prefix.removeprefix('model.')}.mlp.down_proj.input"]
        layers[name] = StoredLayer(name, in_features, out_features, stored)
    return layers, rest


class AtomReader:
    """Reads the linears of `sort_state`; `layer_of` has their integers."""

    method = "atom"
    title = "Atom, simulated"

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer was put in order."""
        return INPUT_ORDER in layer.tensors

    def plan(self, layer: StoredLayer) -> LayerPlan:
        """Dense, in the model's own order, bit for bit the stored values. ValueError or TypeError naming layer and
        tensor: shapes, dtypes, orders that are none; what it reads, for groups that hold no integers times a step."""
        stored = self._required(layer)

        def read_layer(tensors: Mapping[str, Tensor]) -> ReadLayer:
            recover(layer.name, tensors["weight"])
            return ReadLayer(own_order(tensors["weight"], tensors[INPUT_ORDER], tensors.get(ROW_ORDER)))

        stored_as = f"Atom, simulated, 4 bits in groups of {GROUP}, {KEPT} columns of 8 bits, reordered"
        return LayerPlan(layer, stored_as, stored, read_layer, why_dense=WHY_DENSE)

    def layer_of(self, layer: StoredLayer) -> AtomLayer:
        """The layer's integers and orders; errors as of `plan` and what it reads."""
        loaded = {name: tensor.load() for name, tensor in self._required(layer).items()}
        weight = loaded["weight"]
        fours, eights = recover(layer.name, weight)
        return AtomLayer(
            codes4=fours.codes.view(weight.shape[0], -1),
            scale4=fours.step.view(weight.shape[0], -1),
            codes8=eights.codes,
            scale8=eights.step,
            dtype=weight.dtype,
            order=loaded[INPUT_ORDER],
            row_order=loaded.get(ROW_ORDER),
        )

    def _required(self, layer: StoredLayer) -> dict[str, Stored]:
        rows, inputs = layer.out_features, layer.in_features
        if inputs % GROUP or inputs <= KEPT:
            raise ValueError(f"{layer.name}: {inputs} inputs are no groups of {GROUP} beside {KEPT} columns of 8 bits")
        stored = {"weight": require_tensor(layer, "weight", _FLOATS, (rows, inputs))}
        for name, count in ((INPUT_ORDER, inputs), (ROW_ORDER, rows)):
            if name == INPUT_ORDER or name in layer.tensors:
                stored[name] = require_tensor(layer, name, (torch.int64,), (count,))
                require_order(stored[name].load(), count, stored[name].place)
        return stored


def recover(name: str, weight: Tensor) -> tuple[Grid, Grid]:
    """``[out, in]`` in Atom's order -> the integers of 4 bits ``[out * groups, 128]`` and of 8 bits ``[out, 128]``.

    ValueError naming the layer, row and group where values are no integers times a step, with their number.
    """
    require_finite(name, "weight", weight)
    groups = weight[:, :-KEPT].unflatten(-1, (-1, GROUP))
    fours = recover_grid(groups.flatten(0, 1), -8, 7, (8, 7, 6, 5, 4, 3, 2, 1))
    if not bool(fours.fits.all()):
        row, group = divmod(int((~fours.fits).nonzero()[0]), groups.shape[1])
        _refuse(f"{name}: row {row}, group {group} of weight", groups[row, group], "4 bits", 16, fours)
    eights = recover_grid(weight[:, -KEPT:], -127, 127, (127,))
    if not bool(eights.fits.all()):
        row = int((~eights.fits).nonzero()[0])
        _refuse(f"{name}: row {row}, the last {KEPT} columns of weight", weight[row, -KEPT:], "8 bits", 255, eights)
    return fours, eights


def _refuse(where: str, values: Tensor, bits: str, most: int, grid: Grid) -> None:
    different = values.unique().numel()
    why = f"{bits} have at most {most}" if different > most else f"and they are no integers of {bits} times one step"
    raise ValueError(
        f"{where} holds {different} different values, {why} ({int((~grid.fits).sum())} of {len(grid.fits)} groups): "
        f"it was not quantized as Atom does, in groups of {GROUP} with {KEPT} columns of 8 bits"
    )
