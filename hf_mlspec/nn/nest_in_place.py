"""How does a BF16 weight become nested tiles in its own memory, and how does it come back when that is cut short?

A weight takes 2 bytes: as long as the 1.5 of its low tiles and the half of its draft tiles. Tiles go from the first
outputs to the last, a few at a time; their low tiles are written where outputs stood that were read before them, or
are being read and held:

    before          | outputs, 2 bytes a weight                                        |
    group g is done | low tiles 0 ... g   | free |  outputs from group g + 1 on        |    draft tiles: a temporary
    after           | low tiles, 1.5 bytes a weight                   | draft tiles    |

Group g ends at 1.5 bytes of its last weight, group g + 1 starts at 2: nothing is overwritten that was not read. The
way back goes from group g to group 0, where the same holds the other way round.
"""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor, nn

from .. import ops
from ..formats import nested
from ..formats.nested import NestedParts, codebooks
from ..ops.cuda_library import serves
from ..ops.nested.tiles import LOW_BYTES
from ..ops.tiles import TILE_BYTES, TILE_OUTPUTS

_LEAST, _SHARE = 1 << 14, 256  # of so many parts of a weight one is packed at once: some 30 bytes for each element


def can_nest_in_place(module: nn.Module, owners: int, name: str = "weight") -> bool:
    """Whether a weight ``[..., out, in]`` of a module may be overwritten: whole tiles of the CPU's order, in memory
    that nothing but so many modules (``owners``) can see. An optimizer, an early_exit or a tensor that a caller holds,
    a part of a larger memory, shared or file-backed memory: what sees more gets a nested weight beside it, and keeps
    its own.

    The tiles of a GPU need more than these 2 bytes: their draft tiles hold the exponents too.
    """
    weight = module._parameters[name]
    if type(weight) is not nn.Parameter or weight.device.type != "cpu" or serves(weight):
        return False
    storage = weight.untyped_storage()
    whole = weight.is_contiguous() and storage.nbytes() == weight.nbytes and weight.shape[-2] % TILE_OUTPUTS == 0
    if not whole or not weight.numel() or storage.is_shared() or storage.filename is not None:
        return False
    del weight, storage
    alone = nn.Linear(1, 1, bias=False)
    counts, least = _seen_by(module, name), _seen_by(alone, "weight")
    return counts == (least[0] + owners - 1, *least[1:])


def _seen_by(module: nn.Module, name: str) -> tuple[int, ...]:
    """How many refer to the weight in Python, to its tensor, and to its memory in C++ and in Python."""
    storage = module._parameters[name].untyped_storage()
    return (
        sys.getrefcount(module._parameters[name]),
        module._parameters[name]._use_count(),
        torch._C._storage_Use_Count(storage._cdata),
        sys.getrefcount(storage),
    )


class NestingInPlace:
    """One weight ``[out, in]`` on its way: ``tiles()`` overwrites it, ``restore()`` undoes as much as was done."""

    def __init__(self, weight: Tensor, codebook: str, name: str) -> None:
        """Reads the weight and changes nothing. ValueError for NaN or Inf, naming row and column."""
        self.index, self.value = nested.find_escapes(weight, name)
        self._levels = _levels_of(weight, codebook, name)
        with torch.inference_mode(False):
            memory = torch.empty(0, dtype=torch.uint8).set_(weight.untyped_storage())
            count, blocks = weight.shape[0] // TILE_OUTPUTS, weight.shape[1] // nested.BLOCK
            self._rows = memory.view(torch.bfloat16).view(weight.shape)
            low, draft = memory.split([weight.numel() * 3 // 2, weight.numel() // 2])
            self._low, self._last_quarter = low.view(count, blocks, LOW_BYTES), draft.view(count, blocks, TILE_BYTES)
            # Pages of their own: freed in malloc's heap, below exponents that stay, such pieces would add up.
            pages = torch.frombuffer(mmap.mmap(-1, self._last_quarter.nbytes), dtype=torch.uint8)
            self._draft = pages.view(self._last_quarter.shape)
            self._exponents = memory.new_empty(count, blocks, TILE_OUTPUTS)
        self._escapes = self._escape_rows()
        # The last group whose low tiles are, or are about to be, where outputs stood; with these tiles.
        self._written: tuple[int, Tensor] | None = None

    @property
    def escaped_rows(self) -> int:
        """How many outputs have escapes."""
        return 0 if self._escapes[0] is None else len(self._escapes[0])

    def tiles(self) -> NestedParts:
        """The parts of a nested weight in tiles (nn/nested.py), in the weight's memory: the weight is gone."""
        with torch.inference_mode(False), torch.no_grad():
            for number, group in enumerate(self._groups()):
                parts = nested.split(self._rows[_outputs(group)], self._levels)
                self._draft[group], self._exponents[group], low = ops.prepack_nested(*parts[:4])
                self._written = number, low  # one step: an interrupt finds the group noted, or not overwritten
                self._low[group] = low
            self._last_quarter.copy_(self._draft)
            high = self._low.new_empty(0)
            return NestedParts(self._last_quarter, self._exponents, self._low, high, self._levels, *self._escapes)

    def restore(self) -> None:
        """The weight, bit for bit, back in its memory, whenever ``tiles()`` was left."""
        if self._written is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            last, low = self._written
            for group in reversed(list(self._groups())[: last + 1]):
                rows = self._rows[_outputs(group)]
                planes = ops.unprepack_nested(self._draft[group], self._exponents[group], low, len(rows))
                rows.copy_(nested.join(*planes))
                low = self._low[slice(group.start - self._step, group.start)]
            self._rows.view(-1)[self.index] = self.value

    @property
    def _step(self) -> int:
        return max(1, max(_LEAST, self._rows.numel() // _SHARE) // (TILE_OUTPUTS * self._rows.shape[1]))

    def _groups(self) -> list[slice]:
        return [slice(first, first + self._step) for first in range(0, len(self._low), self._step)]

    def _escape_rows(self) -> tuple[Tensor | None, Tensor | None]:
        if not len(self.index):
            return None, None
        rows = (self.index // self._rows.shape[1]).unique()
        return rows, self._rows[rows]


def _outputs(tiles: slice) -> slice:
    return slice(tiles.start * TILE_OUTPUTS, tiles.stop * TILE_OUTPUTS)


def _levels_of(weight: Tensor, codebook: str, name: str) -> Tensor:
    if codebook == codebooks.FITTED:
        return codebooks.fit(nested.count_fields(weight, name))
    return codebooks.codebook_of(codebook)
