"""Do the kernels of bit-planes on a GPU compute the product of the first planes, with the same bits for every call?"""

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
from hf_mlspec.formats import planes as bitplanes
from hf_mlspec.ops import planes as plane_ops
from hf_mlspec.ops.operator import REFERENCES
from hf_mlspec.ops.planes import tiles as tiles_planes
from hf_mlspec.ops.planes import tiles_cuda as tiles_planes_cuda

pytestmark = pytest.mark.usefixtures("kernels_are_required")
WORDS = (8, 7, 6, 5, 4, 3, 2, 1, "int3", "int2", "ternary")
TOKENS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 130)
MANY = 300
# Odd ones, less than a tile, a last chunk that is not full, 1 to 8 blocks a tile (3 at 4096 x 2048).
SHAPES = ((1, 32, 32), (7, 96, 32), (128, 128, 128), (200, 192, 64), (1000, 352, 32), (136, 4096, 128), (130, 640, 64))
LARGE = ((4096, 2048, 128), (8200, 640, 32))


class Case(NamedTuple):
    """A weight ``[out, in]``, its tiles, and rows to multiply it with."""

    weight: bitplanes.Planes
    tiles: tuple[Tensor, Tensor]
    x: Tensor
    bias: Tensor
    group: int

    @property
    def out(self) -> int:
        return self.weight.planes.shape[1]

    def multiply(self, x: Tensor, num_planes: int, bias: Tensor | None = None) -> Tensor:
        return ops.bitplane_linear(
            x, *self.tiles, self.out, bias, group_size=self.group, zero_doubled=self.weight.zero_doubled,
            num_planes=num_planes,
        )  # fmt: skip

    def exact(self, num_planes: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """float64 ``[rows of x, out]``: the product, and the sum of the magnitudes it is made of."""
        dense = bitplanes.dequantize(*self.weight, num_planes).double()  # exact in float32
        product, magnitude = self.x.double() @ dense.T, self.x.double().abs() @ dense.abs().T
        return (product if bias is None else product + bias.double()), magnitude


def make(word: int | str, out: int, size: int, group: int) -> Case:
    draw = torch.Generator(DEVICE).manual_seed(out * size + group)
    weight = bitplanes.quantize(torch.randn(out, size, generator=draw, device=DEVICE) / size**0.5, word, group)
    x = torch.randn(MANY, size, generator=draw, device=DEVICE).bfloat16()
    bias = torch.randn(out, generator=draw, device=DEVICE)
    return Case(weight, ops.prepack_planes(weight.planes, weight.scale), x, bias, group)


def check_product(case: Case, num_planes: int, bias: Tensor | None) -> None:
    poison(*[(MANY, case.out)] * 3)
    every = case.multiply(case.x, num_planes, bias)
    exact, magnitude = case.exact(num_planes, bias)
    error = (every.double() - exact).abs()
    bound = exact.abs() * 2.0**-7.99 + 4e-6 * magnitude + 1e-30
    assert (error <= bound).all(), f"{num_planes} planes: {(error / bound).max().item():.3g} of the bound"
    for tokens in TOKENS:
        for first in {0, min(3, MANY - tokens)}:
            poison(*[(tokens, case.out)] * 3)
            some = case.multiply(case.x[first : first + tokens], num_planes, bias)
            assert torch.equal(some, every[first : first + tokens]), f"{num_planes} planes, {tokens} from {first} on"


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_prefix_of_planes_and_bits_of_every_number_of_tokens(word, shape):
    case = make(word, *shape)
    for num_planes in range(1, len(case.weight.planes) + 1):
        check_product(case, num_planes, case.bias if num_planes % 2 else None)


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_weights_of_eight_planes(shape):
    case = make(8, *shape)
    for num_planes in range(1, 9):
        check_product(case, num_planes, None)


@pytest.mark.parametrize("group", bitplanes.GROUP_SIZES)
def test_every_group_size_at_every_width(group):
    case = make(8, 192, 512, group)
    for num_planes in range(1, 9):
        check_product(case, num_planes, case.bias)


def test_planes_that_are_not_asked_for_do_not_matter():
    case = make(8, 200, 256, 64)
    for num_planes in range(1, 8):
        planes = case.weight.planes.clone()
        planes[num_planes:] ^= 0xA5
        tiles = ops.prepack_planes(planes, case.weight.scale)
        other = case._replace(tiles=tiles)
        assert torch.equal(other.multiply(case.x, num_planes), case.multiply(case.x, num_planes))
        assert not torch.equal(other.multiply(case.x, num_planes + 1), case.multiply(case.x, num_planes + 1))


def test_a_linear_is_the_reference_up_to_rounding():
    case = make(8, 200, 256, 64)
    on_cpu = tiles_planes.pack(*(part.cpu() for part in case.weight[:2]))
    for num_planes in (2, 4, 8):
        expected = REFERENCES["bitplane_linear"](case.x.cpu(), *on_cpu, 200, None, 64, 256, num_planes)
        torch.testing.assert_close(case.multiply(case.x, num_planes).cpu(), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("num_planes", [1, 4, 8])
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_a_captured_chain_waits_for_what_it_reads(num_planes, tokens):
    case = make(8, 1024, 1024, 128)
    check_captured_products(lambda y: case.multiply(y, num_planes), case.x[:tokens], case.x[-tokens:])


@pytest.mark.parametrize(("word", "shape"), [(8, (300, 256, 128)), (3, (7, 96, 32)), (5, (129, 192, 64))])
def test_tiles_are_a_permutation_and_the_same_on_every_device(word, shape):
    case = make(word, *shape)
    assert tiles_planes_cuda.is_packed(case.tiles[0])
    assert plane_ops.planes_fit_device(case.tiles[0])
    for ours, expected in zip(case.tiles, tiles_planes_cuda.pack(*(t.cpu() for t in case.weight[:2])), strict=True):
        assert torch.equal(ours.cpu(), expected)
    for ours, expected in zip(ops.unprepack_planes(*case.tiles, case.out), case.weight[:2], strict=True):
        assert torch.equal(ours, expected)


def test_x_of_other_floats_and_at_any_address():
    case = make(6, 128, 256, 64)
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
    case = make(4, 40, 256, 64)
    x, (planes, scale) = case.x[:2], case.tiles
    with pytest.raises(ValueError, match="num_planes is 5, the weight stores 4: choose 1 to 4"):
        case.multiply(x, 5)
    with pytest.raises(ValueError, match="num_planes is 0, the weight stores 4"):
        case.multiply(x, 0)
    with pytest.raises(ValueError, match=r"x has shape \[2, 128\], the weight takes in_features = 256"):
        case.multiply(x[:, :128], 4)
    with pytest.raises(ValueError, match=r"bias has shape \[39\], expected \[40\]"):
        case.multiply(x, 4, case.bias[1:])
    with pytest.raises(ValueError, match=r"plane_tiles has shape \[1, 2, 8704\], expected \[2, 2, "):
        ops.bitplane_linear(x, planes, scale, 129, group_size=64, zero_doubled=16, num_planes=4)
    with pytest.raises(ValueError, match="groups of 128"):
        ops.bitplane_linear(x, planes, scale, 40, group_size=128, zero_doubled=16, num_planes=4)
    eight = make(8, 40, 256, 64)
    with pytest.raises(ValueError, match="zero_doubled is 128, of 8 planes it must be 254 to 256"):
        ops.bitplane_linear(x, *eight.tiles, 40, group_size=64, zero_doubled=128, num_planes=8)
    cpu_tiles = [part.to(DEVICE) for part in tiles_planes.pack(*(part.cpu() for part in case.weight[:2]))]
    with pytest.raises(ValueError, match=r"plane_tiles has shape \[4, 3, 8, 64\], expected \[1, "):
        ops.bitplane_linear(x, *cpu_tiles, 40, group_size=64, zero_doubled=16, num_planes=4)


@needs_other_kernels
def test_the_kernels_for_every_gpu_pass_these_tests():
    check_with_the_kernels_of_every_gpu(__file__, "bitplane_linear")


@pytest.mark.parametrize(
    ("out", "size", "group"), [(256, 352, 32), (136, 4096, 128), (130, 640, 64), (6144, 4096, 128)]
)
def test_tiles_of_top_planes_are_the_weight_read_no_further(out, size, group):
    for word, top in ((8, 4), (8, 7), (6, 1), (5, 3)):
        case = make(word, out, size, group)
        few = ops.prepack_planes(case.weight.planes[:top].contiguous(), case.weight.scale)
        how = {"group_size": group, "zero_doubled": case.weight.zero_doubled, "total_planes": word}
        for read in range(1, top + 1):
            for tokens in (1, 9, 17, 65):
                x = case.x[:tokens]
                found = ops.bitplane_linear(x, *few, out, case.bias, **how, num_planes=read)
                assert torch.equal(found, case.multiply(x, read, case.bias)), (word, top, read, tokens)


@pytest.mark.parametrize("tokens", [1, 9, 17, 65, 300])
def test_some_outputs_of_a_weight_have_its_order_of_sums(tokens):
    case = make(8, 6144, 4096, 128)
    whole = case.multiply(case.x[:tokens], 8)
    for first, last in ((0, 4096), (4096, 5120), (5120, 6144)):
        part = ops.prepack_planes(case.weight.planes[:, first:last].contiguous(), case.weight.scale[first:last])
        how = {"group_size": 128, "zero_doubled": case.weight.zero_doubled, "outputs_of_weight": 6144}
        found = ops.bitplane_linear(case.x[:tokens], *part, last - first, None, **how, num_planes=8)
        assert torch.equal(found, whole[:, first:last]), (first, last)


@pytest.mark.parametrize("tokens", [1, 9, 17, 65, 300])
@pytest.mark.parametrize(
    ("out", "size", "group"), [(200, 192, 64), (136, 4096, 128), (4096, 2048, 128), (1000, 352, 32)]
)
def test_planes_that_lie_apart_give_the_bits_of_the_whole_weight(out, size, group, tokens):
    case, top = make(8, out, size, group), 4
    tiles, scales = case.tiles
    halves = tiles.unflatten(2, (2, tiles.shape[2] // 2))
    front = halves.shape[3] - 8 * tiles_planes_cuda.PLANE_BYTES
    behind = front + top * tiles_planes_cuda.PLANE_BYTES
    low = halves[..., behind:].unflatten(-1, (8 - top, tiles_planes_cuda.PLANE_BYTES))
    low, tops = low.permute(3, 0, 1, 2, 4).flatten(1).contiguous(), halves[..., :behind].flatten(2).contiguous()
    how = {"group_size": group, "zero_doubled": case.weight.zero_doubled, "total_planes": 8}
    for num_planes in (5, 6, 7, 8):
        wanted = case.multiply(case.x[:tokens], num_planes)
        for resident in (0, 1, 4):
            apart = low[:resident].clone() if resident else None, low[resident:].clone()
            found = ops.bitplane_linear(
                case.x[:tokens], tops, scales, out, num_planes=num_planes, apart=apart, **how
            )
            assert found.equal(wanted), (num_planes, resident)
