"""Does every instruction set add sparse high parts, in bits that stand alone, and is what does not fit named?"""

from pathlib import Path

import pytest
import torch
import zipper_cases
from instruction_sets import PACKAGE, output_on
from zipper_operands import BAD_OPERANDS, bad_operands

from hf_mlspec import ops
from hf_mlspec.formats import zipper
from hf_mlspec.formats.zipper import MODES
from hf_mlspec.ops import library
from hf_mlspec.ops.operator import REFERENCES
from hf_mlspec.ops.zipper import dense_high, words_begin, zipper_fit_device

needs_kernel = pytest.mark.skipif(
    library.kernel_of("zipper_high_linear", "cpu") == "reference", reason="the compiled library is not built"
)
CODE = (
    PACKAGE
    + """
import zipper_cases
assert library.kernel_of("zipper_high_linear", "cpu") == sys.argv[2], library.kernel_table()
print(zipper_cases.check_all())
"""
)


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    return {}


@needs_kernel
@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512vnni", "amx"])
def test_every_split(isa, digests):
    digests[isa] = output_on(isa, CODE, Path(__file__).parent)
    assert digests[isa] == digests.setdefault("generic", digests[isa]), "high parts differ from generic's"


@pytest.mark.filterwarnings("ignore:no compiled kernel")
def test_values_without_a_kernel_of_ones_choice():
    zipper_cases.check_all()


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_and_passes_change_no_bit(threads):
    weight = zipper_cases.weight_of(300, 256, mode="clamp")
    tiles, x = ops.prepack_zipper(*weight.parts), zipper_cases.seeded(75, 256)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = ops.zipper_linear(x, tiles, 300, how=weight.how)
        for row in (0, 7, 8, 71, 72, 74):
            assert torch.equal(ops.zipper_linear(x[row : row + 1], tiles, 300, how=weight.how), whole[row : row + 1])
    finally:
        torch.set_num_threads(before)


def test_a_row_of_the_reference_stands_alone():
    weight = zipper_cases.weight_of(300, 8192)  # more than a slice of outputs
    split, x, low = ops.prepack_zipper(*weight.parts).split, zipper_cases.seeded(3, 8192), torch.zeros(3, 300)
    whole = REFERENCES["zipper_high_linear"](x, low, split, None)
    assert torch.equal(REFERENCES["zipper_high_linear"](x[1:2], low[1:2], split, None), whole[1:2])


