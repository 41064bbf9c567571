"""Does every instruction set multiply lookup-table planes by their tables, in bits that stand alone?"""

from pathlib import Path

import lut_cases
import pytest
import torch
from instruction_sets import PACKAGE, output_on

from hf_mlspec import ops
from hf_mlspec.ops import library
from hf_mlspec.ops.lut import tiles

needs_kernel = pytest.mark.skipif(
    library.kernel_of("lut_linear", "cpu") == "reference", reason="the compiled library is not built"
)
CODE = (
    PACKAGE
    + """
import lut_cases
assert library.kernel_of("lut_linear", "cpu") == sys.argv[2], library.kernel_table()
lut_cases.check_all()
print("checked")
"""
)


@needs_kernel
@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512vnni", "amx"])
def test_every_width(isa):
    assert output_on(isa, CODE, Path(__file__).parent) == "checked"


@pytest.mark.filterwarnings("ignore:no compiled kernel")
def test_values_without_a_kernel_of_ones_choice():
    lut_cases.check_values()


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_and_passes_change_no_bit(threads):
    """More rows than one pass of the binding, enough outputs for several pieces."""
    weight = lut_cases.random_lut(8, 3, 300, 256)
    held, x = ops.prepack_lut(*weight.parts), lut_cases.seeded(520, 256).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for read in (4, 8):
            whole = ops.lut_linear(x, *held, 300, None, num_planes=read)
            for row in (0, 15, 31, 511, 512, 519):
                alone = ops.lut_linear(x[row : row + 1], *held, 300, None, num_planes=read)
                assert torch.equal(alone, whole[row : row + 1]), (read, row)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("out", "size"), lut_cases.SHAPES)
def test_tiles_lose_nothing_and_lie_as_drawn(out, size):
    weight = lut_cases.random_lut(3, 2, out, size)
    planes, tables = tiles.pack(*weight.parts)
    back = tiles.unpack(planes, tables, out)
    assert all(map(torch.equal, back, weight.parts))
    assert torch.equal(tables.flatten(0, 1)[:out], weight.weight_tables)
    bits = planes.new_zeros(3, out, size)
    for block in range(size // 32):
        step, blocks = block // 4, min(4, size // 32 - block // 4 * 4)
        held = planes.flatten(2)[..., step * 256 : step * 256 + blocks * 64].unflatten(-1, (16, blocks, 4))
        for byte in range(4):
            for bit in range(8):
                element = 32 * block + 8 * (bit % 4) + 4 * (bit // 4) + 2 * (byte % 2) + byte // 2
                bits[..., element] = (held[:, :, :, block % 4, byte] >> bit & 1).flatten(1)[:, :out]
    disk = weight.weight_planes.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    assert torch.equal(bits, disk.flatten(2))


@pytest.mark.filterwarnings("ignore:no compiled kernel")
@pytest.mark.parametrize(("changed", "error", "message"), [
    ({"num_planes": 2}, ValueError, "num_planes is 2, the weight has tables of 3 to 4 bits: choose one of these"),
    ({"num_planes": 5}, ValueError, "num_planes is 5, the weight has tables of 3 to 4 bits: choose one of these"),
    ({"plane_tiles": torch.zeros(4, 2, 2, 32, dtype=torch.uint8)}, ValueError, "plane_tiles has shape"),
    ({"plane_tiles": torch.zeros(4, 2, 2, 64)}, TypeError, "plane_tiles is .*, expected"),
    ({"table_tiles": torch.zeros(2, 16, 23).half()}, ValueError, "table_tiles has shape .* with S from 1 to 4"),
    ({"table_tiles": torch.zeros(2, 16, 24)}, TypeError, "table_tiles is .*, expected"),
    ({"out_features": -1}, ValueError, "out_features is -1, it cannot be negative"),
    ({"x": torch.zeros(1, 96)}, ValueError, "x has shape .*, the weight takes in_features = 64"),
    ({"bias": torch.zeros(3)}, ValueError, "bias has shape"),
])  # fmt: skip
def test_bad_operands_are_named(changed, error, message):
    given = {
        "x": torch.zeros(1, 64), "plane_tiles": torch.zeros(4, 2, 2, 64, dtype=torch.uint8),
        "table_tiles": torch.zeros(2, 16, 24).half(), "out_features": 20, "bias": None, "num_planes": 4,
    }  # fmt: skip
    assert ops.lut_linear(**given).shape == (1, 20)
    with pytest.raises(error, match=f"lut_linear: {message}"):
        ops.lut_linear(**given | changed)
