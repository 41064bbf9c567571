"""Do nibbles come back from the bytes they share, low nibble first?"""

import pytest
import torch

from hf_mlspec.formats.packing import pack_nibbles, unpack_nibbles


def test_low_nibble_comes_first():
    codes = torch.tensor([1, 2, 3, 10], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [0x21, 0xA3]


def test_every_byte_round_trips():
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    codes = unpack_nibbles(packed)
    assert codes.shape == (4, 128)
    assert codes[0, :4].tolist() == [0, 0, 1, 0]
    assert torch.equal(pack_nibbles(codes), packed)


def test_non_contiguous_codes():
    codes = torch.arange(16, dtype=torch.uint8).view(2, 8).repeat(2, 2)[:, ::2]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_odd_length_is_refused():
    with pytest.raises(ValueError, match="holds 3 codes"):
        pack_nibbles(torch.zeros(3, dtype=torch.uint8))


@pytest.mark.parametrize("function", [pack_nibbles, unpack_nibbles])
def test_other_dtypes_are_refused(function):
    with pytest.raises(TypeError, match=r"torch\.int32"):
        function(torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="scalar"):
        function(torch.tensor(1, dtype=torch.uint8))
