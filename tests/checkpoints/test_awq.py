"""Is an AWQ layer read bit for bit, and is a damaged one refused by name?"""

import dataclasses

import numpy as np
import pytest
import torch

from hf_mlspec.checkpoints.awq import AwqReader
from tests.checkpoints.memory import read, stored, values
from tests.foreign_checkpoints import awq, awq_four_rows, awq_rows, rounded

INPUTS, OUTPUTS = 256, 48
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def layer_of(size=64, symmetric=False):
    torch.manual_seed(size)
    codes = rounded(torch.randn(OUTPUTS, INPUTS), 4, size, symmetric)
    return codes, awq(codes)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_values_are_those_of_the_file(size, symmetric, monkeypatch):
    monkeypatch.setattr("hf_mlspec.checkpoints.awq.ROWS", 8 * INPUTS * 4)  # parts, the last a smaller one
    codes, tensors = layer_of(size, symmetric)
    plan, layer = read(AwqReader({**CONFIG, "group_size": size}), stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)
    assert plan.options == {"group_size": min(size, 128), "symmetric": symmetric}
    assert plan.stored_as.startswith("AWQ, 4 bits, " + ("a channel" if size == INPUTS else f"groups of {size}"))


def test_without_zero_points_codes_are_symmetric():
    codes, tensors = layer_of(symmetric=True)
    del tensors["qzeros"]
    _, layer = read(AwqReader({**CONFIG, "zero_point": False}), stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)


def test_a_dense_layer_has_the_values_of_the_file():
    codes, _ = layer_of()
    codes = dataclasses.replace(codes, scale=torch.rand_like(codes.scale, dtype=torch.float32) * 1e-6)
    plan, layer = read(AwqReader(CONFIG), stored(awq(codes), INPUTS, OUTPUTS))
    assert "float16 does not hold" in plan.why_dense
    assert torch.equal(layer.weight, codes.values)


ROWS = {**CONFIG, "version": "gemv"}


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_words_along_the_inputs_have_the_same_values(size, symmetric, spare):
    codes, _ = layer_of(size, symmetric)
    tensors, told = awq_rows(codes, spare), -1 if size == INPUTS else size
    plan, layer = read(AwqReader({**ROWS, "group_size": told}), stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)
    assert plan.options == {"group_size": min(size, 128), "symmetric": symmetric}


def test_of_words_along_the_inputs_a_dense_layer_has_the_values_too():
    codes, _ = layer_of()
    codes = dataclasses.replace(codes, scale=torch.rand_like(codes.scale, dtype=torch.float32) * 1e-6)
    _, layer = read(AwqReader(ROWS), stored(awq_rows(codes), INPUTS, OUTPUTS))
    assert torch.equal(layer.weight, codes.values)


def test_one_input_is_where_the_layout_has_it():
    codes, _ = layer_of()
    codes = dataclasses.replace(codes, code=np.zeros_like(codes.code))
    codes.code[5, 11] = 9  # nibble 3 of the second word
    assert awq_rows(codes)["qweight"][5].tolist() == [0, 9 << 12, *[0] * 30]
    _, layer = read(AwqReader(ROWS), stored(awq_rows(codes), INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda t: t.pop("scales"), ValueError, "up_proj: scales is missing"),
        (lambda t: t.pop("qzeros"), ValueError, "up_proj: qzeros is missing"),
        (lambda t: t.update(qweight=t["qweight"][:, :-1]), ValueError, r"qweight in the.file has shape \[48, 31\]"),
        (lambda t: t.update(scales=t["scales"][:, :4]), ValueError, r"scales in the.file has shape \[48, 4\]"),
        (lambda t: t.update(qzeros=t["qzeros"][:-1]), ValueError, r"qzeros in the.file has shape \[47, 1\]"),
        (lambda t: t["scales"][3, 1].fill_(float("nan")), ValueError, r"\(nan\) at \[3, 1\]"),
    ],
)
def test_damage_to_words_along_the_inputs_is_named(change, error, said):
    codes, _ = layer_of()
    tensors = awq_rows(codes)
    change(tensors)
    with pytest.raises(error, match=said):
        AwqReader(ROWS).plan(stored(tensors, INPUTS, OUTPUTS))


def test_groups_that_do_not_divide_the_inputs_are_refused():
    codes, _ = layer_of()
    with pytest.raises(ValueError, match="256 inputs, which groups of 96 do not divide"):
        AwqReader({**ROWS, "group_size": 96}).plan(stored(awq_rows(codes), INPUTS, OUTPUTS))


