"""Who multiplies the same weight by the same activations? Our kernels and every peer, from one small slab of numbers.

A weight is a slab of 64 rows repeated, so quantizing costs nothing, and the first 64 outputs of every contender have
one answer, against which each is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from eval.peers.ggml_linear import GgmlLinear
from eval.peers.openvino_linear import OpenVinoInt4
from eval.peers.torch_linear import TorchBf16, TorchInt4
from hf_mlspec import ops
from hf_mlspec.formats import int4, mxfp4, packing

SLAB = 64  # rows; a multiple of every interleaving of rows that a peer uses
LARGEST_ERROR = 0.25  # relative, root mean square; 4 bits cost 0.1, a misread weight costs 1 or more


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
    """A name, the bytes of a weight, and what makes `copies` of it; `ours` beats or does not beat the others."""

    name: str
    nbytes: int
    make: Callable[[int], object]
    ours: bool = False


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


def contenders(op: str, w: Weights, ggml_folder: Path | None) -> list[Contender]:
    """Ours for `op` first, then the peers it is compared with."""
    if op == "mxfp4_linear":
        ours = [our_mxfp4(w, 8), our_mxfp4(w, 16)]
        peers = [ggml(w, "mxfp4_r8", 4.25, ggml_folder), openvino_int4(w, 32), torch_int4(w, 32), torch_bf16(w)]
    elif op == "int4_linear":
        ours = [our_int4(w, group, bits) for group in (128, 32) for bits in (8, 16)]
        peers = [openvino_int4(w, 128), openvino_int4(w, 32), torch_int4(w, 128), torch_int4(w, 32), torch_bf16(w)]
    else:
        ours = [our_bf16(w)]
        peers = [torch_bf16(w), ggml(w, "bf16", 16, ggml_folder)]
    return [*ours, *peers]


OPS = ("mxfp4_linear", "int4_linear", "bf16_linear")


def not_compiled() -> str | None:
    """Why ours run in plain torch here; None where they are compiled."""
    return ops.why_not_compiled()


def error(y, x: Tensor, w: Weights) -> float:
    """Relative root mean square error of the first 64 outputs against float32; `y` ``[n, out]`` of any kind."""
    found = torch.as_tensor(y)[:, :SLAB].to(torch.float32)
    expected = x @ w.slab.T
    return ((found - expected).square().mean() / expected.square().mean()).sqrt().item()


def _activations(bits: int) -> str:
    return "bf16" if bits == 16 else f"int{bits}"


def _int4_bytes(w: Weights, group: int) -> int:
    return w.elements // 2 + w.elements // group * 2
