"""Do words of codes along the outputs, or in another order, come out two inputs a byte, every code in its place?"""

import pytest
import torch

from hf_mlspec.checkpoints import transposing
from hf_mlspec.checkpoints.transposing import packed_columns, packed_in_order

NIBBLES = torch.arange(0, 32, 4)
COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # of the nibbles of AWQ's words
SIZES = [(32, 8), (32, 16), (64, 24), (96, 40), (128, 264), (1056, 136), (256, 512)]


def codes_of(out_features, in_features):
    generator = torch.Generator().manual_seed(out_features + in_features)
    return torch.randint(0, 16, (out_features, in_features), generator=generator)


def words_of(codes):
    """int64 ``[..., 8 n]`` -> int32 ``[..., n]``, the first in the lowest bits."""
    return (codes.unflatten(-1, (-1, 8)) << NIBBLES).sum(-1).to(torch.uint32).view(torch.int32)


def packed(codes):
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


@pytest.fixture(params=[None, 1, 1 << 13], ids=["one block", "smallest blocks", "blocks"])
def in_flight(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(transposing, "_IN_FLIGHT", request.param)


@pytest.mark.usefixtures("in_flight")
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_columns(inputs, outputs):
    codes = codes_of(outputs, inputs)
    words = words_of(codes.t().unflatten(-1, (-1, 8))[..., COLUMNS].flatten(-2)).contiguous()
    before = words.clone()
    found = packed_columns(words)
    assert torch.equal(found, packed(codes))
    assert torch.equal(words, before)  # of a file that is mapped
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == found.nbytes


@pytest.mark.usefixtures("in_flight")
@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_another_order(inputs, outputs, missing):
    codes = codes_of(outputs - missing, inputs)
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1))
    words = words_of(codes).t().contiguous()
    before = words.clone()
    found = packed_in_order(words, order)
    assert torch.equal(found, packed(codes[:, order]))
    assert torch.equal(words, before)
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == found.nbytes


def test_words_at_an_odd_place_of_their_storage():
    """As a file may have them: not at a multiple of eight bytes."""
    codes = codes_of(16, 32)
    words = words_of(codes).t().contiguous()
    storage = torch.cat((torch.zeros(1, dtype=torch.int32), words.flatten()))
    found = packed_in_order(storage[1:].view(words.shape), torch.arange(32))
    assert torch.equal(found, packed(codes))
