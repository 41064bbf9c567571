"""Are lookup-table planes in the tiles of a GPU the weight, in the order its kernels read? No GPU is needed."""

import lut_cases
import pytest
import torch

from hf_mlspec.formats import LutWeight
from hf_mlspec.formats.lut import table_columns
from hf_mlspec.ops.lut import tiles, tiles_cuda
from hf_mlspec.ops.tiles import cut

# stored, smallest table, out, in
SHAPES = [(1, 1, 1, 32), (3, 2, 7, 96), (8, 1, 128, 128), (5, 5, 200, 192), (4, 3, 300, 352), (2, 2, 0, 64)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpack_is_the_inverse_bit_for_bit(shape):
    stored, least, out, size = shape
    weight = lut_cases.random_lut(*shape)
    held = tiles_cuda.pack(*weight.parts)
    assert tuple([*part.shape] for part in held) == tiles_cuda.shapes(out, size, stored, table_columns(stored, least))
    assert tiles_cuda.is_packed(held[0])
    assert not tiles_cuda.is_packed(tiles.pack(*weight.parts)[0])
    assert tiles_cuda.stored_planes(held[0]) == stored
    assert tiles_cuda.in_features(held[0]) == size
    for ours, saved in zip(tiles_cuda.unpack(*held, out), weight.parts, strict=True):
        assert torch.equal(ours, saved)


def code_at(tile: torch.Tensor, planes: int, output: int, place: int) -> int:
    """Of one weight, as tiles_cuda.py draws the bits of a tile."""
    w, h, r = output % 64 // 16, output // 8 % 2, output % 8
    f, s, t, q, e = place // 64 % 2, place // 16 % 4, place // 8 % 2, place // 2 % 4, place % 2
    code = 0
    for p in range(planes):
        word = int(tile[1024 * p : 1024 * (p + 1)].view(torch.int32)[((w * 8 + r) * 4 + q) * 2 + f])
        code = code << 1 | word >> (16 * h + 8 * t + 4 * e + s - p) % 32 & 1
    return code


@pytest.mark.parametrize("shape", SHAPES[1:5], ids=str)
def test_every_code_and_table_is_where_the_layout_says(shape):
    stored, least, out, size = shape
    weight = lut_cases.random_lut(*shape)
    plane_tiles, table_tiles = tiles_cuda.pack(*weight.parts)
    assert torch.equal(table_tiles.flatten(0, 1)[:out], weight.weight_tables)
    assert table_tiles.flatten(0, 1)[out:].eq(0).all()
    places = [(0, 0), (out - 1, size - 1), (out // 2, size // 2), (out * 2 // 3, 13), (out // 5, size - 9)]
    for output, place in places:
        tile = plane_tiles[output // 128, place // 128].view(2, -1)[output // 64 % 2]
        for read in range(least, stored + 1):
            value = weight.table(read)[output, code_at(tile, read, output, place)]
            assert value == weight.dequantize(torch.float16, read)[output, place]


def test_beyond_the_last_output_and_input_stand_codes_of_zero():
    planes = torch.full((3, 70, 12), 255, dtype=torch.uint8)
    held = tiles_cuda.pack(planes, torch.ones(70, table_columns(3, 3)).half())[0]
    assert held.shape == (1, 1, 3 * 2048 + 32)  # one block is lacking
    bits = sum((held >> bit & 1).sum() for bit in range(8))
    assert bits == 3 * 70 * 96


def test_weights_that_are_in_tiles_together_are_views_of_them():
    weight = lut_cases.random_lut(5, 2, 300, 160)
    shares = cut(tiles_cuda.pack(*weight.parts), [128, 128, 44])
    for first, held in zip((0, 128, 256), shares, strict=True):
        last = min(first + 128, 300)
        planes, tables = tiles_cuda.unpack(*held, last - first)
        assert torch.equal(planes, weight.weight_planes[:, first:last])
        assert torch.equal(tables, weight.weight_tables[first:last])
    assert cut(tiles_cuda.pack(*weight.parts), [100, 200]) is None


def test_what_is_no_weight_is_refused():
    weight = lut_cases.random_lut(3, 2, 70, 96)
    with pytest.raises(TypeError, match=r"weight_planes is torch.int8, expected torch.uint8"):
        tiles_cuda.pack(weight.weight_planes.view(torch.int8), weight.weight_tables)
    with pytest.raises(ValueError, match=r"weight_planes \[3, 70, 12\] and weight_tables \[70, 11\] are not"):
        tiles_cuda.pack(weight.weight_planes, weight.weight_tables[:, 1:])
    held = tiles_cuda.pack(*weight.parts)
    short = held[0][..., :-1].contiguous()
    for planes, tables, out in ((*held, 129), (short, held[1], 70), (held[0], held[1][0], 70)):
        with pytest.raises(ValueError, match=f"are not the tiles of {out} outputs"):
            tiles_cuda.unpack(planes, tables, out)


@pytest.mark.parametrize("read", range(1, 9))
def test_codes_stand_side_by_side_when_planes_are_put_together(read):
    """What the kernels rely on: of plane p, the bits that a word of codes takes are those (place - p) mod 32, so
    that a rotation brings every code of a step to a nibble (up to four planes) or byte of its own."""
    weight: LutWeight = lut_cases.random_lut(8, 1, 64, 128)
    words = tiles_cuda.pack(*weight.parts)[0].view(2, -1)[0].view(8, 1024)[:read].contiguous().view(torch.int32)
    words = (words.long() & 0xFFFFFFFF).view(read, 4, 8, 4, 2)  # [plane, w, r, q, f]
    fields = 4 if read <= 4 else 8
    numbers = weight.weight_planes[:read].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    codes = sum(plane.long() << read - 1 - p for p, plane in enumerate(numbers.flatten(-2)))
    codes = codes.view(4, 2, 8, 2, 4, 2, 4, 2)  # [w, h, r, f, s, t, q, e]
    for step in range(4):
        for c in range(step, fields, 4):
            mask = sum(1 << place for place in range(32) if place % fields == c)
            word = 0
            for p in range(read):
                own = (mask >> p | mask << 32 - p) & 0xFFFFFFFF
                word = word | words[p] & own
            turn = (read - 1 - c) % 32
            word = (word << turn | word >> 32 - turn) & 0xFFFFFFFF
            for n in range(c // 4, 8, fields // 4):
                h, t, e = n // 4, n // 2 % 2, n % 2
                code = word >> n // (fields // 4) * fields & 2**read - 1
                assert torch.equal(code, codes[:, h, :, :, step, t, :, e].permute(0, 1, 3, 2)), (step, n)
