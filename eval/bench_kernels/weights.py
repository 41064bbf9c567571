"""Which weight do all contenders multiply? One small slab of random numbers, repeated, in every format."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.formats import int4, int4_int8, mxfp4, nested
from hf_mlspec.formats import planes as bitplanes
from hf_mlspec.formats.nested import codebooks
from hf_mlspec.formats.zipper import ZipperParts, ZipperWeight

SLAB = 64  # rows; a multiple of every interleaving of rows that a peer uses
PLANES, PLANES_GROUP = 8, 128


class Weights:
    """A random float32 weight ``[out, in]`` in every format, made when first asked for."""

    def __init__(self, out_features: int, in_features: int):
        """ValueError for sizes that the formats do not hold."""
        if out_features < SLAB or out_features % SLAB:
            raise ValueError(f"--m is {out_features}: outputs come in slabs of {SLAB}, give a multiple of {SLAB}")
        if in_features < 128 or in_features % 128:
            raise ValueError(f"--k is {in_features}: give a multiple of 128, the largest group")
        self.out_features, self.in_features = out_features, in_features
        self.slab = torch.randn(SLAB, in_features, generator=torch.Generator().manual_seed(0))

    @property
    def elements(self) -> int:
        return self.out_features * self.in_features

    def repeated(self, rows: Tensor) -> Tensor:
        """``[64, ...]`` -> ``[out, ...]``."""
        return rows.repeat(self.out_features // SLAB, *([1] * (rows.ndim - 1)))

    @cached_property
    def mxfp4_tiles(self) -> tuple[Tensor, Tensor]:
        return ops.prepack_mxfp4(*(self.repeated(part) for part in mxfp4.quantize(self.slab)))

    def int4(self, group_size: int) -> tuple[Tensor, Tensor]:
        packed, scales, _ = int4.quantize(self.slab, group_size)
        return self.repeated(packed), self.repeated(scales)

    def int4_tiles(self, group_size: int) -> tuple[Tensor, Tensor]:
        return ops.prepack_int4(*self.int4(group_size))[:2]

    @cached_property
    def int4_int8_tiles(self) -> tuple[Tensor, ...]:
        parts = int4_int8.Int4Int8Weight.from_dense(self.slab).parts
        return ops.prepack_int4_int8(*(self.repeated(part) for part in parts))

    @cached_property
    def nested_tiles(self) -> tuple[Tensor, ...]:
        """Draft, exponents and low bits in tiles, and the codebook."""
        codebook = codebooks.codebook_of("lloyd_max")
        parts = nested.split(self.slab.to(torch.bfloat16), codebook)
        if parts.escape_index.numel():
            raise ValueError("the slab has weights that would be escapes: draw another one")
        return *ops.prepack_nested(*(self.repeated(part) for part in parts[:4])), codebook

    @cached_property
    def planes(self) -> tuple[Tensor, Tensor]:
        """Tiles of planes and of scales."""
        parts = bitplanes.quantize(self.slab, PLANES, PLANES_GROUP)
        planes = parts.planes.repeat(1, self.out_features // SLAB, 1)
        return ops.prepack_planes(planes, self.repeated(parts.scale))

    def lut_tiles(self, bits: int) -> tuple[Tensor, Tensor]:
        """Tiles of planes and of tables: the means of 2^bits equal shares of a row's weights in their order."""
        order = self.slab.argsort(1).argsort(1) * 2**bits // self.in_features
        means = torch.zeros(SLAB, 2**bits).scatter_reduce_(1, order, self.slab, "mean", include_self=False)
        planes = bitplanes.pack_planes(order.to(torch.uint8), bits).repeat(1, self.out_features // SLAB, 1)
        return ops.prepack_lut(planes, self.repeated(means.half()))

    def zipper_tiles(self, mode: str) -> tuple[ZipperWeight, ZipperParts]:
        """The slab's weight, and tiles of all of it."""
        slab = ZipperWeight.from_dense(self.slab, mode=mode)
        planes = slab.weight_planes.repeat(1, self.out_features // SLAB, 1)
        return slab, ops.prepack_zipper(planes, self.repeated(slab.weight_scale), slab.weight_split)
