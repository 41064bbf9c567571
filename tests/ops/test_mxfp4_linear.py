"""Does mxfp4_linear compute the dequantized product, in every kernel, with bits that depend on its own row only?"""

import os
import subprocess
import sys

import pytest
import torch

from hf_mlspec import ops
from hf_mlspec.formats import mxfp4
from hf_mlspec.ops import library, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ISA_OF_THIS_PROCESS = library.kernel_of("mxfp4_linear", "cpu")
needs_kernel = pytest.mark.skipif(ISA_OF_THIS_PROCESS == "reference", reason="the compiled library is not built")
# Run in a process of its own per instruction set: it is chosen once, at the first call.
ISA_CHECK = """
import sys, torch
sys.path.insert(0, {tests!r})
import test_mxfp4_linear as t
assert t.library.kernel_of("mxfp4_linear", "cpu") == {isa!r}, t.library.kernel_table()
for dtype in t.DTYPES:
    for out, size in t.SHAPES:
        t.check_against_float64(dtype, out, size)
t.check_rows_stand_alone()
t.check_special_blocks()
x, weight = t.operands(torch.bfloat16, 67, 160, rows=5)
print(t.ops.mxfp4_linear(x, *weight).view(torch.int16).tolist())
"""
SHAPES = [(1, 32), (7, 64), (33, 96), (130, 512)]


def operands(dtype, out_features, in_features, rows=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = mxfp4.quantize(torch.randn(out_features, in_features, generator=generator) * 0.05)
    return torch.randn(rows, in_features, generator=generator).to(dtype), weight


def check_against_float64(dtype, out_features, in_features):
    x, weight = operands(dtype, out_features, in_features, rows=10)
    bias = torch.randn(out_features, generator=torch.Generator().manual_seed(9)).to(dtype)
    for b in (None, bias):
        y = ops.mxfp4_linear(x, *weight, b)
        assert y.dtype == dtype
        assert y.shape == (10, out_features)
        dense = mxfp4.dequantize(*weight, torch.float64)
        exact = x.double() @ dense.T + (0 if b is None else b.double())
        magnitude = x.double().abs() @ dense.abs().T + (0 if b is None else b.double().abs())
        # One rounding to the dtype, and float32 sums whose error grows with the length of a lane.
        rounding = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        bound = rounding * exact.abs() + 2.0**-24 * (in_features / 16 + 6) * magnitude + 2.0**-25
        assert ((y.double() - exact).abs() <= bound).all()


def check_rows_stand_alone():
    x, weight = operands(torch.bfloat16, 67, 160, rows=33)
    x32 = torch.randn(33, 160, generator=torch.Generator().manual_seed(5))
    threads = torch.get_num_threads()
    try:
        for rows in (x, x32):
            torch.set_num_threads(1)
            whole = ops.mxfp4_linear(rows, *weight)
            for count in (1, 2):
                torch.set_num_threads(count)
                for n in (*range(1, 17), 33):
                    assert torch.equal(ops.mxfp4_linear(rows[:n], *weight), whole[:n]), (n, count)
                    assert torch.equal(ops.mxfp4_linear(rows[-n:], *weight), whole[-n:]), (n, count)
    finally:
        torch.set_num_threads(threads)


def check_special_blocks():
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 2)
    x = torch.zeros(64, 64)
    x.fill_diagonal_(1.0)
    for code in (0, 1, 100, 127, 200, 250):
        scale = torch.full((16, 2), code, dtype=torch.uint8)
        assert torch.equal(ops.mxfp4_linear(x, packed, scale).T, mxfp4.dequantize(packed, scale))
    scale[3, 1] = 255
    y = ops.mxfp4_linear(x, packed, scale)
    assert y[:, 3].isnan().all()
    assert not y[:, :3].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_against_float64(dtype, out_features, in_features):
    check_against_float64(dtype, out_features, in_features)


@needs_kernel
def test_a_row_does_not_depend_on_the_others():
    check_rows_stand_alone()


def test_special_blocks():
    check_special_blocks()


