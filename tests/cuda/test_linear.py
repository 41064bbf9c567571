"""Do the linear kernels of a GPU compute the product, with the same bits for a token however many share the call?"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from linear_cases import (
    DEVICE,
    FORMATS,
    SHAPES,
    TOKENS,
    Case,
    Format,
    check_captured_products,
    check_with_the_kernels_of_every_gpu,
    needs_other_kernels,
    poison,
)
from torch import nn

from hf_mlspec import ops
from hf_mlspec.formats import activations
from hf_mlspec.nn.linear import Int4Linear, KernelLinear, Mxfp4Linear
from hf_mlspec.ops import mxfp4 as mxfp4_tiles
from hf_mlspec.ops import tiles, tiles_cuda

pytestmark = pytest.mark.usefixtures("kernels_are_required")
MXFP4, INT4 = Format("mxfp4", 16, 32, mxfp4=True), Format("int4", 16, 128)
PRODUCTS = [
    (form, (out, size)) for form in FORMATS for out, size in SHAPES if not (form.group_size and size % form.group_size)
]
CHAINED = (Format("bf16"), MXFP4, Format("mxfp4-a8", 8, 32, mxfp4=True), INT4, Format("int4-a8", 8, 32, zeros=True))


@pytest.mark.parametrize(("form", "shape"), PRODUCTS, ids=lambda value: getattr(value, "name", str(value)))
def test_product_and_bits_of_every_number_of_tokens(form, shape):
    case = Case(form, *shape, largest_scale=131)  # beyond the largest exponent without a shift
    bias = case.bias if shape[0] % 2 else None
    poison(*[(len(case.x), case.out)] * 3)
    every = case.multiply(case.x, bias)
    exact, magnitude = case.exact(bias)
    error = (every.double() - exact).abs()
    bound = exact.abs() * 2.0**-7.99 + 4e-6 * magnitude + 1e-30
    assert (error <= bound).all(), f"{(error / bound).max().item():.3g} of the bound"
    for tokens in TOKENS:
        for first in {0, min(3, len(case.x) - tokens)}:
            poison(*[(tokens, case.out)] * 3)
            some = case.multiply(case.x[first : first + tokens], bias)
            assert torch.equal(some, every[first : first + tokens]), f"{tokens} tokens from {first} on"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_of_any_float_is_added_once_in_float32(dtype):
    for form in (Format("bf16"), MXFP4):
        case = Case(form, 72, 256)
        bias = case.bias.to(dtype)
        exact, magnitude = case.exact(bias)
        error = (case.multiply(case.x, bias).double() - exact).abs()
        assert (error <= exact.abs() * 2.0**-7.99 + 4e-6 * magnitude).all()


@pytest.mark.parametrize(("out", "size"), [(5, 37), (64, 65), (130, 1), (33, 200)])
def test_bfloat16_rows_that_are_no_multiple_of_16_bytes(out, size):
    case = Case(Format("bf16"), out, size)
    exact, magnitude = case.exact()
    every = case.multiply(case.x)
    assert ((every.double() - exact).abs() <= exact.abs() * 2.0**-7.99 + 4e-6 * magnitude + 1e-30).all()
    for tokens in (1, 9, 70):
        assert torch.equal(case.multiply(case.x[:tokens]), every[:tokens])


def test_operands_at_any_address_and_of_other_floats():
    for form in (Format("bf16"), MXFP4, Format("int4-a8", 8, 64)):
        case = Case(form, 128, 256)
        expected = case.multiply(case.x[:4])
        shifted = torch.empty(4 * 256 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(4, 256).copy_(case.x[:4])
        assert torch.equal(case.multiply(shifted), expected)
        transposed = case.x[:4].T.contiguous().T
        assert torch.equal(case.multiply(transposed), expected)
        for dtype in (torch.float32, torch.float16):
            got = case.multiply(case.x[:4].float().to(dtype))
            assert got.dtype == dtype
            rounded = case.multiply(case.x[:4].float().to(dtype).bfloat16())
            assert torch.equal(got, rounded.to(dtype))
        assert case.multiply(case.x[:6].view(2, 3, 256)).shape == (2, 3, 128)
        assert case.multiply(case.x[:0]).shape == (0, 128)


@pytest.mark.parametrize("form", CHAINED, ids=lambda form: form.name)
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_a_captured_chain_of_linears_waits_for_what_it_reads(form, tokens):
    case = Case(form, 1024, 1024)
    check_captured_products(case.multiply, case.x[:tokens], case.x[-tokens:])


@pytest.mark.parametrize(("group_size", "bits"), [(32, 8), (64, 8), (128, 8), (32, 4), (64, 4), (128, 4)])
@pytest.mark.parametrize("size", [1, 31, 100, 256, 4100])
def test_quantized_rows_are_those_of_the_format(size, group_size, bits):
    x = torch.randn(9, size, device=DEVICE).bfloat16()
    x[0] = 0
    x[1, 0], x[2, -1], x[3] = torch.nan, torch.inf, 1e-38
    for clip in (1.0, 0.8, 0.1):
        codes, scales = ops.quantize_rows(x, group_size, bits, clip)
        for made in (activations.quantize_rows, ops.quantize_rows):  # plain torch, and the kernels of this CPU
            expected_codes, expected_scales = made(x.cpu(), group_size, bits, clip)
            assert torch.equal(codes.cpu(), expected_codes)
            assert torch.equal(scales.cpu().nan_to_num(-1), expected_scales.nan_to_num(-1))


def test_tiles_are_a_permutation_and_the_same_on_every_device():
    packed = torch.randint(0, 256, (200, 176), dtype=torch.uint8)
    scale = torch.randint(0, 255, (200, 11), dtype=torch.uint8)
    on_gpu = ops.prepack_mxfp4(packed.to(DEVICE), scale.to(DEVICE))
    for ours, expected in zip(on_gpu, mxfp4_tiles.pack_cuda(packed, scale), strict=True):
        assert torch.equal(ours.cpu(), expected)
    for ours, expected in zip(ops.unprepack_mxfp4(*on_gpu, 200), (packed, scale), strict=True):
        assert torch.equal(ours.cpu(), expected)
    scale[3, 4] = 255
    with pytest.raises(ValueError, match=r"1 of 2200 scales are NaN \(255\)"):
        ops.prepack_mxfp4(packed.to(DEVICE), scale.to(DEVICE))


@pytest.mark.parametrize("kind", [Mxfp4Linear, Int4Linear])
def test_packed_layers_move_between_devices(kind):
    dense = nn.Linear(256, 136).bfloat16()
    layer = kind.from_linear(dense)
    x = torch.randn(5, 256).bfloat16()
    disk = {name: value.clone() for name, value in layer.state_dict().items()}
    on_cpu = layer(x)
    layer.to(DEVICE)
    on_gpu = layer(x.to(DEVICE))
    assert layer.is_prepacked
    assert tiles.fit_device(layer.weight_tiles)
    assert tiles_cuda.is_packed(layer.weight_tiles)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=2e-2, rtol=1e-2)
    assert all(torch.equal(disk[name], value.cpu()) for name, value in layer.state_dict().items())
    layer.cpu()
    assert torch.equal(layer(x), on_cpu)
    layer.to(DEVICE)
    assert torch.equal(layer(x.to(DEVICE)), on_gpu)
    assert layer(x.to(DEVICE).float()).dtype == torch.float32


def test_prepared_dense_layers_use_the_kernel_in_bfloat16():
    layer = KernelLinear(64, 40).to(DEVICE).bfloat16().requires_grad_(False)
    x = torch.randn(3, 64, device=DEVICE).bfloat16()
    assert torch.equal(layer(x), ops.bf16_linear(x, layer.weight, layer.bias))
    layer.float()
    assert torch.equal(layer(x.float()), nn.functional.linear(x.float(), layer.weight, layer.bias))


def test_operands_that_do_not_fit_are_named():
    mxfp4, int4 = Case(MXFP4, 40, 256), Case(INT4, 40, 256)
    x, bias = mxfp4.x[:2], torch.zeros(40, device=DEVICE)
    with pytest.raises(ValueError, match=r"mxfp4_linear: x has shape \[2, 128\], the weight takes in_features = 256"):
        mxfp4.multiply(x[:, :128])
    with pytest.raises(ValueError, match=r"bias has shape \[39\], expected \[40\]"):
        mxfp4.multiply(x, bias[1:])
    with pytest.raises(ValueError, match="bias is on cpu"):
        mxfp4.multiply(x, bias.cpu())
    with pytest.raises(TypeError, match=r"x is .*, expected float32, bfloat16 or float16"):
        mxfp4.multiply(x.int())
    with pytest.raises(ValueError, match=r"weight_tiles has shape \[1, 2, 8704\], expected \[2, 2, 8704\]"):
        ops.mxfp4_linear(x, *mxfp4.tiles, 129)
    with pytest.raises(ValueError, match="activation_bits is 4, choose one of"):
        ops.mxfp4_linear(x, *mxfp4.tiles, 40, None, 4)
    with pytest.raises(ValueError, match="groups of 64"):
        ops.int4_linear(x, *int4.tiles, 40, group_size=64)
    with pytest.raises(ValueError, match=r"weight of shape \[256, 40\] is not contiguous"):
        ops.bf16_linear(x[:, :40], torch.zeros(40, 256, dtype=torch.bfloat16, device=DEVICE).T)
    with pytest.raises(TypeError, match="weight is Float"):
        ops.bf16_linear(x, torch.zeros(40, 256, device=DEVICE))
    with pytest.raises(TypeError, match="quantize_rows: x is Float"):
        ops.quantize_rows(x.float(), 32)


def test_tiles_of_the_cpu_are_refused_by_name():
    case = Case(MXFP4, 40, 256)
    packed, scale = ops.unprepack_mxfp4(*case.tiles, 40)
    cpu_tiles = [part.to(DEVICE) for part in ops.prepack_mxfp4(packed.cpu(), scale.cpu())]
    with pytest.raises(ValueError, match=r"shape \[3, 8, 256\], expected \[1, 2, 8704\] from prepack on a GPU"):
        ops.mxfp4_linear(case.x[:1], *cpu_tiles, 40)


def test_which_kernels_serve_is_told():
    table = {op: kernel for op, device, kernel in ops.kernel_table() if device == "cuda"}
    hopper = torch.cuda.get_device_capability() == (9, 0) and os.environ.get("MLSPEC_CUDA_KERNELS") != "portable"
    assert table["mxfp4_linear"] == table["int4_linear"] == table["bf16_linear"] == ("sm_90a" if hopper else "sm_80+")
    assert table["quantize_rows"] == "sm_80+"


@needs_other_kernels
def test_the_kernels_for_every_gpu_pass_these_tests():
    check_with_the_kernels_of_every_gpu(__file__, "bf16_linear")


def test_an_unknown_choice_of_kernels_is_an_error():
    code = "import torch; from hf_mlspec import ops; ops.kernel_table()"
    environment = {**os.environ, "MLSPEC_CUDA_KERNELS": "fast"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert 'MLSPEC_CUDA_KERNELS is "fast": set it to "portable", or unset it' in done.stderr
