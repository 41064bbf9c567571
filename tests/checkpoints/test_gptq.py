"""Is a GPTQ layer read bit for bit, in every width, group and order, and is a damaged one refused by name?"""

import dataclasses

import numpy as np
import pytest
import torch

from hf_mlspec.checkpoints.gptq import GptqReader
from tests.checkpoints.memory import read, stored, values
from tests.foreign_checkpoints import gptq, rounded

INPUTS, OUTPUTS = 256, 48


def layer_of(bits=4, size=64, symmetric=True, act_order=False, version=1, dtype=torch.float16, index=True, seed=0):
    torch.manual_seed(seed)
    codes = rounded(torch.randn(OUTPUTS, INPUTS), bits, size, symmetric, seed, act_order, dtype)
    return codes, gptq(codes, bits, version, index)


def config(bits=4, version=1, **more):
    return {"bits": bits, "checkpoint_format": "gptq" if version == 1 else "gptq_v2", **more}


@pytest.mark.parametrize("act_order", [False, True], ids=["in-order", "act-order"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("size", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_values_are_those_of_the_file(bits, size, symmetric, act_order):
    for version in (1, 2):
        codes, tensors = layer_of(bits, size, symmetric, act_order, version)
        plan, layer = read(GptqReader(config(bits, version)), stored(tensors, INPUTS, OUTPUTS))
        assert torch.equal(values(layer, torch.float16), codes.values)
        expected = "planes" if symmetric and bits != 4 else "int4" if bits <= 4 else ""
        assert plan.format == expected
        assert plan.ordered == bool(act_order and size != -1 and expected)
        assert ("act-order" in plan.stored_as) == (act_order and size != -1)
        assert bool(plan.why_dense) == (not expected)


def test_what_is_said_of_it():
    _, tensors = layer_of()
    plan, layer = read(GptqReader(config()), stored(tensors, INPUTS, OUTPUTS))
    assert plan.stored_as == "GPTQ, 4 bits, groups of 64, symmetric"
    assert plan.read_as == "int4 (group_size 64, symmetric True)"
    assert layer.weight.symmetric
    assert plan.bits_per_weight == pytest.approx(4 + (16 + 4) / 64 + 32 / OUTPUTS)


@pytest.mark.parametrize("said", [1, 2])
@pytest.mark.parametrize("true", [1, 2])
def test_the_numbers_tell_the_version_of_symmetric_files(said, true):
    codes, tensors = layer_of(version=true)
    _, layer = read(GptqReader(config(version=said)), stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)


def test_a_zero_point_of_zero_borrows_from_its_neighbour_in_version_1():
    codes, _ = layer_of(symmetric=False)
    codes = dataclasses.replace(codes, zero=np.zeros_like(codes.zero))
    tensors = gptq(codes, 4, version=1)
    assert (tensors["qzeros"] == -0x11111111).all()
    _, layer = read(GptqReader(config()), stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)


def test_without_an_index_groups_are_consecutive():
    codes, tensors = layer_of(index=False)
    _, layer = read(GptqReader(config()), stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)
    assert layer.order is None


def test_layers_of_other_widths_are_read_where_the_config_says_so():
    codes, tensors = layer_of(bits=8)
    _, layer = read(GptqReader(config(4, dynamic={"+:.*": {"bits": 8}})), stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [False, True])
def test_scales_of_any_sign(bits, symmetric, act_order):
    """auto-round writes negative ones."""
    codes, _ = layer_of(bits, symmetric=symmetric, act_order=act_order)
    codes.scale[::2, 1] *= -1
    codes.scale[3] *= -1
    codes.scale[5, 2] = 0
    plan, layer = read(GptqReader(config(bits)), stored(gptq(codes, bits), INPUTS, OUTPUTS))
    assert plan.format == ("int4" if bits <= 4 else "")
    assert torch.equal(values(layer, torch.float16), codes.values)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_groups_of_scale_zero_hold_zeros(bits):
    codes, _ = layer_of(bits)
    codes.scale[5, 2] = 0
    plan, layer = read(GptqReader(config(bits)), stored(gptq(codes, bits), INPUTS, OUTPUTS))
    assert plan.format == ("int4" if bits == 4 else "planes")
    assert torch.equal(values(layer, torch.float16), codes.values)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("inputs", "size"), [(192, 128), (96, 64), (320, 256), (160, 64)])
def test_the_last_group_may_have_fewer_inputs(inputs, size, act_order):
    torch.manual_seed(inputs)
    codes = rounded(torch.randn(OUTPUTS, inputs), 4, size, False, act_order=act_order)
    reader = GptqReader(config(group_size=size, desc_act=act_order))
    plan, layer = read(reader, stored(gptq(codes, 4, index=act_order), inputs, OUTPUTS))
    assert plan.format == "int4"
    assert torch.equal(values(layer, torch.float16), codes.values)


@pytest.mark.parametrize("index", [torch.zeros(INPUTS, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)])
def test_without_act_order_an_index_of_zeros_says_nothing(index):
    codes, tensors = layer_of()
    reader = GptqReader(config(group_size=64, desc_act=False))
    plan, layer = read(reader, stored({**tensors, "g_idx": index}, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)
    assert not plan.ordered


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_that_float16_holds_stay_packed(dtype):
    torch.manual_seed(1)
    codes = rounded(torch.randn(OUTPUTS, INPUTS), 4, 64, True, dtype=torch.float16)
    codes = dataclasses.replace(codes, scale=codes.scale.to(torch.bfloat16).to(dtype))
    plan, layer = read(GptqReader(config()), stored(gptq(codes, 4), INPUTS, OUTPUTS))
    assert plan.format == "int4"
    assert torch.equal(values(layer, dtype), codes.values)


def test_scales_that_float16_does_not_hold_make_a_dense_layer():
    torch.manual_seed(1)
    codes = rounded(torch.randn(OUTPUTS, INPUTS) * 1e-5, 4, 64, True, dtype=torch.float32)
    plan, layer = read(GptqReader(config()), stored(gptq(codes, 4), INPUTS, OUTPUTS))
    assert (plan.format, plan.why_dense) == ("", "float16 does not hold its torch.float32 scales exactly")
    assert torch.equal(layer.weight, codes.values)


def test_groups_that_ours_do_not_divide_make_a_dense_layer():
    torch.manual_seed(1)
    codes = rounded(torch.randn(OUTPUTS, INPUTS), 4, 16, True)
    plan, layer = read(GptqReader(config()), stored(gptq(codes, 4), INPUTS, OUTPUTS))
    assert plan.why_dense.startswith("groups of 16 inputs of 256")
    assert torch.equal(layer.weight, codes.values)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda t: t.pop("scales"), ValueError, "up_proj: scales is missing, the files hold g_idx, qweight, qzeros"),
        (lambda t: t.pop("qzeros"), ValueError, "qzeros is missing"),
        (lambda t: t.update(qweight=t["qweight"][:, :-1]), ValueError, r"qweight in the.file has shape \[32, 47\]"),
        (lambda t: t.update(qweight=t["qweight"][:-1]), ValueError, "256 inputs in 31 words are no codes of 4 bits"),
        (lambda t: t.update(qweight=t["qweight"].long()), TypeError, "torch.int64, expected torch.int32"),
        (lambda t: t.update(qzeros=t["qzeros"][:, :-1]), ValueError, r"qzeros in the.file has shape \[4, 5\]"),
        (lambda t: t["scales"][2].fill_(float("nan")), ValueError, r"48 scales that are NaN.* at \[2, 0\]"),
        (lambda t: t["scales"][1, 3].fill_(float("inf")), ValueError, r"scales .* holds 1 .*\(inf\) at \[1, 3\]"),
        (lambda t: t.pop("g_idx"), ValueError, "g_idx is missing"),
        (lambda t: t.update(scales=t["scales"][:3], qzeros=t["qzeros"][:3]), ValueError,
         "3 groups: 256 inputs in groups of 64, as config.json has it, are 4"),
        (lambda t: t["g_idx"][0].fill_(3), ValueError, "g_idx in the.file is no assignment .* group 0 has 63"),
        (lambda t: t["g_idx"][0].fill_(4), ValueError, "g_idx in the.file names groups 0 to 4, there are 4"),
        (lambda t: t["g_idx"][0].fill_(-2), ValueError, "names groups -2 to 3"),
        (lambda t: t.update(g_idx=t["g_idx"][:-1]), ValueError, r"g_idx in the.file has shape \[255\]"),
    ],
)  # fmt: skip
def test_damage_is_named(change, error, said):
    _, tensors = layer_of()
    change(tensors)
    with pytest.raises(error, match=said):
        GptqReader(config(group_size=64, desc_act=True)).plan(stored(tensors, INPUTS, OUTPUTS))


def test_another_width_than_the_config_says_is_refused():
    _, tensors = layer_of(bits=8)
    with pytest.raises(ValueError, match=r"qweight in the.file has shape \[64, 48\].* no codes of 4 bits"):
        GptqReader(config(4)).plan(stored(tensors, INPUTS, OUTPUTS))


@pytest.mark.parametrize(
    ("layout", "said"), [("marlin", "a repacked form for one kind of kernel"), ("new", "unknown here")]
)
def test_other_layouts_are_named(layout, said):
    with pytest.raises(ValueError, match=f"checkpoint_format '{layout}', {said}"):
        GptqReader({"bits": 4, "checkpoint_format": layout})