@pytest.mark.parametrize(("out", "size"), zipper_cases.SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_tiles_lose_nothing(mode, out, size):
    weight = zipper_cases.weight_of(out, size, mode=mode, high_part="host")
    tiles = ops.prepack_zipper(*weight.parts)
    again = ops.unprepack_zipper(*tiles, out)
    assert all(torch.equal(own, other) for own, other in zip(again, weight.parts, strict=True))
    high = zipper.split(weight.codes(), weight.how)[1]
    assert len(tiles.split) == words_begin(out, size) + len(zipper.to_slots(high).words)
    assert torch.equal(dense_high(tiles.split, out, size), high)
    packed = zipper.of_packed(zipper.to_packed(high), out, size)
    assert torch.equal(zipper.to_dense(packed, out, size), high)


@pytest.mark.parametrize(
    ("options", "axes"),
    [({"mode": "paper"}, 3), ({"low_bits": 3}, 3), ({}, 4), ({"bits": 5, "low_bits": 2}, 4)],
)
def test_low_parts_of_4_bits_are_int4_codes_and_others_planes(options, axes):
    weight = zipper_cases.weight_of(40, 96, **options)
    tiles = ops.prepack_zipper(*weight.parts)
    assert tiles.planes.ndim == axes
    assert weight.how.low_is_int4 == (axes == 3)
    assert zipper_fit_device(tiles.planes)
    assert not zipper_fit_device(tiles.planes.new_empty(1, 1, 4096, dtype=torch.uint8))  # a GPU's
    x = zipper_cases.seeded(3, 96)
    sums = ops.zipper_low_sums(x.bfloat16(), *tiles[:2], 40, how=weight.how)
    assert sums.dtype == torch.float32
    assert torch.equal(sums, ops.zipper_low_linear(x, *tiles[:2], 40, how=weight.how))


@pytest.mark.parametrize("run", ["kernel", "reference"])
@pytest.mark.parametrize(("change", "error", "message"), BAD_OPERANDS)
def test_operands_that_do_not_fit_are_named(run, change, error, message):
    if run == "kernel" and library.kernel_of("zipper_high_linear", "cpu") == "reference":
        pytest.skip("the compiled library is not built")
    split = ops.prepack_zipper(*zipper_cases.weight_of(8, 64).parts).split
    call = torch.ops.mlspec.zipper_high_linear if run == "kernel" else REFERENCES["zipper_high_linear"]
    with pytest.raises(error, match=f"zipper_high_linear: {message}"):
        call(*bad_operands(split, change))


def test_shapes_without_computing():
    split = ops.prepack_zipper(*zipper_cases.weight_of(8, 64).parts).split
    given = (torch.zeros(2, 3, 64).bfloat16(), torch.zeros(2, 3, 8), split, torch.zeros(8))
    torch.library.opcheck(torch.ops.mlspec.zipper_high_linear, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("run", ["kernel", "reference"])
@pytest.mark.parametrize(("out", "size"), [(50, 128), (83, 160)])
def test_sums_go_where_the_caller_wants_them_in_the_same_bits(run, out, size):
    split, x = ops.prepack_zipper(*zipper_cases.weight_of(out, size).parts).split, zipper_cases.seeded(14, size)
    write = ops.zipper_high_sums if run == "kernel" else REFERENCES["zipper_high_sums"]
    add = ops.zipper_high_linear if run == "kernel" else lambda *given: REFERENCES["zipper_high_linear"](*given, None)
    room = torch.full((14, out + 9), float("nan"))  # a row's sums stand between others'
    for rows in (1, 2, 3, 5, 6, 7, 8, 13, 14):
        room.fill_(float("nan"))
        write(x[:rows].bfloat16(), split, room[:rows, 4 : 4 + out])
        assert torch.equal(room[:rows, 4 : 4 + out], add(x[:rows], torch.zeros(rows, out), split))
        assert room[rows:].isnan().all()
        assert room[:, [0, 3, 4 + out, 8 + out]].isnan().all()
    write(x[:0].bfloat16(), split, room[:0, :out])


WRONG_SUMS = [
    ({"x": torch.zeros(2, 64)}, TypeError, "x is .*, expected"),
    ({"x": torch.zeros(2, 1, 64).bfloat16()}, ValueError, r"x has shape \[2, 1, 64\], expected \[n, in\]"),
    ({"x": torch.zeros(2, 62).bfloat16()}, ValueError, r"x has shape \[2, 62\], a high part has multiples of 32"),
    ({"x": torch.zeros(64, 2).bfloat16().T}, ValueError, "x of shape .* is not contiguous"),
    ({"sums": torch.zeros(3, 8)}, ValueError, r"sums has shape \[3, 8\], expected \[2, out\]"),
    ({"sums": torch.zeros(2, 8).half()}, TypeError, "sums is"),
    ({"sums": torch.zeros(8, 2).T}, ValueError, "sums of shape .* has strides .*, the last must be 1"),
    ({"high": torch.zeros(9, dtype=torch.int32)}, ValueError, r"high has shape \[9\], expected"),
]


@pytest.mark.parametrize("run", ["kernel", "reference"])
@pytest.mark.parametrize(("change", "error", "message"), WRONG_SUMS)
def test_sums_that_do_not_fit_are_named(run, change, error, message):
    split = ops.prepack_zipper(*zipper_cases.weight_of(8, 64).parts).split
    given = {"x": torch.zeros(2, 64).bfloat16(), "high": split, "sums": torch.zeros(2, 8)} | change
    call = torch.ops.mlspec.zipper_high_sums if run == "kernel" else REFERENCES["zipper_high_sums"]
    with pytest.raises(error, match=f"zipper_high_sums: {message}"):
        call(*given.values())


def test_joined_weights_are_each_by_itself():
    splits = [ops.prepack_zipper(*zipper_cases.weight_of(out, 64).parts).split for out in (32, 16, 5)]
    x, low, bias = zipper_cases.seeded(3, 64), zipper_cases.seeded(3, 53, seed=1), zipper_cases.seeded(53, seed=2)
    begins, high = [0, len(splits[0]), len(splits[0]) + len(splits[1])], torch.cat(splits)
    joined = ops.zipper_high_joined(x, low, high, bias, outputs=[32, 16, 5], begins=begins)
    cuts = zip(low.split([32, 16, 5], -1), splits, bias.split([32, 16, 5]), strict=True)
    apart = [ops.zipper_high_linear(x, own.contiguous(), split, own_bias) for own, split, own_bias in cuts]
    assert torch.equal(joined, torch.cat(apart, -1))
    wrong = ([32, 16, 6], begins, "outputs are"), ([53], [len(splits[0]) - 40], "high has shape")
    for outputs, first, message in wrong:
        with pytest.raises(ValueError, match=f"zipper_high_joined: {message}"):
            ops.zipper_high_joined(x, low, splits[0], bias, outputs=outputs, begins=first)
