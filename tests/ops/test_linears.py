"""Does every linear compute its product, with bits that depend on a row alone?"""

import cases
import pytest
import torch

from hf_mlspec import ops
from hf_mlspec.formats import mxfp4
from hf_mlspec.ops import library, reference

needs_kernel = pytest.mark.skipif(
    library.kernel_of("mxfp4_linear", "cpu") == "reference", reason="the compiled library is not built"
)


@pytest.mark.parametrize(("out", "size"), cases.SHAPES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_against_float64(out, size, dtype):
    x, bias = cases.seeded(10, size, seed=7).to(dtype), cases.seeded(out, seed=8).to(dtype)
    for case in cases.linears(out, size):
        cases.check_linear(case, x, None)
        cases.check_linear(case, x, bias)


@needs_kernel
@pytest.mark.parametrize(("out", "size"), cases.SHAPES)
def test_integer_sums_bit_for_bit(out, size):
    checked = [case for case in cases.linears(out, size) if case.integers is not None]
    assert checked
    for case in checked:
        cases.check_integers(case, cases.seeded(17, size, seed=9))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("out", "size"), [(64, 512), (130, 2048)])
def test_no_worse_than_torch(dtype, out, size):
    cases.check_no_worse_than_torch(cases.dense_case(out, size, dtype), size, dtype)


@needs_kernel
@pytest.mark.parametrize(("out", "size"), [(50, 160), (17, 1056), (34, 256)])
def test_a_row_does_not_depend_on_the_others(out, size):
    for case in cases.linears(out, size):
        cases.check_rows_stand_alone(case, size)


def test_special_blocks():
    cases.check_special_blocks()


def test_dequantized_weights_bit_for_bit():
    cases.check_dequantize()


@needs_kernel
def test_bad_activations_spoil_their_row_only():
    cases.check_bad_activations()


def test_shapes_strides_and_no_rows():
    x = cases.seeded(6, 64)
    for case in cases.linears(40, 64):
        y = case.call(x)
        assert torch.equal(case.call(x.view(2, 3, 64)), y.view(2, 3, 40))
        assert torch.equal(case.call(x[::2]), y[::2])
        assert torch.equal(case.call(x.T.contiguous().T), y)
        assert torch.allclose(case.call(x[0]), y[0], atol=1e-5)
        assert case.call(x[:0]).shape == (0, 40)


def test_no_inputs_and_no_outputs():
    bias = torch.tensor([1.0, 2.0, 3.0])
    for op, dtype in ((ops.bf16_linear, torch.bfloat16), (ops.f32_linear, torch.float32)):
        assert torch.equal(op(torch.zeros(2, 0), torch.zeros(3, 0, dtype=dtype), bias), bias.expand(2, 3))
        assert op(torch.zeros(2, 0), torch.zeros(3, 0, dtype=dtype)).eq(0).all()
        assert op(torch.zeros(2, 5), torch.zeros(0, 5, dtype=dtype)).shape == (2, 0)
    empty = torch.zeros(1, 0, 256, dtype=torch.uint8), torch.zeros(1, 0, 16, dtype=torch.uint8)
    for bits in (8, 16):
        assert torch.equal(ops.mxfp4_linear(torch.zeros(2, 0), *empty, 3, bias, bits), bias.expand(2, 3))
    scales = torch.zeros(1, 0, 16, dtype=torch.float16)
    for dequantize in (ops.int4_dequantize, reference.int4_dequantize):
        assert dequantize(empty[0], scales, None, 3, 32).shape == (3, 0)


@needs_kernel
@pytest.mark.parametrize("offset", [1, 2, 32])
def test_weights_that_start_anywhere_in_a_buffer(offset):
    """Bytes at odd addresses are read; wider elements at odd addresses are refused by name."""
    x = cases.seeded(3, 64)
    tiles, scale = ops.prepack_mxfp4(*mxfp4.quantize(cases.seeded(20, 64)))

    def moved(tensor):
        buffer = torch.zeros(tensor.nbytes + offset, dtype=torch.uint8)
        buffer[offset:] = tensor.flatten().view(torch.uint8)
        return buffer[offset:].view(tensor.shape)

    for bits in (8, 16):
        expected = ops.mxfp4_linear(x, tiles, scale, 20, None, bits)
        assert torch.equal(ops.mxfp4_linear(x, moved(tiles), moved(scale), 20, None, bits), expected)
    weight = cases.seeded(20, 64).bfloat16()
    shifted = torch.zeros(20 * 64 + offset, dtype=torch.bfloat16)[offset:].view(20, 64).copy_(weight)
    assert torch.equal(ops.bf16_linear(x, shifted), ops.bf16_linear(x, weight))


def test_reference_slices_give_the_same_bits_as_a_materialized_weight():
    x = cases.seeded(3, 64).bfloat16()
    packed, scale = mxfp4.quantize(cases.seeded(200, 64) * 0.05)
    tiles = ops.prepack_mxfp4(packed, scale)
    chunk, reference._CHUNK = reference._CHUNK, 64 * 64
    try:
        assert len(reference.row_slices(200, 64)) == 4
        dense = mxfp4.dequantize(packed, scale, torch.bfloat16)
        y = reference.mxfp4_linear(x, *tiles, 200, None, 16)
        assert torch.equal(reference.sliced_linear(x, dense), y)
        sliced = reference.mxfp4_linear(x, *tiles, 200, None, 8)
        reference._CHUNK = chunk
        assert torch.allclose(reference.mxfp4_linear(x, *tiles, 200, None, 8), sliced, atol=1e-5)
    finally:
        reference._CHUNK = chunk
    assert torch.allclose(y.float(), x.float() @ dense.float().T, atol=0.02)
