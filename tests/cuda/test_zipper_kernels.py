"""On a GPU: do both parts of zipper weights multiply as in float64, a row's bits alone and without a wait?"""

from __future__ import annotations

import pytest
import torch
from linear_cases import DEVICE
from zipper_operands import BAD_OPERANDS, bad_operands

from hf_mlspec import ops
from hf_mlspec.formats import ZipperWeight, activations
from hf_mlspec.formats.zipper import MODES
from hf_mlspec.ops.operator import REFERENCES

pytestmark = pytest.mark.usefixtures("kernels_are_required")
TOKENS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 70)
SHAPES = ((200, 1152), (7, 96), (130, 32), (1000, 4096), (64, 14336), (40, 131072))  # the last: 2,048 cells a slice


def case(out: int, size: int, **options):
    """A weight, its tiles on the GPU, and rows of x there."""
    draw = torch.Generator().manual_seed(out + size)
    weight = ZipperWeight.from_dense(torch.randn(out, size, generator=draw) / size**0.5, **options)
    tiles = ops.prepack_zipper(*(part.to(DEVICE) for part in weight.parts))
    return weight, tiles, torch.randn(max(TOKENS), size, generator=draw).to(DEVICE)


@pytest.mark.parametrize(("out", "size"), SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_both_parts_are_the_whole_weight_within_float32_sums(mode, out, size):
    weight, tiles, x = case(out, size, mode=mode)
    again = ops.unprepack_zipper(*tiles, out)
    assert all(torch.equal(own.cpu(), other) for own, other in zip(again, weight.parts, strict=True))
    bias, seen = torch.randn(out, device=DEVICE), x.bfloat16().double()
    for low_only in (False, True):
        whole = weight.dequantize(torch.float64, low_only=low_only).to(DEVICE)
        apart = weight.dequantize(torch.float64, low_only=True).abs().to(DEVICE) + whole.abs()
        exact, magnitude = seen @ whole.T + bias.double(), seen.abs() @ (2 * apart).T + bias.double().abs()
        y = ops.zipper_linear(x, tiles, out, bias, how=weight.how, low_only=low_only)
        bound = 2.0**-24 * (size / 8 + 16) * magnitude
        if low_only:  # the linear of the low part rounds to bfloat16
            bound = bound + 2.0**-8 * exact.abs()
        assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("out", "size"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_row_has_the_same_bits_among_any_others(out, size, dtype):
    weight, tiles, x = case(out, size, mode="clamp")
    x = x.to(dtype)
    whole = ops.zipper_linear(x, tiles, out, how=weight.how)
    assert whole.dtype == dtype
    for n in TOKENS:
        for rows in (slice(0, n), slice(len(x) - n, len(x))):
            assert torch.equal(ops.zipper_linear(x[rows], tiles, out, how=weight.how), whole[rows]), n


@pytest.mark.parametrize("mode", MODES)
def test_the_high_part_alone_is_what_plain_torch_adds(mode):
    _, tiles, x = case(300, 1024, mode=mode)
    low, bias = torch.randn(len(x), 300, device=DEVICE), torch.randn(300, device=DEVICE)
    y = ops.zipper_high_linear(x, low, tiles.split, bias)
    torch.testing.assert_close(y, REFERENCES["zipper_high_linear"](x, low, tiles.split, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"bits": 8, "low_bits": 2}, {"bits": 8, "low_bits": 6, "mode": "clamp"}])
def test_values_beyond_five_bits_are_wide_words(options):
    weight, tiles, x = case(300, 1024, **options)
    assert int(tiles.split[4]) == 1
    low = torch.randn(len(x), 300, device=DEVICE)
    y = ops.zipper_high_linear(x, low, tiles.split)
    torch.testing.assert_close(y, REFERENCES["zipper_high_linear"](x, low, tiles.split, None), rtol=1e-5, atol=1e-4)
    again = ops.unprepack_zipper(*tiles, 300)
    assert all(torch.equal(own.cpu(), other) for own, other in zip(again, weight.parts, strict=True))


@pytest.mark.parametrize(("mode", "bits"), [("exact", 16), ("paper", 16), ("paper", 8), ("paper", 4)])
def test_sums_of_the_low_part_are_those_before_the_rounding(mode, bits):
    weight, tiles, x = case(200, 1152, mode=mode)
    how = {"how": weight.how, "activation_bits": bits}
    sums = ops.zipper_low_sums(x, *tiles[:2], 200, **how)
    rounded = ops.zipper_low_linear(x.bfloat16(), *tiles[:2], 200, **how)
    assert sums.dtype == torch.float32
    assert torch.equal(sums.bfloat16(), rounded)
    seen = x.bfloat16()
    if bits != 16:
        seen = activations.dequantize_rows(*activations.quantize_rows(seen, 64, bits), 64)
    exact = seen.double() @ weight.dequantize(torch.float64, low_only=True).to(DEVICE).T
    assert (sums.double() - exact).abs().max() < 1e-5
    alone = ops.zipper_low_sums(x[3:4], *tiles[:2], 200, **how)
    assert torch.equal(alone, sums[3:4])


def test_joined_weights_are_each_by_itself():
    parts = [case(out, 1152, mode="clamp")[1].split for out in (128, 64, 40)]
    x = torch.randn(19, 1152, device=DEVICE).bfloat16()
    low, bias = torch.randn(19, 232, device=DEVICE), torch.randn(232, device=DEVICE)
    begins = [0, len(parts[0]), len(parts[0]) + len(parts[1])]
    how = {"outputs": [128, 64, 40], "begins": begins}
    joined = ops.zipper_high_joined(x, low, torch.cat(parts), bias, **how)
    cuts = zip(low.split(how["outputs"], -1), parts, bias.split(how["outputs"]), strict=True)
    apart = [ops.zipper_high_linear(x, own.contiguous(), split, own_bias) for own, split, own_bias in cuts]
    assert torch.equal(joined, torch.cat(apart, -1))
    for change, message in (
        ({"outputs": [128, 64, 41]}, "outputs are"),
        ({"begins": [0, 10, 20]}, "high has shape"),
        ({"outputs": [232], "begins": [len(parts[0]) - 99]}, "high has shape"),
    ):
        with pytest.raises(ValueError, match=f"zipper_high_joined: {message}"):
            ops.zipper_high_joined(x, low, parts[0], bias, **{**how, **change})


def test_a_product_only_enqueues_and_can_be_captured():
    weight, tiles, x = case(1000, 4096, mode="exact")
    x = x[:5].bfloat16()
    alone = ops.zipper_linear(x, tiles, 1000, how=weight.how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.zipper_linear(x, tiles, 1000, how=weight.how)
    graph.replay()
    assert torch.equal(captured, alone)


@pytest.mark.parametrize(("change", "error", "message"), BAD_OPERANDS)
def test_operands_that_do_not_fit_are_named(change, error, message):
    split = case(8, 64)[1].split
    with pytest.raises(error, match=f"zipper_high_linear: {message}"):
        ops.zipper_high_linear(*bad_operands(split, change, DEVICE))


def test_parts_on_two_devices_are_named():
    split = case(8, 64)[1].split
    with pytest.raises(ValueError, match="high is on cpu, x on cuda:0; move them to one device"):
        ops.zipper_high_linear(torch.zeros(2, 64, device=DEVICE), torch.zeros(2, 8, device=DEVICE), split.cpu())
