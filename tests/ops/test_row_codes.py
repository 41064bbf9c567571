"""Are rows that become integers those of two ops in turn, and has a linear of them the result of a linear of rows?"""

from __future__ import annotations

import pytest
import torch
from decoders import Lanes, random_model
from models import packed
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.calibration.rotation import rotate
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.formats import activations
from hf_mlspec.formats.hadamard import Hadamard, fitting_hadamard
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.replace import transform_alike
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.nn.transforms import ORDER
from hf_mlspec.ops import Codes, CodesOf
from hf_mlspec.ops.operator import REFERENCES

CASES = [(512, CodesOf(128, 4, 0.85)), (512, CodesOf(128, 4, 1.0, 128)), (512, CodesOf(128, 8, 1.0, 128)),
         (448, CodesOf(64, 4)), (96, CodesOf(32, 8)), (96, CodesOf(64, 8))]  # fmt: skip


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def any_order(width: int) -> Tensor:
    return torch.randperm(width, generator=torch.Generator().manual_seed(1)).int()


def undone(rows: Codes, width: int, how: CodesOf) -> tuple[Tensor, Tensor]:
    """Codes and scales as formats/activations.py has them."""
    codes = rows.codes.view(len(rows), -1, 8, 2).transpose(2, 3).flatten(1)
    groups = -(-width // how.group_size)
    assert rows.scales.shape == (-(-width // 128) * 128 // how.group_size, -(-len(rows) // 4) * 4)
    assert not rows.scales[groups:].any()
    assert not rows.scales[:, len(rows) :].any()
    return codes, rows.scales[:groups, : len(rows)].T


def check(rows: Codes, expected: Tensor, how: CodesOf) -> None:
    width = expected.shape[1]
    codes, scales = undone(rows, width, how)
    inner = width - how.outliers
    parts = [activations.quantize_rows(expected[:, :inner], how.group_size, how.bits, how.activation_clip)]
    if how.outliers:
        parts.append(activations.quantize_rows(expected[:, inner:], how.group_size, 8))
    assert torch.equal(codes, torch.cat([part[0] for part in parts], 1))
    assert torch.equal(scales, torch.cat([part[1] for part in parts], 1))


@pytest.mark.parametrize("count", [1, 4, 5])
@pytest.mark.parametrize(("width", "how"), CASES, ids=str)
def test_codes_are_those_of_two_ops(width, how, count):
    x, gate_up, order = seeded(count, width), seeded(count, 2 * width, seed=1), any_order(width)
    rotation, weight, residual = fitting_hadamard(width), seeded(width, seed=2).float(), seeded(count, width, seed=3)
    check(ops.gated_codes(gate_up, 0, None, how), ops.gated(gate_up, 0), how)
    check(ops.gated_codes(gate_up, 1, order, how), ops.gated_in_order(gate_up, 1, order), how)
    check(ops.gated_codes(gate_up, 2, rotation, how), ops.gated_hadamard(gate_up, 2, rotation), how)
    check(ops.row_codes(x, order, how), ops.ordered_rows(x, order), how)
    check(ops.row_codes(x, rotation, how), ops.hadamard_rows(x, rotation), how)
    for beside in (None, residual):
        normed, total = ops.rms_norm(x, weight, 1e-5, beside)
        codes, summed = ops.norm_codes(x, weight, 1e-5, beside, None, how)
        check(codes, normed, how)
        assert torch.equal(summed, total)
        check(ops.norm_codes(x, weight, 1e-5, beside, order, how)[0], ops.ordered_rows(normed, order), how)


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outliers", [0, 128])
def test_a_linear_of_codes_is_the_reference_of_a_linear_of_rows(outliers, bits, count):
    generator = torch.Generator().manual_seed(3)
    width, out, how = 512, 40, CodesOf(128, bits, 0.9, outliers)
    inner, x, bias = width - outliers, seeded(count, width), torch.randn(out, generator=generator)
    weight = torch.randint(0, 256, (out, inner // 2), generator=generator).to(torch.uint8)
    scale = torch.rand(out, inner // 128, generator=generator).half()
    rows = ops.row_codes(x, torch.arange(width, dtype=torch.int32), how)
    if outliers:
        outlier = torch.randint(-119, 120, (out, 128), generator=generator).to(torch.int8)
        tiles = ops.prepack_int4_int8(weight, scale, outlier, torch.rand(out, generator=generator).half())
        expected = REFERENCES["int4_int8_linear"](x, *tiles, out, bias, bits, 0.9)
        ours = ops.int4_codes_linear(rows, *tiles, None, out, bias, group_size=128, outliers=128)
    else:
        zero = torch.randint(0, 16, scale.shape, generator=generator).to(torch.uint8)
        tiles = ops.prepack_int4(weight, scale, zero)
        expected = REFERENCES["int4_linear"](x, *tiles, out, bias, 128, bits, 0.9)
        ours = ops.int4_codes_linear(rows, *tiles, out, bias, group_size=128)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, expected)


SHAPE = {"hidden_size": 128, "intermediate_size": 448, "head_dim": 32, "tie_word_embeddings": False}


def transformed(kind: str) -> torch.nn.Module:
    model = random_model("llama", torch.bfloat16, **SHAPE)
    if kind == "rotated":
        rotate(model, seed=1)
    packed(model, "int4", keep_head=False)
    if kind == "rotated":
        transform_alike(model)
    for module in model.modules():
        if kind == "ordered" and isinstance(module, PackedLinear):
            module.transform_(ORDER, {"order": any_order(module.in_features)})
    return model


@pytest.mark.parametrize("kind", ["plain", "ordered", "rotated"])
def test_a_step_over_codes_is_a_step_over_rows(kind, monkeypatch):
    """On the CPU, where it makes codes only if it is asked to."""
    model, made = transformed(kind), []
    for name in ("norm_codes", "row_codes", "gated_codes"):
        op = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *given, name=name, op=op: made.append(name) or op(*given))
    ids = torch.randint(1, 199, (2, 9), generator=torch.Generator().manual_seed(7)).tolist()
    with precision_switch(model).at("w4a8"):
        together, apart = CudaDecoder(model, codes=True), CudaDecoder(model)
        assert not apart.codes
        ours = torch.stack(Lanes(together, 2, slots=32).feed(ids))
        layers = len(together._layers)
        expected = torch.stack(Lanes(apart, 2, slots=32).feed(ids))
    assert made.count("norm_codes") == 2 * layers
    assert made.count("gated_codes") == layers
    assert made.count("row_codes") == (0 if kind == "plain" else layers)
    assert (ours - expected).abs().max() < 0.03 * expected.abs().max()  # sums in another order may move a code


def test_rows_whose_mlp_is_computed_in_parts_and_16_bits_are_read_as_they_are():
    model = transformed("rotated")
    ids = torch.randint(1, 199, (2, 9), generator=torch.Generator().manual_seed(7)).tolist()
    with precision_switch(model).at("w4a16"):
        together, apart = CudaDecoder(model, codes=True), CudaDecoder(model)
        ours, expected = (torch.stack(Lanes(one, 2, slots=32).feed(ids)) for one in (together, apart))
    assert torch.equal(ours, expected)


HOW = CodesOf(128, 4)._asdict()
X, TILES = seeded(3, 512), (torch.zeros(16, 256, dtype=torch.uint8), torch.ones(16, 4).half())
BAD = [
    ({"bits": 16}, X, Hadamard(8), "bits is 16, choose one of"),
    ({"group_size": 48}, X, Hadamard(8), "group_size is 48, choose one of"),
    ({"activation_clip": 0.0}, X, Hadamard(8), "activation_clip is 0"),
    ({"outliers": 64}, X, Hadamard(8), "outliers is 64 of 512 columns in groups of 128, expected 0, or 128 behind"),
    ({"outliers": 128, "group_size": 64}, X, Hadamard(8), "outliers is 128 of 512 columns in groups of 64"),
    ({}, X[:, :40], Hadamard(8), "rows of x have 40 columns, expected a multiple of 32"),
    ({}, X, Hadamard(1024), "x has 512 columns, size 1024 times inner 1 does not divide them"),
    ({}, X, torch.arange(8, dtype=torch.int32), r"order has shape \[8\], expected \[512\]"),
    ({}, X[0], Hadamard(8), r"x has shape \[512\], expected \[n, width\]"),
]


@pytest.mark.parametrize(("changed", "x", "turned", "message"), BAD, ids=[bad[3][:24] for bad in BAD])
def test_operands_that_do_not_fit(changed, x, turned, message):
    with pytest.raises(ValueError, match=message):
        ops.row_codes(x, turned, CodesOf(**{**HOW, **changed}))


def test_an_order_and_a_rotation_are_not_both_given():
    with pytest.raises(ValueError, match="rows are put in an order and rotated, expected one of both"):
        torch.ops.mlspec.row_codes(X, any_order(512), None, 8, 1, *CodesOf(128, 4))


def test_codes_of_another_width_or_count_are_refused():
    tiles = ops.prepack_int4(*TILES)
    rows = ops.row_codes(seeded(3, 1024), Hadamard(8), CodesOf(128, 4))
    with pytest.raises(ValueError, match=r"codes has shape \[3, 1024\], the weight takes in_features = 512"):
        ops.int4_codes_linear(rows, *tiles, 16, group_size=128)
    rows = ops.row_codes(X, Hadamard(8), CodesOf(128, 4))
    with pytest.raises(ValueError, match=r"scales has shape \[4, 3\], expected \[4, 4\]"):
        ops.int4_codes_linear(Codes(rows.codes, rows.scales[:, :3].contiguous()), *tiles, 16, group_size=128)
    with pytest.raises(TypeError, match=r"codes is torch.float32, expected torch.int8"):
        ops.int4_codes_linear(Codes(rows.codes.float(), rows.scales), *tiles, 16, group_size=128)


@pytest.mark.parametrize("name", ["norm_codes", "row_codes", "gated_codes", "int4_codes_linear"])
def test_fakes_agree(name):
    rows, how = ops.row_codes(X, Hadamard(8), CodesOf(128, 4)), (128, 4, 0.9, 0)
    operands = {
        "norm_codes": (X, torch.ones(512), 1e-5, X, any_order(512), *how),
        "row_codes": (X, None, None, 8, 1, *how),
        "gated_codes": (X, 0, None, None, 256, 1, *how),
        "int4_codes_linear": (*rows, *ops.prepack_int4(*TILES), 16, None, 128, 0),
    }[name]
    result = torch.library.opcheck(getattr(torch.ops.mlspec, name).default, operands,
                                   test_utils=("test_schema", "test_faketensor"))  # fmt: skip
    assert set(result.values()) == {"SUCCESS"}
