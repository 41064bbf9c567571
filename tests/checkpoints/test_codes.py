"""Do codes come out of words as they went in, and is an order of inputs checked?"""

import numpy as np
import pytest
import torch

from hf_mlspec.checkpoints.codes import (
    as_bytes,
    gathered_nibbles,
    order_of_groups,
    pack_words,
    require_order,
    unpack_words,
)
from hf_mlspec.formats.packing import pack_nibbles
from tests.foreign_checkpoints import bit_stream


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [8, 32, 33, 40, 96])
def test_words_are_a_stream_of_bits(bits, count):
    codes = torch.randint(0, 1 << bits, (3, count), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    words = pack_words(codes, bits)
    assert torch.equal(words, bit_stream(codes.numpy().astype(np.int64), bits))
    assert torch.equal(unpack_words(words, bits, count), codes)


def test_rows_are_unpacked_in_parts(monkeypatch):
    codes = torch.randint(0, 8, (7, 64), dtype=torch.uint8)
    monkeypatch.setattr("hf_mlspec.checkpoints.codes.ROWS", 100)
    assert torch.equal(unpack_words(pack_words(codes, 3), 3, 64), codes)


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (4, 6)])
def test_bytes_of_a_transposed_tensor(shape):
    words = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape)
    expected = torch.stack([words.t() >> shift & 255 for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)
    assert torch.equal(as_bytes(words.t()), expected.to(torch.uint8))


def test_columns_are_gathered_in_parts(monkeypatch):
    codes = torch.randint(0, 16, (5, 12), dtype=torch.uint8)
    order = torch.randperm(12)
    monkeypatch.setattr("hf_mlspec.checkpoints.codes.ROWS", 24)
    assert torch.equal(gathered_nibbles(pack_nibbles(codes), order), pack_nibbles(codes[:, order]))


def test_order_of_groups():
    assert order_of_groups(torch.tensor([0, 0, 1, 1]), 2, "g_idx") is None
    assert order_of_groups(torch.tensor([1, 0, 1, 0]), 2, "g_idx").tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([0, 0, 0, 1], "group 0 has 3 inputs"),
        ([0, 0, 1, 2], "names groups 0 to 2, there are 2 of 2"),
        ([-1, 0, 1, 1], "names groups -1 to 1"),
    ],
)
def test_groups_that_are_none(groups, said):
    with pytest.raises(ValueError, match=f"g_idx .*{said}"):
        order_of_groups(torch.tensor(groups), 2, "g_idx")


@pytest.mark.parametrize(
    ("order", "said"),
    [([0, 1, 1, 3], "4 inputs: 2 entries"), ([0, 1, 2, 4], "1 entries"), ([0, -1, 2, 3], "1 entries are none"),
     ([0, 1, 2], r"shape \[3\], expected")],
)
def test_orders_that_are_none(order, said):
    with pytest.raises(ValueError, match=said):
        require_order(torch.tensor(order), 4, "order")
