"""Is a nested weight or one of bit-planes in tiles the weight, in the order that the layouts' sentences say?"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mlspec import ops
from hf_mlspec.formats import nested
from hf_mlspec.formats.packing import unpack_nibbles
from hf_mlspec.ops import nested as nested_ops
from hf_mlspec.ops import planes as plane_ops
from hf_mlspec.ops.nested import tiles_cuda as tiles_nested_cuda
from hf_mlspec.ops.planes import tiles_cuda as tiles_planes_cuda

SHAPES = [(1, 32), (16, 64), (35, 96), (130, 160)]


def random_bytes(*shape: int, seed: int = 0, first: int = 0, below: int = 256) -> torch.Tensor:
    return torch.randint(first, below, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def nested_planes(out: int, size: int) -> tuple[torch.Tensor, ...]:
    """packed, scale, low and high of no particular weight."""
    scale = random_bytes(out, size // 32, seed=1, first=31, below=159)
    return random_bytes(out, size // 2), scale, random_bytes(out, size, seed=2), random_bytes(out, size // 2, seed=3)


def assert_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(("out", "size"), SHAPES)
def test_every_field_of_a_nested_weight_is_where_the_cpu_reads_it(out, size):
    planes = nested_planes(out, size)
    draft, exponents, low = ops.prepack_nested(*planes)
    assert_same((draft, exponents), ops.prepack_mxfp4(*planes[:2]))
    fields = nested.fields_of(planes[2], planes[3])
    words = low.view(torch.int16).view(-1, size // 32, 4, 3, 16, 2).int() & 0xFFFF  # [tile, b, j, k, r, h]
    pair_of = {0: 0, 2: 1, 3: 2}
    for output in {0, out // 2, out - 1}:
        for place in range(size):
            b, j, pair, h = place // 32, place // 8 % 4, place // 2 % 4, place % 2
            three = words[output // 16, b, j, :, output % 16, h]
            split = sum(int(word) >> 12 << 4 * k for k, word in enumerate(three))
            assert fields[output, place] == (int(three[pair_of[pair]]) & 0xFFF if pair in pair_of else split)
    missing = -out % 16
    assert not missing or words[-1, :, :, :, 16 - missing :].eq(0).all()


def number_of(output: int, place: int) -> tuple[int, int, int, int, int, int]:
    """w, f, lane, s, h, k of a weight: the sentence of nested/tiles_cuda.py."""
    w, h, r = output % 64 // 16, output // 8 % 2, output % 8
    f, s, t, q, e = place % 128 // 64, place // 16 % 4, place // 8 % 2, place // 2 % 4, place % 2
    return w, f, 4 * r + q, s, h, 2 * e + t


@pytest.mark.parametrize(("out", "size"), [*SHAPES, (300, 352)])
def test_every_bit_of_a_nested_weight_is_where_a_gpu_reads_it(out, size):
    packed, _, low, high = planes = nested_planes(out, size)
    draft, exponents, more = tiles_nested_cuda.pack(*planes)
    assert list(draft.shape) == [-(-out // 128), -(-size // 128), tiles_nested_cuda.DRAFT_BYTES]
    assert list(more.shape) == [*draft.shape[:2], tiles_nested_cuda.LOW_BYTES]
    assert tiles_nested_cuda.is_packed(draft)
    assert not tiles_nested_cuda.is_packed(ops.prepack_nested(*planes)[0])
    assert nested_ops.nested_in_features(draft, exponents) == size
    codes, tops = unpack_nibbles(packed), unpack_nibbles(high)
    for output in {0, out // 2, out - 1}:
        for place in range(0, size, 3):
            tile = output // 128, place // 128
            nibbles, fields = draft[tile].view(2, -1)[output // 64 % 2], more[tile].view(2, -1)[output // 64 % 2]
            w, f, lane, s, h, k = number_of(output, place)
            first = 4 * (((w * 2 + f) * 32 + lane) * 4 + s)
            word = int.from_bytes(bytes(nibbles[first : first + 4].tolist()), "little")
            sign = word >> (8 * k + (3 if h else 7)) & 1
            assert sign << 3 | (word >> 4 * (4 * h + k) & 7) == codes[output, place]
            byte = ((((s // 2 * 4 + w) * 2 + f) * 32 + lane) * 2 + s % 2) * 8 + 4 * h + k
            assert fields[byte] == low[output, place]
            both = fields[8192 + (((w * 2 + f) * 32 + lane) * 4 + s) * 4 + k]
            assert both >> 4 * h & 15 == tops[output, place]
    assert_same(tiles_nested_cuda.unpack(draft, exponents, more, out), planes)
    assert_same(nested_ops.on_cpu_order(draft, exponents, more, out), ops.prepack_nested(*planes))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(0, 1000))
def test_nested_weights_round_trip(out, blocks, seed):
    planes = nested_planes(out, 32 * blocks)
    for pack, unpack in ((ops.prepack_nested, ops.unprepack_nested), (tiles_nested_cuda.pack, ops.unprepack_nested)):
        assert_same(unpack(*pack(*planes), out), planes)


@pytest.mark.parametrize(("out", "size"), SHAPES)
@pytest.mark.parametrize("num_planes", [1, 3, 8])
def test_every_bit_of_a_plane_is_where_the_cpu_reads_it(out, size, num_planes):
    planes, scale = random_bytes(num_planes, out, size // 8), torch.rand(out, size // 32).half()
    tiles, scale_tiles = ops.prepack_planes(planes, scale)
    assert list(tiles.shape) == [num_planes, -(-out // 16), size // 32, 64]
    assert list(scale_tiles.shape) == [-(-out // 16), size // 32, 16]
    words = tiles.view(torch.int32)  # [plane, tile, b, r]
    for output in {0, out // 2, out - 1}:
        for place in range(size):
            at = place % 32 // 2 + place % 2 * 16
            bits = words[:, output // 16, place // 32, output % 16] >> at & 1
            assert torch.equal(bits, planes[:, output, place // 8].int() >> place % 8 & 1)
        assert torch.equal(scale_tiles[output // 16, :, output % 16], scale[output])
    missing = -out % 16
    assert not missing or words[:, -1, :, 16 - missing :].eq(0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 70), st.integers(1, 9), st.integers(0, 1000))
def test_bit_planes_round_trip(num_planes, out, blocks, seed):
    planes = random_bytes(num_planes, out, blocks * 4, seed=seed)
    for group in (32, 64, 128):
        if blocks * 32 % group:
            continue
        scale = torch.rand(out, blocks * 32 // group, generator=torch.Generator().manual_seed(seed)).half()
        for tiles in (ops.prepack_planes(planes, scale), tiles_planes_cuda.pack(planes, scale)):
            assert plane_ops.stored_planes(tiles[0]) == num_planes
            assert_same(ops.unprepack_planes(*tiles, out), (planes, scale))
            assert_same(plane_ops.on_cpu_order(*tiles, out), ops.prepack_planes(planes, scale))


def test_tiles_in_several_chunks(monkeypatch):
    planes, bits, scale = nested_planes(200, 96), random_bytes(3, 200, 12), torch.rand(200, 3).half()
    whole = *ops.prepack_nested(*planes), *ops.prepack_planes(bits, scale)
    monkeypatch.setattr(ops.tiles, "_CHUNK", 2 * 16 * 96)
    assert_same((*ops.prepack_nested(*planes), *ops.prepack_planes(bits, scale)), whole)
    assert_same(ops.unprepack_nested(*whole[:3], 200), planes)
    assert_same(ops.unprepack_planes(*whole[3:], 200), (bits, scale))


def test_tiles_fit_the_device_they_lie_on():
    planes, bits = nested_planes(20, 64), (random_bytes(4, 20, 8), torch.rand(20, 2).half())
    assert nested_ops.nested_fits_device(ops.prepack_nested(*planes)[0])
    assert not nested_ops.nested_fits_device(tiles_nested_cuda.pack(*planes)[0])
    assert plane_ops.planes_fit_device(ops.prepack_planes(*bits)[0])
    assert not plane_ops.planes_fit_device(tiles_planes_cuda.pack(*bits)[0])


def test_what_is_no_weight_is_refused():
    packed, scale, low, high = nested_planes(8, 64)
    with pytest.raises(TypeError, match=r"weight_low is torch\.int8"):
        ops.prepack_nested(packed, scale, low.view(torch.int8), high)
    with pytest.raises(ValueError, match=r"weight_high \[8, 31\] are not"):
        ops.prepack_nested(packed, scale, low, high[:, 1:])
    with pytest.raises(ValueError, match="not the tiles of 17 outputs"):
        ops.unprepack_nested(*ops.prepack_nested(packed, scale, low, high), 17)
    bits, steps = random_bytes(4, 8, 8), torch.rand(8, 2).half()
    with pytest.raises(TypeError, match=r"weight_scale is torch\.float32"):
        ops.prepack_planes(bits, steps.float())
    with pytest.raises(ValueError, match=r"weight_planes \[4, 8, 8\] and weight_scale \[8, 3\]"):
        ops.prepack_planes(bits, torch.rand(8, 3).half())
    with pytest.raises(ValueError, match="not the tiles of 17 outputs"):
        ops.unprepack_planes(*ops.prepack_planes(bits, steps), 17)
