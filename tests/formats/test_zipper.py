"""Do both parts of every code join to it, how far is each part from the weight, and are bad splits refused by name?"""

from dataclasses import replace

import pytest
import torch

from hf_mlspec import MLSpecConfig
from hf_mlspec.formats import FORMATS, ZipperWeight, zipper
from hf_mlspec.formats.zipper import MODES, Split

SPLITS = [(bits, low) for bits in range(4, 9) for low in range(2, bits - 1)]


def every_code(bits: int) -> torch.Tensor:
    return torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).to(torch.int8)


def dense(out: int = 48, size: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(out, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "low_bits"), SPLITS)
def test_every_code_is_its_parts_joined(bits, low_bits):
    codes, step = every_code(bits), 2**low_bits
    for mode in ("exact", "clamp"):
        how = Split(bits, low_bits, mode).require()
        low, high = zipper.split(codes, how)
        assert torch.equal(zipper.join(low, high, how), codes), mode
        assert low.min() == -step
        assert low.max() == step - 1
        inliers = (codes >= -step) & (codes < step)
        assert torch.equal(high == 0, inliers), mode
    low, high = zipper.split(codes, Split(bits, low_bits, "exact"))
    assert high.abs().max() <= 2 ** (bits - low_bits - 1) - 1 + (bits - low_bits == 1)


@pytest.mark.parametrize(("bits", "low_bits"), SPLITS)
def test_the_halved_split_moves_a_code_by_one_at_most_and_then_loses_nothing(bits, low_bits):
    codes, how = every_code(bits), Split(bits, low_bits, "paper")
    low, high = zipper.split(codes, how)
    assert (low.min(), low.max()) == (-(2 ** (low_bits - 1)), 2 ** (low_bits - 1) - 1)
    rounded = zipper.representable(codes, how)
    assert (rounded.int() - codes).abs().max() == 1
    again = zipper.split(rounded, how)
    assert (again[1] != 0).sum() <= (high != 0).sum()  # -17 was rounded to -16, which needs no high part
    assert torch.equal(zipper.join(*again, how), rounded)


def test_the_example_of_the_page():
    codes = torch.tensor([20, -3], dtype=torch.int8)
    parts = {mode: [part.tolist() for part in zipper.split(codes, Split(mode=mode))] for mode in MODES}
    assert parts == {"exact": [[4, -3], [1, 0]], "paper": [[2, -2], [1, 0]], "clamp": [[15, -3], [5, 0]]}


@pytest.mark.parametrize("shape", [(9, 96), (70, 160), (32, 64)])
@pytest.mark.parametrize("largest", [1, 16, 127])
@pytest.mark.parametrize("layout", ["slots", "packed"])
def test_sparse_cells_are_the_high_part(layout, largest, shape):
    to, of = {"slots": (zipper.to_slots, zipper.of_slots), "packed": (zipper.to_packed, zipper.of_packed)}[layout]
    draw = torch.Generator().manual_seed(largest)
    high = torch.randint(1 - largest, largest + 1, shape, generator=draw).to(torch.int8)
    high[torch.rand(shape, generator=draw) < 0.9] = 0
    high[4] = 0
    high[shape[0] - 1, :32] = largest  # a cell that is full in one output
    cells = to(high)
    found = of(cells, *shape)
    assert torch.equal(zipper.to_dense(found, *shape), high)
    assert bool((found.values != 0).all())
    assert (found.outputs * shape[1] + found.inputs).diff().gt(0).all()
    down, across = zipper.cells_of(*shape)
    assert len(cells.starts) == down * across + 1
    assert cells.is_wide == (layout == "packed" and largest == 127)
    assert int(cells.starts[-1]) * (16 if layout == "slots" else 1) == len(cells.words)
    none = to(torch.zeros_like(high))
    assert len(none.words) == len(of(none, *shape).values) == 0


def test_sparse_cells_name_what_lies_beyond_the_weight():
    high = torch.ones(33, 96, dtype=torch.int8)
    for to, of in ((zipper.to_slots, zipper.of_slots), (zipper.to_packed, zipper.of_packed)):
        with pytest.raises(ValueError, match="a value of the high part names input 95 of 80"):
            of(to(high), 33, 80)
        with pytest.raises(ValueError, match="a value of the high part names output 32 of 17"):
            of(to(high[:, :64]), 17, 64)


# What ZipperQuant's section 4 bounds, as it follows from the definitions: a code is at most half a step away (and one
# step more in mode "paper"), so an output is at most that times the sum of |x| away; the low part of "clamp" is the
# nearest that k1 + 1 bits have.
@pytest.mark.parametrize("mode", MODES)
def test_weights_and_outputs_stay_within_their_bounds(mode):
    wide = dense()
    weight = ZipperWeight.from_dense(wide, mode=mode)
    step = weight.weight_scale.double()
    reach = 1.5 if mode == "paper" else 0.5
    slack = 31 * 2.0**-11  # the scale is rounded to float16
    error = (weight.dequantize(torch.float64) - wide.double()).abs()
    assert (error <= (reach + slack) * step).all()
    assert error.max() > 0.45 * step.min()  # the bound is not an empty one
    x = dense(7, 256, seed=3).double()
    outputs = (x @ (weight.dequantize(torch.float64) - wide.double()).T).abs()
    assert (outputs <= x.abs().sum(1, keepdim=True) * ((reach + slack) * step).T).all()


