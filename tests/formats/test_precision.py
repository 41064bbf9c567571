"""Are precisions read, printed and compared as one word?"""

import pytest

from hf_mlspec.precision import Precision


@pytest.mark.parametrize("word", ["mxfp4", "mxfp4a8", "w4a16", "w4a8", "w4a4", "planes3", "planes8a8"])
def test_words_round_trip(word):
    assert str(Precision.parse(word)) == word
    assert Precision.parse(str(Precision.parse(word))) == Precision.parse(word)


def test_fields():
    assert Precision.parse("w4a8") == Precision("w", 4, 8)
    assert Precision.parse("planes3") == Precision("planes", 3, 16)
    assert Precision.parse("w4") == Precision.parse("w4a16")


def test_comparison():
    w4a4, w4a16, w8a8 = (Precision.parse(word) for word in ("w4a4", "w4a16", "w8a8"))
    assert w4a4.reads_no_more_than(w4a16)
    assert not w4a16.reads_no_more_than(w4a4)
    assert not w4a16.reads_no_more_than(w8a8)


@pytest.mark.parametrize("word", ["", "fp3", "w4a", "MXFP4", "planes", "w4a8x", None, 4])
def test_unknown_words_are_named(word):
    with pytest.raises(ValueError, match="unknown precision"):
        Precision.parse(word)


@pytest.mark.parametrize(
    ("word", "message"), [("w9", "9 weight bits"), ("planes0", "0 weight bits"), ("w4a5", "5 activation bits")]
)
def test_bits_out_of_range(word, message):
    with pytest.raises(ValueError, match=message):
        Precision.parse(word)