@needs_kernel
def test_every_instruction_set_and_equal_bits_for_16_bit_rows():
    """Products of 16-bit activations and E2M1 are exact in float32, so fused or not, every set gives the same bits."""
    printed = {}
    for isa in ("generic", "avx2", "avx512"):
        code = ISA_CHECK.format(tests=os.path.dirname(__file__), isa=isa)
        environment = {**os.environ, "MLSPEC_CPU_ISA": isa}
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        if "is not supported by this CPU" in result.stderr or "is unknown" in result.stderr:
            continue
        assert result.returncode == 0, result.stderr
        printed[isa] = result.stdout
    assert "generic" in printed
    assert ISA_OF_THIS_PROCESS in printed
    assert len(set(printed.values())) == 1, printed


@needs_kernel
@pytest.mark.parametrize("isa", ["sse9", "AVX2"])
def test_unknown_instruction_set_is_an_error(isa):
    code = "from hf_mlspec import ops; ops.kernel_table()"
    environment = {**os.environ, "MLSPEC_CPU_ISA": isa}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert f"MLSPEC_CPU_ISA={isa} is unknown, choose one of" in result.stderr


def test_shapes_strides_and_empty_rows():
    x, weight = operands(torch.float32, 40, 64, rows=6)
    y = ops.mxfp4_linear(x, *weight)
    assert torch.equal(ops.mxfp4_linear(x.view(2, 3, 64), *weight), y.view(2, 3, 40))
    assert torch.equal(ops.mxfp4_linear(x[::2], *weight), y[::2])
    assert torch.allclose(ops.mxfp4_linear(x[0], *weight), y[0])
    assert ops.mxfp4_linear(x[:0], *weight).shape == (0, 40)
    strided = (weight[0].T.contiguous().T, weight[1].T.contiguous().T)
    assert torch.equal(ops.mxfp4_linear(x, *strided), y)


@pytest.mark.parametrize("function", [ops.mxfp4_linear, reference.mxfp4_linear])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 96)}, ValueError, r"x has shape \[2, 96\], the weight takes in_features = 64"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x has shape \[\]"),
        ({"x": torch.zeros(2, 64, dtype=torch.float64)}, TypeError, "expected float32, bfloat16 or float16"),
        ({"weight_scale": torch.zeros(8, 3, dtype=torch.uint8)}, ValueError, r"weight_packed \[8, 32\].*\[8, 3\]"),
        ({"weight_scale": torch.zeros(8, 2)}, TypeError, "weight_scale"),
        ({"weight_packed": torch.zeros(256, dtype=torch.uint8)}, ValueError, r"weight_packed \[256\]"),
        ({"bias": torch.zeros(9)}, ValueError, r"bias has shape \[9\], the weight has out_features = 8"),
    ],
)
def test_operands_that_do_not_fit(function, change, error, message):
    good = {
        "x": torch.zeros(2, 64),
        "weight_packed": torch.zeros(8, 32, dtype=torch.uint8),
        "weight_scale": torch.zeros(8, 2, dtype=torch.uint8),
        "bias": None,
    }
    with pytest.raises(error, match=message):
        function(**{**good, **change})


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    x, weight = operands(dtype, 16, 64)
    bias = torch.zeros(16, dtype=dtype)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for operand in ((x, *weight, bias), (x, *weight, None)):
        torch.library.opcheck(torch.ops.mlspec.mxfp4_linear.default, operand, test_utils=checks)


def test_meta_tensors_give_the_shape_only():
    x, weight = operands(torch.bfloat16, 16, 64)
    y = ops.mxfp4_linear(x.to("meta"), *(part.to("meta") for part in weight))
    assert (y.shape, y.dtype, y.device.type) == ((3, 16), torch.bfloat16, "meta")


def test_reference_slices_give_the_same_bits_as_a_materialized_weight():
    x, weight = operands(torch.bfloat16, 200, 64)
    slices, reference._CHUNK = reference._CHUNK, 64 * 64
    try:
        assert len(reference.row_slices(200, 64)) == 4
        dense = mxfp4.dequantize(*weight, torch.bfloat16)
        assert torch.equal(reference.sliced_linear(x, dense), reference.mxfp4_linear(x, *weight))
    finally:
        reference._CHUNK = slices
    assert torch.allclose(reference.mxfp4_linear(x, *weight).float(), x.float() @ dense.float().T, atol=0.02)
