"""Are precisions read, printed and compared as one word?"""

import pytest

from hf_mlspec.precision import Bits, Precision


@pytest.mark.parametrize("word", ["mxfp4", "mxfp4a8", "w4a16", "w4a8", "w4a4", "planes3", "nested", "nested4",
                                  "nested4a8", "int3", "int2", "ternary"])
def test_words_round_trip(word):
    assert str(Precision.parse(word)) == word
    assert Precision.parse(str(Precision.parse(word))) == Precision.parse(word)


def test_fields():
    assert Precision.parse("w4a8") == Precision("w", 4, 8)
    assert Precision.parse("planes3") == Precision("planes", 3, 16)
    assert Precision.parse("w4") == Precision.parse("w4a16")
    assert Precision.parse("nested") == Precision("nested", 16, 16)
    assert Precision.parse("nested4a8") == Precision("nested", 4, 8)
    assert Precision.parse("int3") == Precision("int", 3)
    assert Precision.parse("ternary") == Precision("ternary", 2)


def test_bits_of_a_call():
    assert Precision.parse("nested4a8").bits == Bits(4, 8)
    assert Precision.parse("planes2").bits == Bits(weight=2, activation=16)
    assert Bits() == (0, 0)


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
    ("word", "message"),
    [
        ("w9", "9 weight bits, must be 1 to 8"),
        ("planes0", "0 weight bits"),
        ("w4a5", "5 activation bits, must be 4, 8 or 16"),
        ("planes3a8", "8 activation bits, must be 16"),
        ("nesteda8", "precision nesteda8: 8 activation bits, must be 16"),
        ("nested4a4", "4 activation bits, must be 8 or 16"),
        ("int3a8", "8 activation bits, must be 16"),
    ],
)
def test_bits_out_of_range(word, message):
    with pytest.raises(ValueError, match=message):
        Precision.parse(word)


def test_an_unknown_family_is_named():
    with pytest.raises(ValueError, match="family 'fp': choose one of mxfp4, w, nested, planes, int, ternary"):
        Precision("fp", 8)


def test_nested_bits_are_sixteen_or_four():
    with pytest.raises(ValueError, match="8 weight bits, must be 4 or 16"):
        Precision("nested", 8)
