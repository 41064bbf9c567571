"""Is what is saved of a nested weight whole, and is damage named?"""

import dataclasses

import pytest
import torch

from hf_mlspec.formats import NestedWeight
from hf_mlspec.formats.nested import ESCAPE_TENSORS


def dense() -> torch.Tensor:
    weight = (torch.randn(6, 96, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16()
    weight[1, 70], weight[4, 3], weight[4, 90] = 1e-30, -1e-35, 2e-39
    return weight


@pytest.fixture
def weight() -> NestedWeight:
    return NestedWeight.from_dense(dense(), name="model.q_proj")


def with_field(weight: NestedWeight, row: int, column: int, field: int) -> NestedWeight:
    low, high = weight.weight_low.clone(), weight.weight_high.clone()
    low[row, column] = field & 255
    shift = column % 2 * 4
    high[row, column // 2] = int(high[row, column // 2]) & (240 >> shift) | (field >> 8) << shift
    return dataclasses.replace(weight, weight_low=low, weight_high=high)


def test_names_shapes_and_dtypes(weight):
    assert weight.parts._fields[:5] == ("packed", "scale", "low", "high", "codebook")
    assert [tuple(part.shape) for part in weight.parts[:5]] == [(6, 48), (6, 3), (6, 96), (6, 48), (8,)]
    assert ESCAPE_TENSORS == ("weight_escape_index", "weight_escape_value")
    assert weight.weight_escape_index.tolist() == [1 * 96 + 70, 4 * 96 + 3, 4 * 96 + 90]
    assert weight.weight_escape_value.dtype == torch.bfloat16
    assert weight.validate(6, 96) is weight
    assert (weight.out_features, weight.in_features, weight.num_escapes) == (6, 96, 3)


def test_bits_and_escaped_rows(weight):
    assert torch.equal(weight.join().view(torch.int16), dense().view(torch.int16))
    assert torch.equal(weight.dequantize(torch.float32), dense().float())
    rows, exact = weight.escape_rows()
    assert rows.tolist() == [1, 4]
    assert torch.equal(exact.view(torch.int16), dense()[[1, 4]].view(torch.int16))


def test_without_escapes_there_are_no_tensors_of_them():
    plain = NestedWeight.from_dense(dense()[:1])
    assert plain.weight_escape_index is None
    assert plain.weight_escape_value is None
    assert plain.num_escapes == 0
    assert plain.escape_rows() is None
    assert torch.equal(plain.validate().join(), dense()[:1])


def test_bytes_are_at_most_two_percent_more():
    weight = NestedWeight.from_dense((torch.randn(64, 512) * 0.02).bfloat16())
    stored = sum(part.nbytes for part in weight.parts[:5])
    assert stored <= 1.017 * 64 * 512 * 2


@pytest.mark.parametrize("codebook", ["lloyd_max", "mxfp4", "fitted"])
def test_codebooks_by_name(codebook):
    weight = NestedWeight.from_dense(dense(), codebook).validate()
    assert torch.equal(weight.join().view(torch.int16), dense().view(torch.int16))
    assert (weight.weight_codebook.tolist() == [2, 7, 11, 16, 22, 30, 38, 51]) == (codebook == "lloyd_max")


def test_an_unknown_codebook_and_a_weight_that_cannot_be_nested_are_named():
    with pytest.raises(ValueError, match="unknown codebook 'nf4'"):
        NestedWeight.from_dense(dense(), "nf4")
    with pytest.raises(TypeError, match=r"lm_head is torch\.float16"):
        NestedWeight.from_dense(dense().half(), name="lm_head")
    bad = dense()
    bad[2, 5] = torch.nan
    with pytest.raises(ValueError, match="lm_head holds nan at row 2, column 5"):
        NestedWeight.from_dense(bad, "fitted", "lm_head")


U8 = torch.uint8


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"packed": torch.zeros(6, 40, dtype=U8)}, ValueError, r"weight_packed .*expected \[6, 48\].*truncated"),
        ({"scale": torch.full((6, 4), 127, dtype=U8)}, ValueError, r"weight_scale .*expected \[6, 3\].*another"),
        ({"high": torch.zeros(5, 48, dtype=U8)}, ValueError, r"weight_high has shape \[5, 48\], expected \[6, 4"),
        ({"low": torch.zeros(6, 64, dtype=U8)}, ValueError, r"weight_packed has shape \[6, 48\], expected \[6, 3"),
        ({"low": torch.zeros(576, dtype=U8)}, ValueError, r"weight_low has shape \[576\], expected \[out, in\]"),
        ({"low": torch.zeros(6, 90, dtype=U8)}, ValueError, "in_features is 90, nested BF16 needs a multiple"),
        ({"low": torch.zeros(6, 96)}, TypeError, r"weight_low is torch\.float32, nested BF16 saves it as"),
        ({"scale": torch.zeros(6, 3, dtype=torch.int32)}, TypeError, r"weight_scale is torch\.int32"),
        ({"codebook": torch.arange(9, dtype=U8)}, ValueError, r"weight_codebook has shape \[9\], expected \[8\]"),
        ({"codebook": torch.arange(8, dtype=U8).flip(0)}, ValueError, "weight_codebook holds .* must ascend"),
        ({"codebook": torch.arange(57, 65, dtype=U8)}, ValueError, r"weight_codebook holds .*64.* within 0\.\.63"),
        ({"escape_index": None}, ValueError, r"shape None and weight_escape_value \[3\], both must be"),
        ({"escape_value": torch.zeros(2).bfloat16()}, ValueError, r"shape \[3\] and weight_escape_value \[2\]"),
        ({"escape_index": torch.zeros(3)}, TypeError, r"weight_escape_index is torch\.float32"),
        ({"escape_value": torch.zeros(3)}, TypeError, r"weight_escape_value is torch\.float32"),
        ({"escape_index": torch.tensor([166, 387, 576])}, ValueError, r"index\[2\] is 576, outside of the 576"),
        ({"escape_index": torch.tensor([-1, 387, 474])}, ValueError, r"index\[0\] is -1, outside"),
        ({"escape_index": torch.tensor([166, 474, 387])}, ValueError, r"index\[2\] is 387, not above the one"),
        ({"escape_index": torch.tensor([166, 387, 387])}, ValueError, r"index\[2\] is 387, not above the one"),
        ({"escape_index": torch.tensor([165, 387, 474])}, ValueError, r"index\[0\] is 165, that of a weight with"),
        ({"escape_value": bf16(1e-30, torch.nan, 2e-39)}, ValueError, r"value\[1\] is nan"),
        ({"escape_value": bf16(1e-30, 1e-35, -torch.inf)}, ValueError, r"value\[2\] is -inf"),
        ({"escape_value": bf16(0.25, 1e-35, 2e-39)}, ValueError, r"value\[0\] is 0.25, .*too"),
        ({"escape_value": bf16(-0.0, 1e-35, 2e-39)}, ValueError, r"value\[0\] is -0, zero"),
    ],
)
def test_damage_is_named(weight, change, error, message):
    with pytest.raises(error, match=rf"model\.q_proj: .*{message}"):
        dataclasses.replace(weight, **{f"weight_{name}": tensor for name, tensor in change.items()}).validate()


