"""Is a prepacked weight the weight, in the order the kernels read?"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plane_cases import random_planes

from hf_mlspec import ops
from hf_mlspec.formats.packing import unpack_nibbles
from hf_mlspec.ops import mxfp4, tiles
from hf_mlspec.ops.planes import tiles as planes_tiles


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_every_code_is_where_the_layout_says():
    out, size = 35, 96
    packed, scale = random_bytes(out, size // 2), random_bytes(out, size // 32, seed=1)
    codes_in_tiles, scale_tiles = ops.prepack_mxfp4(packed, scale)
    assert (codes_in_tiles.shape, scale_tiles.shape) == ((3, 3, 256), (3, 3, 16))
    codes = unpack_nibbles(packed)
    for o, k in ((0, 0), (34, 95), (17, 36), (15, 31), (16, 32), (7, 60)):
        (t, r), (b, inside) = divmod(o, 16), divmod(k, 32)
        j, rest = divmod(inside, 8)
        byte = int(codes_in_tiles[t, b, 64 * j + 4 * r + rest % 4])
        assert (byte >> 4 if rest >= 4 else byte & 15) == codes[o, k]
        assert scale_tiles[t, b, r] == scale[o, b]
    assert codes_in_tiles[2].view(3, 4, 16, 4)[:, :, 3:].eq(0).all()  # outputs 35 to 47
    assert scale_tiles[2, :, 3:].eq(0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 5), st.integers(0, 1000))
def test_round_trips(out, blocks, seed):
    packed, scale = random_bytes(out, blocks * 16, seed=seed), random_bytes(out, blocks, seed=seed + 1)
    back = ops.unprepack_mxfp4(*ops.prepack_mxfp4(packed, scale), out)
    assert torch.equal(back[0], packed)
    assert torch.equal(back[1], scale)
    for group in (1, 2, 4):  # blocks of 32 that share a scale
        if blocks % group == 0:
            wide = random_bytes(out, blocks // group * 2, seed=seed).view(torch.float16)
            for zero in (None, random_bytes(out, blocks // group, seed=seed + 2) & 15):
                again = ops.unprepack_int4(*ops.prepack_int4(packed, wide, zero), out)
                assert torch.equal(again[0], packed)
                assert torch.equal(again[1].view(torch.int16), wide.view(torch.int16))
                assert again[2] is None if zero is None else torch.equal(again[2], zero)


@pytest.mark.parametrize(("pack", "unpack", "weight", "chunk"), [
    (ops.prepack_mxfp4, ops.unprepack_mxfp4, (random_bytes(200, 48), random_bytes(200, 3)), 2 * 16 * 96),
    (planes_tiles.pack, planes_tiles.unpack, random_planes(2, 200, 96, 32), 3 * 16 * 12),
], ids=["mxfp4", "planes"])
def test_tiles_in_several_chunks(monkeypatch, pack, unpack, weight, chunk):
    whole = pack(*weight)
    monkeypatch.setattr(tiles, "_CHUNK", chunk)
    for cut, uncut in zip(pack(*weight), whole, strict=True):
        assert torch.equal(cut, uncut)
    assert torch.equal(unpack(*whole, 200)[0], weight[0])


def test_what_is_no_weight_is_refused():
    packed, scale = random_bytes(8, 32), random_bytes(8, 2)
    with pytest.raises(TypeError, match=r"weight_packed is torch\.int8"):
        ops.prepack_mxfp4(packed.view(torch.int8), scale)
    with pytest.raises(ValueError, match=r"weight_packed \[8, 32\] and weight_scale \[8, 3\]"):
        ops.prepack_mxfp4(packed, random_bytes(8, 3))
    with pytest.raises(ValueError, match="in a multiple of 32"):
        ops.prepack_int4(random_bytes(8, 20), torch.zeros(8, 1, dtype=torch.float16))
    with pytest.raises(ValueError, match="not the tiles of 17 outputs"):
        ops.unprepack_mxfp4(*ops.prepack_mxfp4(packed, scale), 17)


@pytest.mark.parametrize(("pack", "height"), [(ops.prepack_mxfp4, 16), (mxfp4.pack_cuda, 128)])
def test_weights_in_tiles_together_are_cut_apart(pack, height):
    outputs = [height, 2 * height, 20]
    packed, scale = random_bytes(sum(outputs), 48), random_bytes(sum(outputs), 3, seed=1) & 127
    whole, first = pack(packed, scale), 0
    for views, size in zip(tiles.cut(whole, outputs), outputs, strict=True):
        assert views[0].untyped_storage().data_ptr() == whole[0].untyped_storage().data_ptr()
        back = ops.unprepack_mxfp4(*views, size)
        assert torch.equal(back[0], packed[first : first + size])
        assert torch.equal(back[1], scale[first : first + size])
        first += size
    assert tiles.cut(whole, [height + 8, height, height - 8, 20]) is None
    assert tiles.cut((*whole, None, torch.zeros(1)), outputs)[0][2:] == (None, None)
    bits = ops.prepack_planes(random_bytes(2, 48, 12), torch.ones(48, 3).half())
    assert tiles.cut(bits, [16, 32]) is None
