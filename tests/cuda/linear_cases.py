"""Weights of every format on a GPU, and what they multiply to in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.formats import activations, int4, mxfp4

DEVICE = "cuda"
# Odd ones, less than a tile, chunks of 64 and 128 that are not full, 1 to 8 blocks a tile (3 at 4096 x 2048).
SHAPES = ((1, 32), (7, 96), (128, 128), (200, 160), (136, 4096), (1000, 352), (4096, 2048), (8200, 640))
TOKENS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 300, 640)


@dataclass(frozen=True)
class Format:
    """``bits``: of activations. ``group_size`` 0: a bfloat16 weight; 32 without ``zeros``: MXFP4 where ``mxfp4``."""

    name: str
    bits: int = 16
    group_size: int = 0
    zeros: bool = False
    mxfp4: bool = False


FORMATS = (
    Format("bf16"),
    *(Format(f"mxfp4-a{bits}", bits, mxfp4.BLOCK, mxfp4=True) for bits in (16, 8)),
    *(Format(f"int4-g{size}{'z' if zeros else ''}-a{bits}", bits, size, zeros)
      for size in (32, 64, 128) for zeros in (False, True) for bits in (16, 8, 4)),
)


class Case:
    """A weight ``[out, in]`` of a format: the op that multiplies with it, and its exact product.

    largest_scale: a byte that the MXFP4 scales of output 0 become, unless 0.
    """

    def __init__(self, form: Format, out: int, size: int, seed: int = 0, largest_scale: int = 0):
        draw = torch.Generator(DEVICE).manual_seed(seed + out * size)
        self.format, self.out, self.size = form, out, size
        weight = torch.randn(out, size, generator=draw, device=DEVICE) / size**0.5
        self.x = torch.randn(max(TOKENS), size, generator=draw, device=DEVICE).bfloat16()
        self.bias = torch.randn(out, generator=draw, device=DEVICE)
        if form.mxfp4:
            packed, scale = mxfp4.quantize(weight)
            if largest_scale:
                scale[0] = largest_scale
            self.dense, self.tiles = mxfp4.dequantize(packed, scale, torch.float32), ops.prepack_mxfp4(packed, scale)
        elif form.group_size:
            packed, scale, zero = int4.quantize(weight, form.group_size, symmetric=not form.zeros)
            self.dense, self.tiles = int4.dequantize(packed, scale, zero), ops.prepack_int4(packed, scale, zero)
        else:
            self.dense, self.tiles = weight.bfloat16(), ()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        form = self.format
        if form.mxfp4:
            return ops.mxfp4_linear(x, *self.tiles, self.out, bias, form.bits)
        if not form.group_size:
            return ops.bf16_linear(x, self.dense, bias)
        return ops.int4_linear(
            x, *self.tiles, self.out, bias, group_size=form.group_size, activation_bits=form.bits
        )

    def exact(self, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """float64 ``[rows of self.x, out]``: the product, and the sum of the magnitudes it is made of."""
        x = self.x.double()
        if self.format.bits != 16:
            size = self.format.group_size
            x = activations.dequantize_rows(*activations.quantize_rows(self.x, size, self.format.bits), size).double()
        weight = self.dense.double()
        product, magnitude = x @ weight.T, x.abs() @ weight.abs().T
        return (product if bias is None else product + bias.double()), magnitude


def poison(*shapes: tuple[int, ...]) -> None:
    """Memory the allocator hands out next holds NaN: what a kernel leaves unwritten shows."""
    kept = [torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE) for shape in shapes]
    del kept


def check_captured_products(multiply: Callable[[Tensor], Tensor], x: Tensor, others: Tensor) -> None:
    """A graph of square linears, each of which reads what the one before it writes, has the bits of single calls.

    In a graph a kernel starts while the one in front of it ends: x ``[rows, n]`` is what that one writes. others: of
    x's shape, for a replay with new numbers in its place.
    """
    x = x.clone()

    def chain() -> Tensor:
        y = x
        for _ in range(12):
            y = multiply(y)
        return y

    expected = chain()
    assert not expected.isnan().any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured.view(torch.int16), expected.view(torch.int16))
    x.copy_(others)
    graph.replay()
    replayed = captured.clone()
    assert torch.equal(replayed, chain())


needs_other_kernels = pytest.mark.skipif(os.environ.get("MLSPEC_CUDA_KERNELS") == "portable", reason="they are these")


def check_with_the_kernels_of_every_gpu(file: str, op: str) -> None:
    """Run the tests of `file` with the kernels that serve all GPUs: a process decides once, so another one does."""
    served = {name: kernel for name, device, kernel in ops.kernel_table() if device == "cuda"}
    if served[op] != "sm_90a":
        pytest.skip("this GPU has no other kernels")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    environment = {**os.environ, "MLSPEC_CUDA_KERNELS": "portable"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