@pytest.mark.parametrize("value", [0, 30, 255])
def test_an_exponent_no_split_writes_is_located(weight, value):
    weight.weight_scale[4, 1] = value
    said = rf"weight_scale holds 1 exponents outside 31\.\.254, the first \({value}\) at row 4, block 1"
    with pytest.raises(ValueError, match=said):
        weight.validate()


@pytest.mark.parametrize("column", [10, 11])
@pytest.mark.parametrize("field", [1, 127])
def test_a_reserved_field_is_located(weight, field, column):
    with pytest.raises(ValueError, match=rf"hold the field {field} at row 2, column {column}, 1 to 127 occur only in"):
        with_field(weight, 2, column, field).validate()
    assert with_field(weight, 2, column, 128).validate().join()[2, column].abs() > 0


def test_reserved_fields_are_numbers_in_blocks_of_exponent_31():
    tiny = torch.zeros(1, 32, dtype=torch.bfloat16)
    tiny[0, 3] = 2e-39
    weight = NestedWeight.from_dense(tiny).validate()
    assert weight.weight_scale.item() == 31
    assert torch.equal(weight.join().view(torch.int16), tiny.view(torch.int16))


def test_of_another_layer(weight):
    with pytest.raises(ValueError, match=r"weight_packed has shape \[6, 48\], expected \[8, 48\]: .* truncated"):
        weight.validate(8, 96)


def test_shapes_alone_are_checked_without_storage(weight):
    meta = {f"weight_{name}": part.to("meta") for name, part in weight.parts._asdict().items()}
    assert NestedWeight(**meta).validate(6, 96).in_features == 96
