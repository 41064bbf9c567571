"""Do the kernels of Hadamard matrices give the bits of plain torch, for every order, size, width and dtype?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hadamard_cases import CPU, check_bits, in_torch, rows_of
from instruction_sets import PACKAGE, output_on

from hf_mlspec import ops
from hf_mlspec.formats.hadamard import Hadamard
from hf_mlspec.ops.hadamard import matrix_on
from hf_mlspec.ops.operator import REFERENCES


def test_every_size_has_the_bits_of_plain_torch():
    check_bits()


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512vnni"])  # the sets above each take the kernel below
def test_every_instruction_set_has_the_same_bits(isa):
    code = f"{PACKAGE}\nfrom hadamard_cases import check_bits\ncheck_bits()\nprint('alike')"
    assert output_on(isa, code, Path(__file__).parent).strip() == "alike"


@pytest.mark.parametrize("how", [Hadamard(256), Hadamard(28 * 64, 28), Hadamard(12, 12, 64)], ids=str)
def test_near_float64_and_a_row_by_itself(how):
    x = rows_of(how, 2, 9)
    together, exact = ops.hadamard_rows(x, how), how.rotate(x)
    assert (together - exact).norm() < 1e-6 * exact.norm()
    assert all(torch.equal(ops.hadamard_rows(x[i : i + 1], how), together[i : i + 1]) for i in range(9))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(ops.hadamard_rows(x, how), together)
    finally:
        torch.set_num_threads(threads)


def test_zeros_keep_their_sign_and_no_rows_are_no_rows():
    how = Hadamard(24, 12)
    zeros = torch.zeros(1, 24) * -1
    assert torch.equal(torch.signbit(ops.hadamard_rows(zeros, how)), torch.signbit(in_torch(zeros, how)))
    assert ops.hadamard_rows(torch.empty(0, 24), how).shape == (0, 24)
    x = torch.randn(2, 5)
    assert ops.hadamard_rows(x, Hadamard()) is x


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"x": torch.ones(2, 30)}, ValueError, "x has 30 columns, size 24 times inner 1 does not divide them"),
    ({"x": torch.ones(2, 24).int()}, TypeError, "x is (torch.int32|Int), expected float32, bfloat16 or float16"),
    ({"matrix": torch.ones(12, 11)}, ValueError, r"matrix has shape \[12, 11\], expected \[12, 12\]"),
    ({"matrix": torch.ones(12, 12).double()}, TypeError, "matrix is .*, expected .*"),
    ({"matrix": torch.ones(6, 6)}, ValueError, "matrix has 6 rows, expected a multiple of 4 up to 256"),
    ({"size": 36}, ValueError, "size is 36, expected 12 times a power of two"),
    ({"inner": 0}, ValueError, "inner 0 does not divide them"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("compiled", [True, False])
def test_bad_operands_are_named(change, error, words, compiled):
    operands = {"x": torch.ones(2, 24), "matrix": matrix_on(12, CPU), "size": 24, "inner": 1, **change}
    op = torch.ops.mlspec.hadamard_rows if compiled else REFERENCES["hadamard_rows"]
    with pytest.raises(error, match=words):
        op(*operands.values())
