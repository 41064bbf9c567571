"""Does every instruction set of this machine multiply with every prefix of every count of planes?"""

from pathlib import Path

import plane_cases
import pytest
import torch
from instruction_sets import PACKAGE, output_on

from hf_mlspec import ops
from hf_mlspec.ops import library

needs_kernel = pytest.mark.skipif(
    library.kernel_of("bitplane_linear", "cpu") == "reference", reason="the compiled library is not built"
)
CODE = (
    PACKAGE
    + """
import plane_cases
assert library.kernel_of("bitplane_linear", "cpu") == sys.argv[2], library.kernel_table()
plane_cases.check_all()
print("checked")
"""
)


@needs_kernel
@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512vnni", "avx512bf16", "amx"])
def test_every_prefix(isa):
    assert output_on(isa, CODE, Path(__file__).parent) == "checked"


INTEGERS = (
    PACKAGE
    + """
import plane_cases
assert library.kernel_of("bitplane_integers", "cpu") == sys.argv[2], library.kernel_table()
print(plane_cases.check_integers())
"""
)


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    return {}


@needs_kernel
@pytest.mark.parametrize("isa", ["generic", "avx2", "avxvnni", "avxvnniint8", "avx512vnni", "avx512bf16", "amx"])
def test_integers_meet_all_planes_with_the_bits_of_generic_code(isa, digests):
    digests[isa] = output_on(isa, INTEGERS, Path(__file__).parent)
    assert digests[isa] == digests.setdefault("generic", digests[isa])


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit_of_products_with_integers(threads):
    planes, scale = plane_cases.random_planes(5, 300, 256, 128)
    tiles, x = ops.prepack_planes(planes, scale), plane_cases.seeded(520, 256).bfloat16()
    numbers = {"group_size": 128, "activation_group": 64, "activation_bits": 8}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = ops.bitplane_integers(x, *tiles, 300, None, **numbers)
        for row in (0, 15, 31, 511, 512, 519):
            alone = ops.bitplane_integers(x[row : row + 1], *tiles, 300, None, **numbers)
            assert torch.equal(alone, whole[row : row + 1]), row
    finally:
        torch.set_num_threads(before)


def test_a_row_that_is_not_finite_stands_alone_among_integers():
    tiles = ops.prepack_planes(*plane_cases.random_planes(5, 20, 64, 32))
    numbers = {"group_size": 32, "activation_group": 32, "activation_bits": 8}
    x = plane_cases.seeded(3, 64)
    x[1, 40] = torch.inf
    y = ops.bitplane_integers(x, *tiles, 20, None, **numbers)
    assert y[[0, 2]].isfinite().all()
    assert y[1].isnan().all()


def test_no_rows_and_no_outputs_have_no_product_with_integers():
    numbers = {"group_size": 32, "activation_group": 32, "activation_bits": 8}
    for rows, out in ((0, 20), (3, 0)):
        tiles = ops.prepack_planes(*plane_cases.random_planes(5, out, 64, 32))
        assert ops.bitplane_integers(plane_cases.seeded(rows, 64), *tiles, out, None, **numbers).shape == (rows, out)


def test_levels_without_a_kernel_of_ones_choice():
    plane_cases.check_levels()


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_and_passes_change_no_bit(threads):
    """More rows than one pass of the binding, enough outputs for several pieces."""
    out, size = 300, 256
    planes, scale = plane_cases.random_planes(8, out, size, 128)
    tiles = ops.prepack_planes(planes, scale)
    x = plane_cases.seeded(520, size).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for read in (4, 8):
            numbers = {"group_size": 128, "zero_doubled": 256, "num_planes": read}
            whole = ops.bitplane_linear(x, *tiles, out, None, **numbers)
            for row in (0, 15, 31, 511, 512, 519):
                alone = ops.bitplane_linear(x[row : row + 1], *tiles, out, None, **numbers)
                assert torch.equal(alone, whole[row : row + 1]), (read, row)
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_scales_that_are_not_finite_reach_their_output_only():
    planes, scale = plane_cases.random_planes(8, 20, 64, 32)
    scale[3, 1], scale[17, 0] = torch.nan, torch.inf
    for read in (3, 8):
        y = ops.bitplane_linear(
            plane_cases.seeded(5, 64), *ops.prepack_planes(planes, scale), 20, None,
            group_size=32, zero_doubled=255, num_planes=read,
        )  # fmt: skip
        good = [output for output in range(20) if output not in (3, 17)]
        assert y[:, good].isfinite().all()
        assert y[:, 3].isnan().all()
        assert not y[:, 17].isfinite().any()


@needs_kernel
@pytest.mark.parametrize("zero", [0, 100, 253, 257])
def test_levels_that_bfloat16_cannot_hold_are_refused(zero):
    tiles = ops.prepack_planes(*plane_cases.random_planes(8, 8, 64, 32))
    with pytest.raises(ValueError, match=rf"zero_doubled is {zero}, .* bfloat16 holds every level from 254 to 256"):
        ops.bitplane_linear(torch.zeros(1, 64), *tiles, 8, None, group_size=32, zero_doubled=zero, num_planes=8)