def test_the_clamped_low_part_is_the_nearest_of_five_bits():
    weight = ZipperWeight.from_dense(dense(), mode="clamp")
    low = weight.dequantize(torch.float64, low_only=True)
    grid = torch.arange(-16, 16, dtype=torch.float64)
    codes = weight.codes().double().unsqueeze(-1)
    nearest = grid[(codes - grid).abs().argmin(-1)] * weight.weight_scale.double()
    assert torch.equal(low, nearest)
    restored = ZipperWeight.from_dense(dense(), mode="exact")
    whole = weight.dequantize(torch.float64)
    wrapped = restored.dequantize(torch.float64, low_only=True)
    assert (low - whole).square().sum() < (wrapped - whole).square().sum() / 4


def test_most_of_the_high_part_of_wide_gaussian_rows_is_zero():
    weight = ZipperWeight.from_dense(dense(64, 4096))
    assert 0.93 < weight.high_zeros() < 0.97


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits is 3, choose 4 to 8"),
        ({"bits": True}, "bits is True"),
        ({"low_bits": 5}, "low_bits is 5 of 6 bits, the high part needs 2 of them: choose 2 to 4"),
        ({"low_bits": 1}, "low_bits is 1 of 6 bits"),
        ({"mode": "half"}, "mode is 'half', choose exact, paper or clamp"),
    ],
)
def test_splits_that_there_are_not(options, message):
    with pytest.raises(ValueError, match=f"q_proj: zipper: {message}"):
        ZipperWeight.from_dense(dense(), name="q_proj", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 9}, "bits is 9, zipper has 4 or 5 or 6 or 7 or 8"),
        ({"bits": 5}, "zipper: low_bits is 4 of 5 bits, the high part needs 2 of them: choose 2 to 3"),
        ({"mode": "halved"}, "mode is 'halved', zipper has 'exact' or 'paper' or 'clamp'"),
        ({"high_part": "disk"}, "high_part is 'disk', zipper has 'device' or 'host'"),
        ({"smoothing": "auto"}, r"method 'smoothquant' chooses codes on a text: add calibration"),
        ({"rotation": "hadamard"}, r"method 'quarot' chooses codes on a text: add calibration"),
        ({"activation_bits": 5}, "activation_bits is 5"),
    ],
)
def test_settings_that_there_are_not(options, message):
    with pytest.raises(ValueError, match=message):
        MLSpecConfig("zipper", **options)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e6])
def test_rows_without_a_scale_are_named(value):
    wide = dense()
    wide[5, 7] = value
    with pytest.raises(ValueError, match=r"o_proj: zipper: row 5 reaches .* 31 steps of at most 32752"):
        ZipperWeight.from_dense(wide, name="o_proj")


def test_widths_that_blocks_do_not_divide_are_named():
    with pytest.raises(ValueError, match=r"in_features is 40, zipper takes multiples of 32"):
        ZipperWeight.from_dense(torch.zeros(2, 40))
    with pytest.raises(ValueError, match=r"in_features is 2097152, a high part has 1048576 inputs at most"):
        zipper.require_inputs(32, 2**21)
    with pytest.raises(TypeError, match=r"zipper quantizes float32, bfloat16 or float16, not torch\.int8"):
        ZipperWeight.from_dense(torch.zeros(2, 64, dtype=torch.int8))


def _header(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


U8 = torch.uint8


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight_planes": torch.zeros(6, 47, 32, dtype=U8)}, ValueError, r"weight_scale has shape \[48, 1\]"),
        ({"weight_planes": torch.zeros(3, 48, 32, dtype=U8)}, ValueError, r"expected \[4 to 8 planes"),
        ({"weight_planes": torch.zeros(6, 48, 32)}, TypeError, r"weight_planes is torch\.float32"),
        ({"weight_scale": torch.zeros(48, 1).half()}, ValueError, r"NaN, Inf, zero or negative"),
        ({"weight_scale": torch.full((48, 1), 40000.0).half()}, ValueError, r"weight_scale.* scales above 32752"),
        ({"weight_split": _header(7, 4, 0, 0)}, ValueError, r"expected 6 planes.*damaged"),
        ({"weight_split": _header(6, 5, 0, 0)}, ValueError, r"low_bits is 5 of 6 bits.*damaged"),
        ({"weight_split": _header(6, 4, 3, 0)}, ValueError, r"a mode of 0 to 2.*damaged"),
        ({"weight_split": _header(6, 4, 0)}, ValueError, r"weight_split has shape \[3\]"),
        ({"weight_split": _header(6, 4, 1, 0)}, ValueError, r"odd codes, mode 'paper' writes none"),
    ],
)
def test_damage_is_named(change, error, message):
    weight = ZipperWeight.from_dense(dense(), name="q_proj")
    with pytest.raises(error, match=f"q_proj: .*{message}"):
        replace(weight, **change).validate()


def test_zeros_are_a_weight():
    for mode in MODES:
        parts = zipper.zeros((5, 64), torch.device("cpu"), bits=7, low_bits=3, mode=mode, high_part="host")
        weight = ZipperWeight(*parts).validate(5, 64)
        assert not weight.dequantize().any()
        assert (weight.how, weight.high_part) == (Split(7, 3, mode), "host")
    assert FORMATS["zipper"].bits_per_weight(bits=6) == 6 + 16 / 4096
    assert ZipperWeight.from_dense(torch.zeros(2, 64)).weight_scale.tolist() == [[1.0], [1.0]]
