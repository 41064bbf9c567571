"""Do words of codes along the outputs, or in another order, come out two inputs a byte, every code in its place?"""

from __future__ import annotations

from pathlib import Path

import cases
import pytest
import torch
from instruction_sets import PACKAGE, output_on
from word_cases import SIZES, awq_words, codes_of, gptq_words, order_of, packed

from hf_mlspec import ops
from hf_mlspec.ops import words as module
from hf_mlspec.ops.operator import REFERENCES


@pytest.fixture(params=["compiled", "plain torch", "smallest blocks", "blocks"])
def move(request, monkeypatch):
    """The function of an op's name."""
    sizes = {"smallest blocks": 1, "blocks": 1 << 13}
    if request.param in sizes:
        monkeypatch.setattr(module, "_IN_FLIGHT", sizes[request.param])
    return lambda op: getattr(torch.ops.mlspec, op).default if request.param == "compiled" else REFERENCES[op]


def check(found, words, before, expected):
    assert torch.equal(found, expected)
    assert torch.equal(words, before)  # of a file that is mapped
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == found.nbytes


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_columns(inputs, outputs, move):
    codes = codes_of(outputs, inputs)
    words = awq_words(codes)
    check(move("pack_awq")(words), words, words.clone(), packed(codes))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_inputs_in_any_order(inputs, outputs, missing, ordered, move):
    codes = codes_of(outputs - missing, inputs)
    order, words = order_of(inputs), gptq_words(codes)
    found = move("pack_gptq")(words, order if ordered else None)
    check(found, words, words.clone(), packed(codes[:, order] if ordered else codes))


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512vnni"])  # the sets between and above take one of these
def test_every_instruction_set_moves_alike(isa):
    code = f"{PACKAGE}\nfrom word_cases import check_words\ncheck_words()\nprint('alike')"
    assert output_on(isa, code, Path(__file__).parent).strip() == "alike"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads):
    codes, order, before = codes_of(1160, 2080), order_of(2080), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(ops.pack_awq_words(awq_words(codes)), packed(codes))
        assert torch.equal(ops.pack_gptq_words(gptq_words(codes)), packed(codes))
        assert torch.equal(ops.pack_gptq_words(gptq_words(codes), order), packed(codes[:, order]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("order", [None, torch.arange(32)], ids=["in order", "ordered"])
def test_words_at_an_odd_place_of_their_storage(order, move):
    """As a file may have them: not at a multiple of eight bytes."""
    codes = codes_of(16, 32)
    words = gptq_words(codes)
    storage = torch.cat((torch.zeros(1, dtype=torch.int32), words.flatten()))
    assert torch.equal(move("pack_gptq")(storage[1:].view(words.shape), order), packed(codes))


def test_no_outputs_are_no_rows(move):
    assert move("pack_awq")(torch.empty(32, 0, dtype=torch.int32)).shape == (0, 16)
    assert move("pack_gptq")(torch.empty(4, 0, dtype=torch.int32), None).shape == (0, 16)


GOOD = {"pack_awq": {"words": torch.zeros(32, 2, dtype=torch.int32)},
        "pack_gptq": {"words": torch.zeros(4, 16, dtype=torch.int32), "order": torch.arange(32)}}  # fmt: skip
WORDS = torch.zeros(24, 2, dtype=torch.int32)


@pytest.mark.parametrize(("op", "change", "error", "told"), [
    ("pack_awq", {"words": WORDS.long()}, TypeError, "words is .*, expected"),
    ("pack_awq", {"words": WORDS[0]}, ValueError, r"words has shape \[2\], expected two axes"),
    ("pack_awq", {"words": WORDS}, ValueError, "words have 24 inputs, expected a multiple of 16"),
    ("pack_awq", {"words": torch.zeros(2, 32, dtype=torch.int32).t()}, ValueError, "words .*is not contiguous"),
    ("pack_gptq", {"words": WORDS[:3]}, ValueError, "words have 24 inputs, expected a multiple of 16"),
    ("pack_gptq", {"order": torch.arange(31)}, ValueError, r"order has shape \[31\], expected \[32\]"),
    ("pack_gptq", {"order": torch.arange(32).int()}, TypeError, "order is .*, expected"),
    ("pack_gptq", {"order": torch.arange(1, 33)}, ValueError, "order names inputs that are none of 32"),
    ("pack_gptq", {"order": torch.arange(-1, 31)}, ValueError, "order names inputs that are none of 32"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("compiled", [True, False])
def test_bad_operands_are_named(op, change, error, told, compiled):
    function = getattr(torch.ops.mlspec, op).default if compiled else REFERENCES[op]
    with pytest.raises(error, match=f"{op}: {told}"):
        function(*{**GOOD[op], **change}.values())


@pytest.mark.parametrize("op", GOOD)
def test_opcheck_and_meta_tensors(op):
    cases.check_registration(op, GOOD[op])
