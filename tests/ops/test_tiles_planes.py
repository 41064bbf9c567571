"""Is a prepacked weight of bit-planes the weight, in the order the CPU's kernels read?"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mlspec.ops.planes import tiles as tiles_planes


def random_weight(planes: int, out: int, size: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(out)
    packed = torch.randint(0, 256, (planes, out, size // 8), dtype=torch.uint8, generator=draw)
    return packed, torch.randn(out, size // group, generator=draw).half()


@pytest.mark.parametrize(("count", "out", "size"), [(8, 35, 96), (1, 16, 32), (3, 5, 64)])
def test_every_bit_is_where_the_layout_says(count, out, size):
    planes, scale = random_weight(count, out, size, 32)
    tiles, scale_tiles = tiles_planes.pack(planes, scale)
    tile_count = -(-out // 16)
    assert (tiles.shape, scale_tiles.shape) == ((count, tile_count, size // 32, 64), (tile_count, size // 32, 16))
    seen = torch.zeros(count, tile_count * 16, size, dtype=torch.uint8)
    for element in range(size):
        block, bit = element // 32, element % 32 // 2 + 16 * (element % 2)
        words = tiles[:, :, block].unflatten(-1, (16, 4))
        seen[:, :, element] = (words[..., bit // 8] >> bit % 8 & 1).flatten(1)
    bits = (planes.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    assert torch.equal(seen[:, :out], bits)
    assert seen[:, out:].eq(0).all()
    assert torch.equal(scale_tiles.transpose(1, 2).flatten(0, 1)[:out], scale)
    assert scale_tiles.transpose(1, 2).flatten(0, 1)[out:].eq(0).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(0, 50), st.integers(1, 3), st.sampled_from([32, 64, 128]))
def test_unpack_is_the_inverse_bit_for_bit(count, out, groups, group):
    planes, scale = random_weight(count, out, groups * group, group)
    back = tiles_planes.unpack(*tiles_planes.pack(planes, scale), out)
    assert torch.equal(back[0], planes)
    assert torch.equal(back[1].view(torch.int16), scale.view(torch.int16))


def test_what_is_no_weight_is_refused():
    planes, scale = random_weight(3, 8, 64, 32)
    with pytest.raises(TypeError, match=r"weight_planes is torch\.int8, expected torch\.uint8"):
        tiles_planes.pack(planes.view(torch.int8), scale)
    with pytest.raises(TypeError, match=r"weight_scale is torch\.float32"):
        tiles_planes.pack(planes, scale.float())
    for bad_planes, bad_scale in (
        (planes, scale[:, :0]),  # no group size
        (planes, scale[:7]),
        (planes[..., :6], scale),  # in = 48
        (planes[:0], scale),
        (planes[0], scale),
        (planes.repeat(3, 1, 1), scale),  # nine planes
    ):
        with pytest.raises(ValueError, match=r"weight_planes \[.*\] and weight_scale \[.*\] are not \[1 to 8, out"):
            tiles_planes.pack(bad_planes, bad_scale)
    tiles = tiles_planes.pack(planes, scale)
    for bad in ((tiles[0], tiles[1], 17), (tiles[0][0], tiles[1], 8), (tiles[0][..., :32], tiles[1], 8)):
        with pytest.raises(ValueError, match=f"not the tiles of {bad[2]} outputs"):
            tiles_planes.unpack(*bad)
