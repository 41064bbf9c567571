"""Do the kernels of lookup-table planes on a GPU look every width up, with the same bits for every number of rows?"""

from __future__ import annotations

from typing import NamedTuple

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
from hf_mlspec.formats import LutWeight
from hf_mlspec.formats.lut import table_columns
from hf_mlspec.ops import lut as lut_ops
from hf_mlspec.ops.lut import tiles, tiles_cuda
from hf_mlspec.ops.operator import REFERENCES

pytestmark = pytest.mark.usefixtures("kernels_are_required")
WIDTHS = ((8, 1), (7, 3), (6, 6), (5, 2), (4, 4), (4, 3), (3, 1), (2, 2), (1, 1))  # stored, smallest table
TOKENS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 130)
MANY = 200
# Odd ones, less than a tile, a last chunk that is not full, 1 to 8 blocks a tile.
SHAPES = ((1, 32), (7, 96), (128, 128), (200, 192), (1000, 352), (136, 4096))
LARGE = ((4096, 2048), (17000, 512))  # 3 blocks a tile; more tiles than places, which take one after another


class Case(NamedTuple):
    """A weight ``[out, in]``, its tiles, and rows to multiply it with."""

    weight: LutWeight
    tiles: lut_ops.LutTiles
    x: Tensor
    bias: Tensor

    @property
    def widths(self) -> range:
        return range(self.weight.least_planes, self.weight.num_planes + 1)

    def multiply(self, x: Tensor, read: int, bias: Tensor | None = None) -> Tensor:
        return ops.lut_linear(x, *self.tiles, self.weight.out_features, bias, num_planes=read)

    def exact(self, read: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """float64 ``[rows of x, out]``: the product, and the sum of the magnitudes it is made of."""
        dense = self.weight.dequantize(torch.bfloat16, read).double()
        product, magnitude = self.x.double() @ dense.T, self.x.double().abs() @ dense.abs().T
        return (product if bias is None else product + bias.double()), magnitude


def make(stored: int, least: int, out: int, size: int) -> Case:
    draw = torch.Generator(DEVICE).manual_seed(stored * 1000 + out)
    planes = torch.randint(0, 256, (stored, out, size // 8), dtype=torch.uint8, generator=draw, device=DEVICE)
    tables = torch.randn(out, table_columns(stored, least), generator=draw, device=DEVICE) / size**0.5
    weight = LutWeight(planes, tables.half()).validate()
    x = torch.randn(MANY, size, generator=draw, device=DEVICE).bfloat16()
    return Case(weight, ops.prepack_lut(*weight.parts), x, torch.randn(out, generator=draw, device=DEVICE))


def check_product(case: Case, read: int, bias: Tensor | None) -> None:
    out = case.weight.out_features
    poison(*[(MANY, out)] * 3)
    every = case.multiply(case.x, read, bias)
    exact, magnitude = case.exact(read, bias)
    error = (every.double() - exact).abs()
    bound = exact.abs() * 2.0**-7.99 + 4e-6 * magnitude + 1e-30
    assert (error <= bound).all(), f"{read} planes: {(error / bound).max().item():.3g} of the bound"
    for tokens in TOKENS:
        for first in {0, min(3, MANY - tokens)}:
            poison(*[(tokens, out)] * 3)
            some = case.multiply(case.x[first : first + tokens], read, bias)
            assert torch.equal(some, every[first : first + tokens]), f"{read} planes, {tokens} from {first} on"


@pytest.mark.parametrize("stored", WIDTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_width_and_bits_of_every_number_of_tokens(stored, shape):
    case = make(*stored, *shape)
    for read in case.widths:
        check_product(case, read, case.bias if read % 2 else None)


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_weights(shape):
    case = make(8, 1, *shape)
    for read in case.widths:
        check_product(case, read, None)


@pytest.mark.parametrize("read", range(1, 9))
def test_every_code_is_the_very_value_of_its_table(read):
    """One input at a time, in a table whose values are all different: what is looked up comes out unchanged."""
    case = make(8, 1, 130, 256)
    eye = torch.eye(256, device=DEVICE, dtype=torch.bfloat16)
    expected = case.weight.dequantize(torch.bfloat16, read).T
    assert torch.equal(case.multiply(eye, read), expected)
    assert torch.equal(case.multiply(eye[:8], read), expected[:8])


def test_planes_that_are_not_asked_for_do_not_matter():
    case = make(8, 1, 200, 256)
    for read in range(1, 8):
        planes, tables = case.weight.weight_planes.clone(), case.weight.weight_tables.clone()
        planes[read:] ^= 0xA5
        tables[:, 2 ** (read + 1) - 2 :] += 1
        other = case._replace(tiles=ops.prepack_lut(planes, tables))
        assert torch.equal(other.multiply(case.x, read), case.multiply(case.x, read))
        assert not torch.equal(other.multiply(case.x, read + 1), case.multiply(case.x, read + 1))


def test_a_linear_is_the_reference_up_to_rounding():
    case = make(8, 2, 200, 256)
    on_cpu = tiles.pack(*(part.cpu() for part in case.weight.parts))
    for read in (2, 4, 5, 8):
        expected = REFERENCES["lut_linear"](case.x.cpu(), *on_cpu, 200, None, read)
        torch.testing.assert_close(case.multiply(case.x, read).cpu(), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("read", [1, 4, 8])
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_a_captured_chain_waits_for_what_it_reads(read, tokens):
    case = make(8, 1, 1024, 1024)
    check_captured_products(lambda y: case.multiply(y, read), case.x[:tokens], case.x[-tokens:])


@pytest.mark.parametrize("shape", [(8, 1, 300, 256), (3, 2, 7, 96), (4, 4, 129, 192)], ids=str)
def test_tiles_are_a_permutation_and_the_same_on_every_device(shape):
    case = make(*shape)
    assert tiles_cuda.is_packed(case.tiles.planes)
    assert lut_ops.lut_fits_device(case.tiles.planes)
    for ours, expected in zip(case.tiles, tiles_cuda.pack(*(part.cpu() for part in case.weight.parts)), strict=True):
        assert torch.equal(ours.cpu(), expected)
    for ours, expected in zip(ops.unprepack_lut(*case.tiles, shape[2]), case.weight.parts, strict=True):
        assert torch.equal(ours, expected)


def test_x_of_other_floats_and_at_any_address():
    case = make(6, 3, 128, 256)
    expected = case.multiply(case.x[:4], 3)
    shifted = torch.empty(4 * 256 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(4, 256).copy_(case.x[:4])
    assert torch.equal(case.multiply(shifted, 3), expected)
    for dtype in (torch.float32, torch.float16):
        got = case.multiply(case.x[:4].to(dtype), 3)
        assert got.dtype == dtype
        assert torch.equal(got, case.multiply(case.x[:4].to(dtype).bfloat16(), 3).to(dtype))
    assert case.multiply(case.x[:6].view(2, 3, 256), 3).shape == (2, 3, 128)
    assert case.multiply(case.x[:0], 3).shape == (0, 128)


def test_operands_that_do_not_fit_are_named():
    case = make(4, 3, 40, 224)
    x, (planes, tables) = case.x[:2], case.tiles
    for read in (2, 5):
        with pytest.raises(ValueError, match=f"num_planes is {read}, the weight has tables of 3 to 4 bits: choose"):
            case.multiply(x, read)
    with pytest.raises(ValueError, match=r"x has shape \[2, 128\], the weight takes in_features = 224"):
        case.multiply(x[:, :128], 4)
    with pytest.raises(ValueError, match=r"bias has shape \[39\], expected \[40\]"):
        case.multiply(x, 4, case.bias[1:])
    with pytest.raises(ValueError, match=r"plane_tiles has shape \[1, 2, 8224\], expected \[2, in / 128, "):
        ops.lut_linear(x, planes, tables, 129, num_planes=4)
    with pytest.raises(ValueError, match=r"table_tiles has shape \[1, 128, 23\], expected \[1, 128, 2\^5 - 2\^S\]"):
        ops.lut_linear(x, planes, tables[..., 1:].contiguous(), 40, num_planes=4)
    on_cpu = [part.to(DEVICE) for part in tiles.pack(*(part.cpu() for part in case.weight.parts))]
    with pytest.raises(ValueError, match=r"plane_tiles has shape \[4, 3, 7, 64\], expected \[1, "):
        ops.lut_linear(x, *on_cpu, 40, num_planes=4)


@needs_other_kernels
def test_the_kernels_for_every_gpu_pass_these_tests():
    check_with_the_kernels_of_every_gpu(__file__, "lut_linear")
