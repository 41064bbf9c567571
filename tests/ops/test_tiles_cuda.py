"""Is a weight in the tiles of a GPU the weight, in the order its kernels read? A permutation, so no GPU is needed."""

import pytest
import torch

from hf_mlspec.formats.packing import unpack_nibbles
from hf_mlspec.ops import int4 as int4_tiles
from hf_mlspec.ops import mxfp4 as mxfp4_tiles
from hf_mlspec.ops import tiles_cuda

SHAPES = [(1, 32), (128, 128), (200, 160), (129, 384), (300, 352)]


def random_bytes(*shape: int, seed: int = 0, below: int = 256) -> torch.Tensor:
    return torch.randint(0, below, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def half_word(tiles: torch.Tensor, output: int, place: int) -> tuple[int, int]:
    """The half word that holds a code, and its register: the sentence of tiles_cuda.py, number by number."""
    pair, m, inside = output // 128, output // 64 % 2, output % 64
    w, h, r = inside // 16, inside // 8 % 2, inside % 8
    chunk, f, s, t, q, e = place // 128, place // 64 % 2, place // 16 % 4, place // 8 % 2, place // 2 % 4, place % 2
    word = ((w * 2 + f) * 32 + 4 * r + q) * 4 + s
    tile = tiles[pair, chunk].view(2, -1)[m]
    low, high = tile[4 * word + 2 * e : 4 * word + 2 * e + 2].tolist()
    return low | high << 8, h + 2 * t


def scale_place(output: int, column: int, groups: int) -> tuple[int, int, int, int]:
    """pair, chunk, tile of the pair, and the number of the scale in the tile of int4."""
    w, h, r = output % 64 // 16, output // 8 % 2, output % 8
    return output // 128, column // groups, output // 64 % 2, ((w * 8 + r) * groups + column % groups) * 2 + h


@pytest.mark.parametrize(("out", "size"), SHAPES)
def test_every_mxfp4_code_and_scale_is_where_the_layout_says(out, size):
    packed, scale = random_bytes(out, size // 2), random_bytes(out, size // 32, seed=1, below=255)
    tiles, scale_tiles = mxfp4_tiles.pack_cuda(packed, scale)
    assert list(tiles.shape) == [-(-out // 128), -(-size // 128), tiles_cuda.pair_bytes(32, mxfp4=True)]
    assert list(scale_tiles.shape) == [1, size // 32, 4]
    shift = max(0, int(scale.max()) - 128)
    assert set(scale_tiles.view(torch.int32).flatten().tolist()) == {shift}
    codes, signs, others = unpack_nibbles(packed), (15, 12, 13, 14), (6, 3, 0, 9)
    for output in {0, out // 2, out - 1}:
        for place in range(size):
            half, register = half_word(tiles, output, place)
            code = (half >> signs[register] & 1) << 3 | (half >> others[register] & 7)
            assert code == codes[output, place]
        for block in range(size // 32):
            w, h, r = output % 64 // 16, output // 8 % 2, output % 8
            byte = (w * 8 + r) * 8 + block % 4 // 2 * 4 + h * 2 + block % 2
            stored = tiles[output // 128, block // 4].view(2, -1)[output // 64 % 2, 4096 + byte]
            assert int(stored) == int(scale[output, block]) + 126 - shift
    back = mxfp4_tiles.unpack_cuda(tiles, scale_tiles, out)
    assert torch.equal(back[0], packed)
    assert torch.equal(back[1], scale)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("out", "size", "group_size"),
                         [(*shape, group) for shape in SHAPES for group in (32, 64, 128) if shape[1] % group == 0])
def test_every_int4_code_scale_and_zero_is_where_the_layout_says(out, size, group_size, zeros):
    packed, groups = random_bytes(out, size // 2), 128 // group_size
    scale = torch.randn(out, size // group_size, generator=torch.Generator().manual_seed(2)).half()
    zero = random_bytes(*scale.shape, seed=3, below=16) if zeros else None
    tiles, scale_tiles, zero_tiles = int4_tiles.pack_cuda(packed, scale, zero)
    assert list(tiles.shape) == [-(-out // 128), -(-size // 128), tiles_cuda.pair_bytes(group_size, zeros)]
    assert list(scale_tiles.shape) == [0, size // group_size, 16]
    assert int4_tiles.int4_group_size(tiles, scale_tiles, zero_tiles) == group_size
    codes = unpack_nibbles(packed)
    for output in {0, out // 2, out - 1}:
        for place in range(size):
            half, register = half_word(tiles, output, place)
            assert half >> 4 * register & 15 == int(codes[output, place]) ^ 8
        for column in range(size // group_size):
            pair, chunk, m, number = scale_place(output, column, groups)
            behind = tiles[pair, chunk].view(2, -1)[m, 4096:]
            assert behind[: 128 * groups].view(torch.float16)[number] == scale[output, column]
            if zero is not None:
                assert behind[128 * groups + number] == zero[output, column]
    back = int4_tiles.unpack_cuda(tiles, scale_tiles, zero_tiles, out)
    assert torch.equal(back[0], packed)
    assert torch.equal(back[1], scale)
    assert back[2] is None if zero is None else torch.equal(back[2], zero)


def test_what_is_beyond_a_weight_is_worth_nothing():
    """Codes of 0 (with zero points), 8 ^ 8 (without): (code - zero) * scale = 0; the scales are 0, too."""
    packed, scale = random_bytes(70, 16), torch.ones(70, 1).half()
    for zero in (None, random_bytes(70, 1, below=16)):
        tiles, _, zero_tiles = int4_tiles.pack_cuda(packed, scale, zero)
        codes, scales, zeros = int4_tiles.unpack_cuda(tiles, scale.new_empty(0, 4, 16), zero_tiles, 128)
        worth = unpack_nibbles(codes).int() - (8 if zeros is None else zeros.int().repeat_interleave(32, 1))
        assert worth[70:].eq(0).all()
        assert worth[:, 32:].eq(0).all()
        assert scales[70:].eq(0).all()
        assert scales[:, 1:].eq(0).all()


def test_pairs_of_tiles_are_weights_too():
    """Layers that are multiplied as one share tiles: each holds its part."""
    packed, scale = random_bytes(384, 64), random_bytes(384, 4, seed=1, below=140)
    tiles, scale_tiles = mxfp4_tiles.pack_cuda(packed, scale)
    part = mxfp4_tiles.unpack_cuda(tiles[1:], scale_tiles, 200)
    assert torch.equal(part[0], packed[128:328])
    assert torch.equal(part[1], scale[128:328])


def test_nan_scales_are_refused():
    scale = torch.full((4, 2), 127, dtype=torch.uint8)
    scale[1, 1] = 255
    with pytest.raises(ValueError, match=r"1 of 8 scales are NaN \(255\)"):
        mxfp4_tiles.pack_cuda(random_bytes(4, 32), scale)
