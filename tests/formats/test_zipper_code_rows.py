"""Do rows of codes lose nothing, and take the bits that they are said to take?"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.zipper import MODES, CodeRows, Split, codes_of, of_rows, to_rows
from hf_mlspec.formats.zipper import rows as rows_of_codes


def _weight(rows, width, mode="exact", bits=6, low_bits=4, seed=0):
    drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return ZipperWeight.from_dense(drawn, bits=bits, low_bits=low_bits, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("bits", "low_bits"), [(6, 4), (8, 4), (8, 6), (5, 3), (4, 2)])
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (7, 96), (40, 160), (5, 1024)])
def test_rows_are_the_codes(mode, bits, low_bits, rows, width):
    weight = _weight(rows, width, mode, bits, low_bits)
    found = to_rows(weight.weight_planes, Split(bits, low_bits, mode))
    assert torch.equal(of_rows(found), weight.weight_planes)
    assert found.bits == bits
    ids = torch.randint(0, rows, (9,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(codes_of(found, ids), weight.codes()[ids])
    assert codes_of(found, ids[:0]).shape == (0, width)


@pytest.mark.parametrize("chunk", [1, 3000, 9999])
def test_rows_are_alike_however_many_are_read_at_once(monkeypatch, chunk):
    weight = _weight(40, 1024)
    whole = to_rows(weight.weight_planes, Split())
    monkeypatch.setattr(rows_of_codes, "_CHUNK", chunk)
    found = to_rows(weight.weight_planes, Split())
    assert len(found.places) > 41
    assert torch.equal(found.places, whole.places)
    assert torch.equal(of_rows(found), weight.weight_planes)


class _Largest(TorchDispatchMode):
    """How many elements the largest tensor of int64 has."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        wide = [one.numel() for one in tree_leaves(made) if isinstance(one, torch.Tensor) and one.dtype == torch.int64]
        self.most = max([self.most, *wide])
        return made


def test_places_of_a_few_rows_are_held_at_once(monkeypatch):
    monkeypatch.setattr(rows_of_codes, "_CHUNK", 4 * 1024)
    weight = _weight(64, 1024)
    with _Largest() as seen:
        found = to_rows(weight.weight_planes, Split())
        again = of_rows(found)
    assert torch.equal(again, weight.weight_planes)
    places = 4 * (len(found.places) - 65) - 64 * 8
    assert 0 < seen.most < places / 4  # of four rows of 64, each a row and a column


def test_extreme_codes_and_rows_without_places():
    codes = torch.zeros(3, 256)
    codes[0, :8] = torch.tensor([31, -31, 16, 15, -16, -17, 0, -1.0])
    codes[2] = 1.0  # of equal magnitude: all of them have a place
    codes[1, 255] = -3.0
    weight = ZipperWeight.from_dense(codes)
    found = to_rows(weight.weight_planes, Split())
    assert torch.equal(of_rows(found), weight.weight_planes)
    assert torch.equal(codes_of(found, torch.tensor([2, 0, 1])), weight.codes()[[2, 0, 1]])


def test_rows_of_equal_magnitudes_keep_their_plane():
    weight = ZipperWeight.from_dense(torch.ones(4, 256))
    found = to_rows(weight.weight_planes, Split())
    assert len(found.places) == 0
    assert found.planes.shape == (4, 6, 32)
    assert torch.equal(of_rows(found), weight.weight_planes)


@pytest.mark.parametrize(("mode", "most"), [("exact", 5.5), ("clamp", 5.5), ("paper", 4.5)])
def test_bits_of_normal_rows(mode, most):
    weight = _weight(64, 4096, mode)
    found = to_rows(weight.weight_planes, Split(mode=mode))
    taken = 8 * (found.planes.nbytes + found.places.nbytes + weight.weight_scale.nbytes) / (64 * 4096)
    assert most - 0.1 < taken < most


def test_bits_add_up():
    assert CodeRows(torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(9, dtype=torch.int32), 1).bits == 6
