"""Who multiplies the same weight by the same activations? Our kernels and every peer, from one small slab of numbers.

A weight is a slab of 64 rows repeated, so quantizing costs nothing, and the first 64 outputs of every contender have
one answer, against which each is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from eval.peers.ggml_linear import GgmlLinear
from eval.peers.high_rows import DenseTables, SignedRows
from eval.peers.openvino_linear import OpenVinoInt4
from eval.peers.torch_linear import TorchBf16, TorchCsr, TorchInt4
from hf_mlspec import ops
from hf_mlspec.formats import int4, int4_int8, mxfp4, nested, packing, zipper
from hf_mlspec.formats import planes as bitplanes
from hf_mlspec.formats.nested import codebooks
from hf_mlspec.formats.zipper import ZipperParts, ZipperWeight
from hf_mlspec.ops.zipper import put_together

SLAB = 64  # rows; a multiple of every interleaving of rows that a peer uses
LARGEST_ERROR = 0.25  # relative, root mean square; 4 bits cost 0.1, a misread weight costs 1 or more
PLANES, PLANES_GROUP = 8, 128
OF_TWO_PLANES = 0.6  # the error of 2 of 8 planes, whose scale is that of the largest weight
OF_FOUR_BITS = 0.4  # of activations in groups of 64


class Ours:
    """One of our ops on `copies` copies of its weight's tensors."""

    def __init__(self, tensors: tuple[Tensor, ...], run: Callable[..., Tensor], copies: int):
        """run(x, *tensors) -> y."""
        self._copies = [tuple(t.clone() for t in tensors) for _ in range(copies)]
        self._run = run
        self.nbytes = sum(t.nbytes for t in tensors)

    def bind(self, x: Tensor):
        """x float32 ``[n, in]`` -> a call that takes the number of a copy and returns bfloat16 ``[n, out]``."""
        x, run, copies = x.to(torch.bfloat16), self._run, self._copies
        return lambda copy: run(x, *copies[copy])

    def close(self) -> None:
        """Gives the memory back."""
        self._copies = []


@dataclass(frozen=True)
class Contender:
    """A name, the bytes of a weight that a call reads, and what makes `copies` of it; `ours` beats the others or does
    not."""

    name: str
    nbytes: int
    make: Callable[[int], object]
    ours: bool = False
    largest_error: float = LARGEST_ERROR
    slab: Tensor | None = None  # what its first outputs are checked against; None: the weight's own


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


