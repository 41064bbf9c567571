"""Is a text that is encoded piece by piece the ids of the whole text, whatever its tokenizer does at a cut?"""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import hf_mlspec
from hf_mlspec.integration.quantizer import encoded_text

TEXT = Path(argparse.__file__).read_text(encoding="utf-8")[:30_000] + "\n\n \n = A heading = \n" * 40 + "x" * 5000


class Counted:
    """A tokenizer, and how long the texts were that it was given."""

    def __init__(self, ids_of):
        self.ids_of, self.lengths = ids_of, []

    def __call__(self, text, **options):
        assert options == {"add_special_tokens": False, "verbose": False}
        self.lengths.append(len(text))
        return {"input_ids": self.ids_of(text)}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(encoded_text, "PIECE", 3000)


def test_pieces_have_the_ids_of_the_whole():
    own = AutoTokenizer.from_pretrained(hf_mlspec.demo_pair()[0])
    whole = own(TEXT, add_special_tokens=False, verbose=False)["input_ids"]
    counted = Counted(lambda text: own(text, add_special_tokens=False, verbose=False)["input_ids"])
    assert encoded_text.encode(TEXT, counted).tolist() == whole
    assert max(counted.lengths) < 9000  # the last line has 5,000 characters


def marks_its_begin(text):
    return [0, *map(ord, text)]


def joins_lines(text):
    return [hash(word) for word in re.split(r"(?<=[a-z])(?=[A-Z])", text)]


@pytest.mark.parametrize("ids_of", [marks_its_begin, joins_lines])
def test_a_tokenizer_that_no_cut_suits_gets_the_text_whole(ids_of):
    text = textwrap.dedent("line after line\n") * 400
    counted = Counted(ids_of)
    assert encoded_text.encode(text, counted).tolist() == ids_of(text)
    assert counted.lengths[-1] == len(text)


def test_a_cut_within_what_is_one_token_is_not_taken():
    def ids_of(text):  # a heading and the line behind it are one token
        return [len(part) for part in re.findall(r"# .*\n.*\n|.*\n", text)]

    text = "plain\n" * 499 + "# heading\nof two lines\n" * 3 + "plain\n" * 500
    counted = Counted(ids_of)
    assert encoded_text.encode(text, counted).tolist() == ids_of(text)
    assert max(counted.lengths) < len(text) / 1.5


def test_the_first_ids_are_those_of_the_whole_and_the_rest_is_not_read():
    counted = Counted(lambda text: list(map(ord, text)))
    assert encoded_text.encode(TEXT, counted, 100).tolist() == list(map(ord, TEXT[:100]))
    assert sum(counted.lengths) < 6000
    assert encoded_text.encode("", counted).tolist() == []
