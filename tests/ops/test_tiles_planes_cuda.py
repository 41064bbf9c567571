"""Is a weight of bit-planes in the tiles of a GPU the weight, in the order its kernels read? No GPU is needed."""

import pytest
import torch

from hf_mlspec.ops.planes import tiles_cuda as tiles_planes_cuda

SHAPES = [(1, 1, 32, 32), (3, 7, 96, 32), (8, 128, 128, 128), (5, 200, 192, 64), (2, 300, 352, 32), (4, 0, 64, 64)]


def random_weight(planes: int, out: int, size: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(out)
    packed = torch.randint(0, 256, (planes, out, size // 8), dtype=torch.uint8, generator=draw)
    return packed, torch.randn(out, size // group, generator=draw).half()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpack_is_the_inverse_bit_for_bit(shape):
    planes, scale = random_weight(*shape)
    tiles, scale_tiles = tiles_planes_cuda.pack(planes, scale)
    expected = tiles_planes_cuda.shapes(shape[1], shape[2], shape[0], shape[3])
    assert ([*tiles.shape], [*scale_tiles.shape]) == expected
    assert tiles_planes_cuda.stored_planes(tiles) == shape[0]
    assert tiles_planes_cuda.group_size(tiles) == shape[3]
    assert tiles_planes_cuda.in_features(tiles, scale_tiles, shape[3]) == shape[2]
    for ours, saved in zip(tiles_planes_cuda.unpack(tiles, scale_tiles, shape[1]), (planes, scale), strict=True):
        assert torch.equal(ours, saved)


@pytest.mark.parametrize("shape", SHAPES[1:5], ids=str)
def test_every_bit_and_scale_is_where_the_layout_says(shape):
    count, out, size, group = shape
    planes, scale = random_weight(*shape)
    tiles = tiles_planes_cuda.pack(planes, scale)[0]
    groups = 128 // group
    places = [(0, 0), (out - 1, size - 1), (out // 2, size // 2), (out * 2 // 3, 13), (out // 5, size - 9)]
    for output, place in places:
        w, h, r = output % 64 // 16, output // 8 % 2, output % 8
        f, s, t, q, e = place // 64 % 2, place // 16 % 4, place // 8 % 2, place // 2 % 4, place % 2
        tile = tiles[output // 128, place // 128].view(2, -1)[output // 64 % 2]
        column = place // group
        scales = tile[: 128 * groups].view(torch.float16)
        assert scales[((w * 8 + r) * groups + column % groups) * 2 + h] == scale[output, column]
        for p in range(count):
            words = tile[128 * groups + 1024 * p : 128 * groups + 1024 * (p + 1)].view(torch.int32)
            word = int(words[((w * 8 + r) * 4 + q) * 2 + f])
            assert word >> (16 * e + 8 * t + 4 * h + s - p) % 32 & 1 == planes[p, output, place // 8] >> place % 8 & 1


def test_beyond_the_last_output_and_input_stand_scales_of_zero():
    planes, scale = random_weight(3, 70, 96, 32)
    tiles = tiles_planes_cuda.pack(planes, scale)[0]
    scales = tiles.view(1, 1, 2, -1)[..., :512].contiguous().view(torch.float16)
    assert int((scales != 0).sum()) == int((scale != 0).sum())


def test_what_is_no_weight_is_refused():
    planes, scale = random_weight(3, 70, 96, 32)
    with pytest.raises(TypeError, match=r"weight_planes is torch.int8, expected torch.uint8"):
        tiles_planes_cuda.pack(planes.view(torch.int8), scale)
    with pytest.raises(ValueError, match=r"weight_planes \[3, 70, 12\] and weight_scale \[70, 2\] are not"):
        tiles_planes_cuda.pack(planes, scale[:, :2])
    tiles, scale_tiles = tiles_planes_cuda.pack(planes, scale)
    with pytest.raises(ValueError, match="are not the tiles of 129 outputs"):
        tiles_planes_cuda.unpack(tiles, scale_tiles, 129)
    with pytest.raises(ValueError, match=r"scale_tiles has shape \[3\], expected 3 axes"):
        tiles_planes_cuda.in_features(tiles, scale[0], 32)