def our_mxfp4(w: Weights, bits: int) -> Contender:
    def run(x, tiles, scales):
        return ops.mxfp4_linear(x, tiles, scales, w.out_features, None, bits)

    make = lambda copies: Ours(w.mxfp4_tiles, run, copies)  # noqa: E731
    return Contender(f"mxfp4 x {_activations(bits)}", w.elements * 17 // 32, make, ours=True)


def our_int4(w: Weights, group: int, bits: int) -> Contender:
    def run(x, tiles, scales):
        return ops.int4_linear(
            x, tiles, scales, None, w.out_features, None, group_size=group, activation_bits=bits
        )

    make = lambda copies: Ours(w.int4_tiles(group), run, copies)  # noqa: E731
    return Contender(f"int4 g{group} x {_activations(bits)}", _int4_bytes(w, group), make, ours=True)


def our_int4_int8(w: Weights, bits: int) -> Contender:
    def run(x, tiles, scales):
        return ops.int4_int8_linear(x, tiles, scales, w.out_features, activation_bits=bits)

    make = lambda copies: Ours(w.int4_int8_tiles, run, copies)  # noqa: E731
    nbytes = sum(part.nbytes for part in w.int4_int8_tiles)
    return Contender(f"int4 with int8 outliers x {_activations(bits)}", nbytes, make, ours=True)


def our_nested(w: Weights, weight_bits: int, activation_bits: int) -> Contender:
    """The draft (weight_bits 4) or the exact weight (16) of the same planes."""

    def run(x, *tensors):
        return ops.nested_linear(x, *tensors, w.out_features, weight_bits=weight_bits,
                                 activation_bits=activation_bits)

    make = lambda copies: Ours(w.nested_tiles, run, copies)  # noqa: E731
    name = "nested exact" if weight_bits == 16 else f"nested draft x {_activations(activation_bits)}"
    return Contender(name, w.elements * (17 if weight_bits == 4 else 65) // 32, make, ours=True)


def our_planes(w: Weights, count: int) -> Contender:
    def run(x, planes, scales):
        return ops.bitplane_linear(x, planes, scales, w.out_features, group_size=PLANES_GROUP,
                                   zero_doubled=2**PLANES, num_planes=count)

    make = lambda copies: Ours(w.planes, run, copies)  # noqa: E731
    nbytes = w.elements * count // 8 + w.elements // PLANES_GROUP * 2
    return Contender(f"{count} of {PLANES} planes x bf16", nbytes, make, ours=True,
                     largest_error=OF_TWO_PLANES if count == 2 else LARGEST_ERROR)


def our_bf16(w: Weights) -> Contender:
    def make(copies: int) -> Ours:
        return Ours((w.repeated(w.slab.to(torch.bfloat16)),), ops.bf16_linear, copies)

    return Contender("bf16", w.elements * 2, make, ours=True)


def torch_bf16(w: Weights) -> Contender:
    make = lambda copies: TorchBf16(w.repeated(w.slab.to(torch.bfloat16)), copies)  # noqa: E731
    return Contender("torch bf16", w.elements * 2, make)


def torch_int4(w: Weights, group: int) -> Contender:
    def make(copies: int) -> TorchInt4:
        packed, scales = w.int4(group)
        return TorchInt4(packing.unpack_nibbles(packed), scales, group, copies)

    return Contender(f"torch int4 g{group} x bf16", w.elements // 2 + w.elements // group * 4, make)


def openvino_int4(w: Weights, group: int) -> Contender:
    make = lambda copies: OpenVinoInt4(*w.int4(group), group, copies)  # noqa: E731
    return Contender(f"OpenVINO int4 g{group} x int8", _int4_bytes(w, group), make)


def ggml(w: Weights, kind: str, bits: float, folder: Path | None) -> Contender:
    make = lambda copies: GgmlLinear(folder, kind, w.slab, w.out_features, copies)  # noqa: E731
    return Contender(f"ggml {kind}", int(w.elements * bits / 8), make)


def our_lut(w: Weights, bits: int) -> Contender:
    def run(x, planes, tables):
        return ops.lut_linear(x, planes, tables, w.out_features, num_planes=bits)

    make = lambda copies: Ours(w.lut_tiles(bits), run, copies)  # noqa: E731
    nbytes = w.elements * bits // 8 + w.out_features * 2**bits * 2
    most = OF_TWO_PLANES if bits < 4 else LARGEST_ERROR
    return Contender(f"{bits} planes with tables x bf16", nbytes, make, ours=True, largest_error=most)


def our_zipper(w: Weights, mode: str, low_only: bool = False) -> Contender:
    """Both parts, or the low one alone: the draft, which is near the weight where it was clamped."""
    slab, tiles = w.zipper_tiles(mode)
    how = slab.how

    def run(x, *tensors):
        return ops.zipper_linear(x, ZipperParts(*tensors), w.out_features, how=how, low_only=low_only)

    nbytes = sum(part.nbytes for part in (tiles[:2] if low_only else tiles))
    name = f"zipper {mode}{', low part' if low_only else ''} x bf16"
    return Contender(name, nbytes, lambda copies: Ours(tuple(tiles), run, copies), ours=True)


def low_on_integers(w: Weights, mode: str, bits: int) -> Contender:
    """The low part alone times activations of so many bits: bit-planes, or int4 codes where it has 4 bits."""
    slab, tiles = w.zipper_tiles(mode)

    def run(x, *tensors):
        return ops.zipper_low_linear(x, *tensors, w.out_features, how=slab.how, activation_bits=bits)

    name = f"zipper {mode}, low part ({slab.how.low_planes} bits) x {_activations(bits)}"
    most = OF_FOUR_BITS if bits == 4 else LARGEST_ERROR
    own = tuple(tiles[:2])
    return Contender(name, sum(part.nbytes for part in own), lambda copies: Ours(own, run, copies), ours=True,
                     largest_error=most, slab=slab.dequantize(low_only=True))


def high_parts(w: Weights, mode: str) -> list[Contender]:
    """The sparse high part alone: ours from tables of inputs, then the same matrix as torch's sparse rows, and dense;
    where it is -1, 0 and 1 also from tables that every group looks up, as signed rows, and by int4 codes that each
    call dequantizes to bfloat16; and what a split by values keeps: the outliers whole."""
    slab, tiles = w.zipper_tiles(mode)
    high = zipper.split(slab.codes(), slab.how)[1].float() * slab.how.high_unit * slab.weight_scale.float()
    whole = w.repeated(high)

    def run(x, split):
        return ops.zipper_high_linear(x, torch.zeros(len(x), w.out_features), split)

    ours = lambda copies: Ours((tiles.split,), run, copies)  # noqa: E731
    dense = lambda copies: Ours((whole.to(torch.bfloat16),), ops.bf16_linear, copies)  # noqa: E731
    csr_bytes = whole.count_nonzero().item() * 12 + w.out_features * 8
    found = [
        Contender(f"{mode}, tables", tiles.split.nbytes, ours, True, slab=high),
        Contender(f"{mode}, torch csr", csr_bytes, lambda copies: TorchCsr(whole, copies), slab=high),
        Contender(f"{mode}, dense bf16", w.elements * 2, dense, slab=high),
    ]
    if mode != "exact":
        return found
    codes, step = zipper.split(slab.codes(), slab.how)[1], slab.weight_scale.float() * slab.how.high_unit
    given = w.repeated(codes), w.repeated(step)
    terms = int(given[0].count_nonzero())
    return [
        *found,
        Contender(f"{mode}, dense tables", w.elements // 4, lambda copies: DenseTables(*given, copies), slab=high),
        Contender(f"{mode}, signed rows", terms * 2, lambda copies: SignedRows(*given, copies), slab=high),
        _dequantized(w, codes, step, high),
        *_by_value(w, slab),
    ]


def _dequantized(w: Weights, codes: Tensor, step: Tensor, high: Tensor) -> Contender:
    group = 128
    packed = packing.pack_nibbles((codes + int4.SYMMETRIC_ZERO).to(torch.uint8))
    scales = step.half().expand(-1, w.in_features // group).contiguous()
    tiles = ops.prepack_int4(w.repeated(packed), w.repeated(scales))[:2]

    def run(x, *parts):
        return ops.bf16_linear(x, ops.int4_dequantize(*parts, None, w.out_features, group))

    nbytes = sum(part.nbytes for part in tiles)
    return Contender("exact, dequantized and multiplied", nbytes, lambda copies: Ours(tiles, run, copies), slab=high)


def _by_value(w: Weights, slab: ZipperWeight) -> list[Contender]:
    """Outliers of 6 bits from the tables, and as sparse rows of floats."""
    codes, edge = slab.codes(), 2**slab.how.low_bits
    outliers = codes.masked_fill((codes >= -edge) & (codes < edge), 0)
    split = put_together(slab.weight_split, w.repeated(slab.weight_scale.float()).flatten(), w.repeated(outliers))
    values = outliers.float() * slab.weight_scale.float()

    run = lambda x, split: ops.zipper_high_linear(x, torch.zeros(len(x), w.out_features), split)  # noqa: E731
    whole = w.repeated(values)
    csr_bytes = int(whole.count_nonzero()) * 12 + w.out_features * 8
    return [
        Contender("by value, tables", split.nbytes, lambda copies: Ours((split,), run, copies), slab=values),
        Contender("by value, torch csr", csr_bytes, lambda copies: TorchCsr(whole, copies), slab=values),
    ]


def contenders(op: str, w: Weights, ggml_folder: Path | None) -> list[Contender]:
    """Ours for `op` first, then the peers it is compared with: others' kernels, or our own of other formats."""
    if op == "mxfp4_linear":
        ours = [our_mxfp4(w, 8), our_mxfp4(w, 16)]
        peers = [ggml(w, "mxfp4_r8", 4.25, ggml_folder), openvino_int4(w, 32), torch_int4(w, 32), torch_bf16(w)]
    elif op == "int4_linear":
        ours = [our_int4(w, group, bits) for group in (128, 32) for bits in (8, 16)]
        peers = [openvino_int4(w, 128), openvino_int4(w, 32), torch_int4(w, 128), torch_int4(w, 32), torch_bf16(w)]
    elif op == "int4_int8_linear":
        ours = [our_int4_int8(w, bits) for bits in (8, 16)]
        peers = [replace(our_int4(w, 128, bits), ours=False) for bits in (8, 16)]
    elif op == "nested_linear":
        ours = [our_nested(w, 4, 8), our_nested(w, 4, 16), our_nested(w, 16, 16)]
        peers = [replace(one, ours=False) for one in (our_mxfp4(w, 8), our_mxfp4(w, 16), our_bf16(w))]
    elif op == "bitplane_linear":
        ours = [our_planes(w, count) for count in (2, 3, 4, 8)]
        peers = [replace(one, ours=False) for one in (our_int4(w, PLANES_GROUP, 16), our_bf16(w))]
    elif op == "lut_linear":
        ours = [our_lut(w, bits) for bits in (2, 3, 4, 8)]
        peers = [replace(one, ours=False) for one in (our_int4(w, 128, 16), our_planes(w, 4), our_bf16(w))]
    elif op == "zipper_linear":
        ours = [our_zipper(w, mode) for mode in ("exact", "paper", "clamp")] + [our_zipper(w, "clamp", low_only=True)]
        peers = [replace(one, ours=False) for one in (our_planes(w, 8), our_int4(w, 128, 16), our_bf16(w))]
    elif op == "bitplane_integers":
        ours = [low_on_integers(w, "clamp", bits) for bits in (8, 4, 16)]
        peers = [replace(low_on_integers(w, "paper", bits), ours=False) for bits in (8, 4, 16)]
    elif op == "zipper_high_linear":
        return [*high_parts(w, "exact"), *high_parts(w, "clamp")]
    else:
        ours = [our_bf16(w)]
        peers = [torch_bf16(w), ggml(w, "bf16", 16, ggml_folder)]
    return [*ours, *peers]


OPS = ("mxfp4_linear", "int4_linear", "bf16_linear", "nested_linear", "bitplane_linear", "lut_linear",
       "int4_int8_linear", "zipper_linear", "zipper_high_linear", "bitplane_integers")


def not_compiled() -> str | None:
    """Why ours run in plain torch here; None where they are compiled."""
    return ops.why_not_compiled()


def error(y, x: Tensor, w: Weights | Contender) -> float:
    """Relative root mean square error of the first 64 outputs against float32; `y` ``[n, out]`` of any kind."""
    found = torch.as_tensor(y)[:, :SLAB].to(torch.float32)
    expected = x @ w.slab.T
    return ((found - expected).square().mean() / expected.square().mean()).sqrt().item()


def _activations(bits: int) -> str:
    return "bf16" if bits == 16 else f"int{bits}"


def _int4_bytes(w: Weights, group: int) -> int:
    return w.elements // 2 + w.elements // group * 2
