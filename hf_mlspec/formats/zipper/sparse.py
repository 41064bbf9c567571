"""How is the high part kept, of which most values are 0? In cells of 32 outputs and 64 inputs, of two layouts.

A cell has the values that are not 0. Cells of the same outputs lie one behind the other; ``starts`` int32
``[cells + 1]`` says where each begins. Inputs and outputs beyond the weight are 0.

    slots, for CPUs     an output has lane ``output % 32``, and its values fill slots 0, 1, ... of that lane, by input:
                        int16 [slots of all cells, 32 lanes]; starts count slots, a cell has those of its fullest lane
                        word: bits 0..5 input of the cell, bits 8..15 value, 0: no value
    packed, for GPUs    one value behind the other, by output and then input; starts count int32
                        narrow int16: bits 0..10 place, bits 11..15 value mod 32, for -15 to 16; 0: no value, where
                        the second half of an int32 is left
                        wide int32: bits 0..10 place, bits 16..23 value

A place is 64 * (output % 32) + column, where the columns are in the order in which tensor cores take the inputs: lane
t of four reads inputs 16 t to 16 t + 15 of its row, four of them in each of four steps (`_COLUMN`).

A table lookup of 64 entries is one instruction of AVX-512 where the table is a cell's inputs in bfloat16, in two
registers: 5 % of the weights have a high part, so that sums of several inputs would seldom be looked up.

Source: ZipperQuant (sparse high bits looked up in tables of the activations).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

OUTPUTS, INPUTS = 32, 64  # of a cell
NARROW = (-15, 16)
MAX_INPUTS = 2**20
_CHUNK = 2**25  # weights whose places are found at once
# Where an input of a cell stands in a row of 64: step s of four, then what lane t has there, a pair in each half.
_COLUMN = torch.tensor([16 * (i % 16 // 4) + 8 * (i % 4 // 2) + 2 * (i // 16) + i % 2 for i in range(INPUTS)])


class SparseCells(NamedTuple):
    """``starts`` int32 ``[cells + 1]``; ``words`` int32 ``[n]``: of slots 16 for each, packed as many as there are."""

    starts: Tensor
    words: Tensor
    is_wide: bool = False


class Values(NamedTuple):
    """The values that are not 0, by output and then input: int64 ``outputs``, ``inputs``, ``values``."""

    outputs: Tensor
    inputs: Tensor
    values: Tensor


def cells_of(out_features: int, in_features: int) -> tuple[int, int]:
    """How many cells one below the other, and side by side."""
    return -(-out_features // OUTPUTS), -(-in_features // INPUTS)


def to_slots(high: Tensor) -> SparseCells:
    """int8 ``[out, in]`` -> its cells in slots."""
    down, across = cells_of(*high.shape)
    found = _values_of(high)
    cell, lane = _cell(found, across), found.outputs % OUTPUTS
    place = cell * OUTPUTS + lane
    order = place.argsort(stable=True)
    place, counts = place[order], torch.bincount(place, minlength=down * across * OUTPUTS)
    rank = torch.arange(len(place), device=high.device) - (counts.cumsum(0) - counts)[place]
    starts = _starts(counts.view(-1, OUTPUTS).amax(1))
    words = torch.zeros(int(starts[-1]), OUTPUTS, dtype=torch.int16, device=high.device)
    slot = starts[place // OUTPUTS] + rank
    words[slot, place % OUTPUTS] = (found.inputs % INPUTS | found.values << 8)[order].to(torch.int16)
    return SparseCells(starts.to(torch.int32), words.flatten().view(torch.int32))


def of_slots(cells: SparseCells, out_features: int, in_features: int) -> Values:
    """What ``to_slots`` was made of. ValueError for an output or input beyond the weight."""
    _, across = cells_of(out_features, in_features)
    words = cells.words.view(torch.int16).view(-1, OUTPUTS)
    slot, lane = words.nonzero(as_tuple=True)
    cell = torch.searchsorted(cells.starts.long(), slot, right=True) - 1
    word = words[slot, lane].long()
    return _sorted(cell, lane, word & INPUTS - 1, word >> 8, across, (out_features, in_features))


def to_packed(high: Tensor) -> SparseCells:
    """int8 ``[out, in]`` -> its cells as GPUs read them: narrow where the values let them."""
    down, across = cells_of(*high.shape)
    found = _values_of(high)
    is_wide = bool(((found.values < NARROW[0]) | (found.values > NARROW[1])).any())
    cell = _cell(found, across)
    order = cell.argsort(stable=True)
    cell, counts = cell[order], torch.bincount(cell, minlength=down * across)
    starts = _starts(counts if is_wide else (counts + 1) // 2)
    rank = torch.arange(len(cell), device=high.device) - (counts.cumsum(0) - counts)[cell]
    place = (found.outputs % OUTPUTS * INPUTS + _COLUMN.to(high.device)[found.inputs % INPUTS])[order]
    value = found.values[order]
    if is_wide:
        words = torch.zeros(int(starts[-1]), dtype=torch.int32, device=high.device)
        words[starts[cell] + rank] = (place | (value & 0xFF) << 16).to(torch.int32)
    else:
        halves = torch.zeros(int(starts[-1]) * 2, dtype=torch.int16, device=high.device)
        halves[starts[cell] * 2 + rank] = _signed16(place | (value & 31) << 11)
        words = halves.view(torch.int32)
    return SparseCells(starts.to(torch.int32), words, is_wide)


def of_packed(cells: SparseCells, out_features: int, in_features: int) -> Values:
    """What ``to_packed`` was made of. ValueError for an output or input beyond the weight."""
    _, across = cells_of(out_features, in_features)
    if cells.is_wide:
        words, starts = cells.words.long(), cells.starts.long()
        value = (words >> 16 & 0xFF ^ 0x80) - 0x80
    else:
        words, starts = cells.words.view(torch.int16).long() & 0xFFFF, cells.starts.long() * 2
        value = words >> 11
        value = torch.where(value > NARROW[1], value - 32, value)
    there = value.nonzero().flatten()
    cell = torch.searchsorted(starts, there, right=True) - 1
    place = words[there] & OUTPUTS * INPUTS - 1
    inputs = _COLUMN.argsort().to(place.device)[place % INPUTS]
    return _sorted(cell, place // INPUTS, inputs, value[there], across, (out_features, in_features))


def to_dense(found: Values, out_features: int, in_features: int) -> Tensor:
    """int8 ``[out, in]``."""
    high = torch.zeros(out_features, in_features, dtype=torch.int8, device=found.values.device)
    high[found.outputs, found.inputs] = found.values.to(torch.int8)
    return high


def _values_of(high: Tensor) -> Values:
    """Rows are read some at a time: what `nonzero` needs is many times a row."""
    rows = max(_CHUNK // max(high.shape[1], 1), 1)
    parts = []
    for first in range(0, max(len(high), 1), rows):
        some = high[first : first + rows]
        at, inputs = some.nonzero(as_tuple=True)
        parts.append(Values(at + first, inputs, some[at, inputs].long()))
    return Values(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _cell(found: Values, across: int) -> Tensor:
    return found.outputs // OUTPUTS * across + found.inputs // INPUTS


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _signed16(words: Tensor) -> Tensor:
    return ((words ^ 0x8000) - 0x8000).to(torch.int16)


def _sorted(cell: Tensor, lane: Tensor, inputs: Tensor, values: Tensor, across: int, shape: tuple[int, int]) -> Values:
    outputs, inputs = cell // across * OUTPUTS + lane, cell % across * INPUTS + inputs
    for name, found, size in (("output", outputs, shape[0]), ("input", inputs, shape[1])):
        if len(found) and int(found.max()) >= size:
            raise ValueError(f"zipper: a value of the high part names {name} {int(found.max())} of {size}")
    order = (outputs * shape[1] + inputs).argsort()
    return Values(outputs[order], inputs[order], values[order])