def test_one_column_is_where_the_layout_has_it():
    codes, _ = layer_of()
    codes = dataclasses.replace(codes, code=np.zeros_like(codes.code))
    codes.code[11, 5] = 9  # column 3 of the second word: (0, 2, 4, 6, 1, 3, 5, 7).index(3) is nibble 5
    assert awq(codes)["qweight"][5].tolist() == [0, 9 << 20, 0, 0, 0, 0]
    _, layer = read(AwqReader(CONFIG), stored(awq(codes), INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda t: t.pop("scales"), ValueError, "up_proj: scales is missing"),
        (lambda t: t.update(qweight=t["qweight"].t()), ValueError, r"qweight in the.file has shape \[6, 256\]"),
        (lambda t: t.update(qzeros=t["qzeros"][:-1]), ValueError, r"qzeros in the.file has shape \[3, 6\]"),
        (lambda t: t["scales"][1, 3].fill_(float("inf")), ValueError, r"\(inf\) at \[1, 3\]"),
        (lambda t: t.update(scales=t["scales"][:3]), ValueError, "3 groups: 256 inputs in groups of 64"),
        (lambda t: t.pop("qzeros"), ValueError, "up_proj: qzeros is missing"),
        (lambda t: t.update(scales=t["scales"].long()), TypeError, "scales in the.file is torch.int64"),
    ],
)
def test_damage_is_named(change, error, said):
    _, tensors = layer_of()
    change(tensors)
    with pytest.raises(error, match=said):
        AwqReader(CONFIG).plan(stored(tensors, INPUTS, OUTPUTS))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "llm-awq"}, "version 'llm-awq', gemm, gemv, gemv_fast are read"),
        ({"format": "gemv"}, "of version 'gemv', gemm, gemv, gemv_fast are read"),  # and CONFIG's version is "gemm"
        ({"version": "gemv", "format": "marlin"}, "of version 'marlin', gemm, gemv, gemv_fast are read"),
        ({"bits": 8}, "8 bits"),
    ],
)
def test_other_versions_are_named(change, said):
    with pytest.raises(ValueError, match=said):
        AwqReader({**CONFIG, **change})


FAST = {**CONFIG, "version": "gemv_fast"}


@pytest.mark.parametrize("spare", [0, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_four_rows_in_a_word_have_the_same_values(size, symmetric, spare, monkeypatch):
    monkeypatch.setattr("hf_mlspec.checkpoints.awq.ROWS", 5 * 4 * INPUTS)  # parts, the last a smaller one
    codes, _ = layer_of(size, symmetric)
    tensors, told = awq_four_rows(codes, spare), -1 if size == INPUTS else size
    plan, layer = read(AwqReader({**FAST, "group_size": told}), stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)
    assert plan.options == {"group_size": min(size, 128), "symmetric": symmetric}


def test_where_the_layout_has_one_code_of_four_rows():
    """Row 6, input 64 + 32 + 13: word 64 + 40 + ... by hand. 13 = 8 * 1 + 2 * 2 + 1 lies at 8 * 2 + 4 * 1 + 1 = 21 of
    its 32, at 2 * 64 + 32 + 21 = 181 of the four rows' 256: nibble 1 of word 45."""
    codes, _ = layer_of(symmetric=True)
    tensors = awq_four_rows(codes)
    tensors["qweight"].zero_()
    tensors["qweight"][1, 64 + 45] = 5 << 4
    _, layer = read(AwqReader(FAST), stored(tensors, INPUTS, OUTPUTS))
    found = values(layer, torch.float32) / codes.scale.float().repeat_interleave(64, 1)
    assert (found + 8).round().nonzero().tolist() == [[6, 109]]
    assert round(float(found[6, 109]) + 8) == 5


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda t: t["qzeros"][0, 3].add_(0.01), ValueError, "1 numbers .* zero point.* output 3 in"),
        (lambda t: t["qzeros"][1].fill_(float("nan")), ValueError, "48 numbers that are no scale"),
        (lambda t: t["scales"][0, 0].fill_(float("inf")), ValueError, "NaN or Inf"),
        (lambda t: t.update(qweight=t["qweight"][:-1]), ValueError, r"has shape \[11, 256\]"),
        (lambda t: t.update(qweight=t["qweight"].int()), TypeError, "torch.int32, expected torch.int16"),
        (lambda t: t.update(qzeros=t["qzeros"][:-1]), ValueError, "qzeros .* has shape"),
        (lambda t: t.pop("qzeros"), ValueError, "qzeros is missing"),
    ],
)  # fmt: skip
def test_damage_of_four_rows_is_named(change, error, said):
    codes, _ = layer_of()
    tensors = awq_four_rows(codes)
    change(tensors)
    with pytest.raises(error, match=said):
        read(AwqReader(FAST), stored(tensors, INPUTS, OUTPUTS))
