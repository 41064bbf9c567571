"""Does every linear compute its product, with bits that depend on a row alone?"""

import cases
import pytest
import torch

from hf_mlspec import ops
from hf_mlspec.formats import NestedWeight, mxfp4, nested
from hf_mlspec.formats.nested import codebooks
from hf_mlspec.ops import library, products
from hf_mlspec.ops.operator import REFERENCES

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
def test_exact_nested_weights_multiply_as_the_plain_ones():
    cases.check_exact_is_bf16_linear()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("out", "size"), [(1, 32), (200, 96), (130, 512)])
def test_the_exact_reference_is_that_of_the_plain_weight(out, size, dtype, monkeypatch):
    monkeypatch.setattr(products, "_CHUNK", 64 * 96)
    weight, levels = (cases.seeded(out, size) * 0.05).bfloat16(), codebooks.codebook_of("lloyd_max")
    tiles = ops.prepack_nested(*nested.split(weight, levels)[:4])
    x, bias = cases.seeded(7, size, seed=1).to(dtype), cases.seeded(out, seed=2)
    y = REFERENCES["nested_linear"](x, *tiles, levels, out, bias, 16, 16)
    assert torch.equal(y, REFERENCES["bf16_linear"](x, weight, bias))


def test_escapes_are_exact_and_the_draft_has_none():
    """A weight with escapes in a few rows: the exact product has them, the draft its lowest level in their place."""
    weight = (cases.seeded(40, 64) * 0.05).bfloat16()
    weight[[3, 3, 39], [5, 40, 63]] = torch.tensor([1e-30, -1e-25, 2e-39]).bfloat16()
    saved = NestedWeight.from_dense(weight)
    parts = saved.weight_packed, saved.weight_scale, saved.weight_low, saved.weight_high
    operands = *ops.prepack_nested(*parts), saved.weight_codebook, 40
    rows, exact = saved.escape_rows()
    x, bias = torch.eye(64)[:, None] * 2.0**60, cases.seeded(40)
    escapes = {"escape_rows": rows, "escape_weight": exact}
    for with_bias in (None, bias * 1e-30):
        y = ops.nested_linear(x, *operands, with_bias, weight_bits=16, **escapes)
        assert torch.equal(y, ops.bf16_linear(x, weight, with_bias))
        assert y.shape == (64, 1, 40)
    y = ops.nested_linear(x, *operands, weight_bits=16)  # without them: zero there
    assert y[5, 0, 3].item() == 0
    none = {"escape_rows": rows[:0], "escape_weight": exact[:0]}
    assert torch.equal(ops.nested_linear(x, *operands, weight_bits=16, **none), y)
    draft = ops.nested_linear(x, *operands, weight_bits=4, **escapes)
    assert torch.equal(draft[:, 0].T / 2.0**60, saved.dequantize_draft())


@pytest.mark.parametrize(
    ("escapes", "words"),
    [
        ({"escape_rows": torch.tensor([1, 3])}, r"escape_rows has shape \[2\] and escape_weight None, expected"),
        ({"escape_weight": torch.zeros(2, 64).bfloat16()}, r"escape_rows has shape None and escape_weight \[2, 64\]"),
        ({"escape_rows": torch.tensor([1, 3]), "escape_weight": torch.zeros(1, 64).bfloat16()}, r"\[2\] .* \[1, 64\]"),
        ({"escape_rows": torch.tensor([1]), "escape_weight": torch.zeros(1, 32).bfloat16()}, r"\[k\] and \[k, 64\]"),
    ],
)
def test_escapes_that_do_not_fit_are_refused(escapes, words):
    levels = codebooks.codebook_of("lloyd_max")
    tiles = ops.prepack_nested(*nested.split(torch.ones(8, 64).bfloat16(), levels)[:4])
    with pytest.raises(ValueError, match=f"nested_linear: .*{words}"):
        ops.nested_linear(torch.zeros(1, 64), *tiles, levels, 8, weight_bits=16, **escapes)
    with pytest.raises(ValueError, match=f"nested_rows: .*{words}"):
        ops.nested_rows(torch.zeros(1, dtype=torch.int32), *tiles, 8, **escapes)


def test_rows_of_nested_tables_bit_for_bit():
    cases.check_nested_rows()


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
    for dequantize in (ops.int4_dequantize, REFERENCES["int4_dequantize"]):
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
    chunk, products._CHUNK = products._CHUNK, 64 * 64
    try:
        assert len(products.row_slices(200, 64)) == 4
        dense = mxfp4.dequantize(packed, scale, torch.bfloat16)
        y = REFERENCES["mxfp4_linear"](x, *tiles, 200, None, 16)
        assert torch.equal(products.sliced_linear(x, dense), y)
        sliced = REFERENCES["mxfp4_linear"](x, *tiles, 200, None, 8)
        products._CHUNK = chunk
        assert torch.allclose(REFERENCES["mxfp4_linear"](x, *tiles, 200, None, 8), sliced, atol=1e-5)
    finally:
        products._CHUNK = chunk
    assert torch.allclose(y.float(), x.float() @ dense.float().T, atol=0.02)
