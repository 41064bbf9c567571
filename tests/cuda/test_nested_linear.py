"""Are nested weights on a GPU exact to the last bit of bf16_linear, and their draft the codebook's product?"""

from __future__ import annotations

import pytest
import torch
from linear_cases import (
    DEVICE,
    check_captured_products,
    check_with_the_kernels_of_every_gpu,
    needs_other_kernels,
    poison,
)
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.formats import activations, nested
from hf_mlspec.formats.nested import codebooks
from hf_mlspec.ops.nested import tiles as tiles_nested
from hf_mlspec.ops.nested import tiles_cuda as tiles_nested_cuda

pytestmark = pytest.mark.usefixtures("kernels_are_required")
# Odd outputs, less than a tile, chunks of 64 and 128 that are not full, 1 to 8 blocks a tile, layers of 8B models.
SHAPES = (
    (1, 32), (7, 96), (131, 160), (136, 4096), (1000, 352), (4096, 2048), (4096, 4096), (1024, 14336), (4100, 11008),
    (8200, 640), (17000, 1536),
)  # fmt: skip
TOKENS = (1, 2, 4, 8, 9, 16, 17, 33, 64, 65, 100, 129, 256, 288, 300)


class Nest:
    """A weight whose blocks are worth 2^-30 to 2^exponent, with zeros of both signs, an empty block and subnormals."""

    def __init__(self, out: int, size: int, codebook: str = codebooks.DEFAULT, exponent: int = 6):
        draw = torch.Generator(DEVICE).manual_seed(out * size)
        worth = torch.randint(-30, exponent + 1, (out, size // 32, 1), generator=draw, device=DEVICE).float().exp2()
        weight = (torch.randn(out, size // 32, 32, generator=draw, device=DEVICE) * worth).flatten(1).bfloat16()
        weight[0, :32] = 0
        weight[-1, :32] = torch.randn(32, generator=draw, device=DEVICE).mul(1e-39).bfloat16()
        weight[out // 2, 1] = -0.0
        self.out, self.size = out, size
        self.codebook = codebooks.codebook_of(codebook, DEVICE)
        parts = nested.split(weight, self.codebook)
        self.planes = parts[:4]
        self.weight = nested.join(*self.planes)  # without escapes: the operator knows none
        self.draft = nested.dequantize_draft(parts.packed, parts.scale, self.codebook).double()
        self.tiles = ops.prepack_nested(*self.planes)
        self.x = torch.randn(max(TOKENS), size, generator=draw, device=DEVICE).bfloat16()
        self.bias = torch.randn(out, generator=draw, device=DEVICE)

    def multiply(self, x: Tensor, weight_bits: int, activation_bits: int = 16, bias: Tensor | None = None) -> Tensor:
        poison(*[(len(x), self.out)] * 3)
        return ops.nested_linear(
            x, *self.tiles, self.codebook, self.out, bias, weight_bits=weight_bits, activation_bits=activation_bits
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_weights_have_the_bits_of_bfloat16(shape):
    nest = Nest(*shape)
    bias = nest.bias if shape[0] % 2 else None
    expected = ops.bf16_linear(nest.x, nest.weight, bias)
    for tokens in TOKENS:
        got = nest.multiply(nest.x[:tokens], 16, bias=bias)
        assert same_bits(got, expected[:tokens]), f"{tokens} tokens"
        assert same_bits(got, ops.bf16_linear(nest.x[:tokens], nest.weight, bias))


def test_outputs_with_escapes_have_the_bits_of_the_whole_weight():
    for out, size in ((200, 4096), (2048, 4096), (4096, 4096), (8200, 640)):
        nest = Nest(out, size)
        weight = nest.weight.clone()
        rows = torch.tensor([0, 3, out // 2, out - 1], device=DEVICE)
        weight[rows, 5] = 2.0**-100  # far below the largest of its block
        parts = nested.split(weight, nest.codebook)
        assert len(parts.escape_index) >= 2
        rows = (parts.escape_index // size).unique()
        escapes = {"escape_rows": rows, "escape_weight": weight[rows]}
        tiles = ops.prepack_nested(*parts[:4])
        for tokens in (1, 17, 70):
            x = nest.x[:tokens]
            got = ops.nested_linear(x, *tiles, nest.codebook, out, nest.bias, weight_bits=16, **escapes)
            assert same_bits(got, ops.bf16_linear(x, weight, nest.bias))
        ids = torch.arange(out, dtype=torch.int32, device=DEVICE)
        assert same_bits(ops.nested_rows(ids, *tiles, out, **escapes), weight)


def test_exact_weights_up_to_the_largest_that_kernels_take():
    nest = Nest(200, 512, exponent=28)
    assert int(nest.planes[1].max()) > 150
    for tokens in (1, 9, 40, 150):
        x = nest.x[:tokens]
        assert same_bits(nest.multiply(x, 16), ops.bf16_linear(x, nest.weight))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("codebook", sorted(codebooks.CODEBOOKS))
@pytest.mark.parametrize("shape", [*SHAPES[:6], SHAPES[9]], ids=str)
def test_draft_is_the_product_with_the_codebook_and_batch_invariant(shape, codebook, bits):
    nest = Nest(*shape, codebook)
    bias = nest.bias if shape[0] % 2 else None
    x = nest.x.double()
    if bits == 8:
        x = activations.dequantize_rows(*activations.quantize_rows(nest.x, 32, 8), 32).double()
    exact, magnitude = x @ nest.draft.T, x.abs() @ nest.draft.abs().T
    exact = exact if bias is None else exact + bias.double()
    every = nest.multiply(nest.x, 4, bits, bias)
    bound = exact.abs() * 2.0**-7.99 + 4e-6 * magnitude + 1e-30
    error = (every.double() - exact).abs()
    assert (error <= bound).all(), f"{(error / bound).max().item():.3g} of the bound"
    for tokens in TOKENS:
        for first in {0, min(3, len(nest.x) - tokens)}:
            some = nest.multiply(nest.x[first : first + tokens], 4, bits, bias)
            assert same_bits(some, every[first : first + tokens]), f"{tokens} tokens from {first} on"


def test_tiles_are_a_permutation_and_the_same_on_every_device():
    for out, size in ((1, 32), (130, 160), (257, 384)):
        scale = torch.randint(31, 159, (out, size // 32), dtype=torch.uint8)
        packed, high = (torch.randint(0, 256, (out, size // 2), dtype=torch.uint8) for _ in range(2))
        planes = (packed, scale, torch.randint(0, 256, (out, size), dtype=torch.uint8), high)
        on_gpu = ops.prepack_nested(*(plane.to(DEVICE) for plane in planes))
        for ours, expected in zip(on_gpu, tiles_nested_cuda.pack(*planes), strict=True):
            assert torch.equal(ours.cpu(), expected)
        for ours, expected in zip(ops.unprepack_nested(*on_gpu, out), planes, strict=True):
            assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("scale", [1.0, 0.37, 45.254833995939045])
def test_rows_of_a_table_are_those_of_the_dense_one(scale):
    for shape in ((1, 32), (65, 160), (300, 2080), (1000, 4096)):
        nest = Nest(*shape)
        ids = torch.randint(-3, shape[0] + 3, (37,), dtype=torch.int32, device=DEVICE)
        rows = ops.nested_rows(ids, *nest.tiles, shape[0], scale)
        assert same_bits(rows, ops.embed_rows(ids, nest.weight, scale))
    assert ops.nested_rows(ids[:0], *nest.tiles, shape[0]).shape == (0, 4096)


@pytest.mark.parametrize(("weight_bits", "activation_bits"), [(16, 16), (4, 16), (4, 8)])
@pytest.mark.parametrize("tokens", [1, 16, 40, 200])
def test_a_captured_chain_waits_for_what_it_reads(weight_bits, activation_bits, tokens):
    nest = Nest(1024, 1024, exponent=-20)

    def multiply(y: Tensor) -> Tensor:
        return ops.nested_linear(y, *nest.tiles, nest.codebook, 1024, weight_bits=weight_bits,
                                 activation_bits=activation_bits)  # fmt: skip

    check_captured_products(multiply, nest.x[:tokens], nest.x[-tokens:])


def test_operands_of_other_floats_and_shapes():
    nest = Nest(128, 256)
    expected = nest.multiply(nest.x[:6], 16)
    shifted = torch.empty(6 * 256 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(6, 256).copy_(nest.x[:6])
    assert same_bits(nest.multiply(shifted, 16), expected)
    assert torch.equal(nest.multiply(nest.x[:6].float(), 16), expected.float())
    assert nest.multiply(nest.x[:6].view(2, 3, 256), 16).shape == (2, 3, 128)
    assert nest.multiply(nest.x[:0], 4).shape == (0, 128)


def test_operands_that_do_not_fit_are_named():
    nest = Nest(40, 256)
    x = nest.x[:2]
    with pytest.raises(ValueError, match=r"nested_linear: x has shape \[2, 128\], the weight takes in_features = 256"):
        nest.multiply(x[:, :128], 16)
    with pytest.raises(ValueError, match="weight_bits is 16 and activation_bits 8, choose one of"):
        nest.multiply(x, 16, 8)
    with pytest.raises(ValueError, match=r"draft_tiles has shape \[1, 2, 8704\], expected \[2, 2, 8704\]"):
        ops.nested_linear(x, *nest.tiles, nest.codebook, 129, weight_bits=16)
    with pytest.raises(ValueError, match="codebook is on cpu"):
        ops.nested_linear(x, *nest.tiles, nest.codebook.cpu(), 40, weight_bits=4)
    with pytest.raises(TypeError, match="codebook is Int"):
        ops.nested_linear(x, *nest.tiles, nest.codebook.int(), 40, weight_bits=4)
    cpu_tiles = [part.to(DEVICE) for part in tiles_nested.pack(*(plane.cpu() for plane in nest.planes))]
    with pytest.raises(ValueError, match=r"draft_tiles has shape \[3, 8, 256\], expected \[1, 2, 8704\]"):
        ops.nested_linear(x, *cpu_tiles, nest.codebook, 40, weight_bits=4)
    with pytest.raises(TypeError, match="ids is Long, expected Int"):
        ops.nested_rows(torch.zeros(1, dtype=torch.int64, device=DEVICE), *nest.tiles, 40)


def test_weights_beyond_the_kernels_are_refused_with_numbers():
    nest = Nest(40, 256)
    scale = nest.planes[1].clone()
    scale[3, 4], scale[5, 6] = 159, 200
    with pytest.raises(ValueError, match=r"2 of 320 exponent bytes are above 158 \(the largest is 200\).*in BF16"):
        ops.prepack_nested(nest.planes[0], scale, *nest.planes[2:])


@needs_other_kernels
def test_the_kernels_for_every_gpu_pass_these_tests():
    check_with_the_kernels_of_every_gpu(__file__, "bf16_linear")
