"""Is an AutoRound layer read bit for bit, and is one that its settings do not describe refused by name?"""

import dataclasses

import numpy as np
import pytest
import torch

from hf_mlspec.checkpoints.autoround import AutoRoundReader
from tests.checkpoints.memory import read, stored, values
from tests.foreign_checkpoints import autoround, rounded

INPUTS, OUTPUTS = 256, 64
CONFIG = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True}
LESS, PLAIN, AWQ = "auto_round:auto_gptq", "auto_round", "auto_round:auto_awq"


def layer_of(packing=LESS, bits=4, size=64, symmetric=True):
    torch.manual_seed(bits)
    codes = rounded(torch.randn(OUTPUTS, INPUTS), bits, size, symmetric)
    if packing == LESS:  # which has no zero point of 0
        codes = dataclasses.replace(codes, zero=np.maximum(codes.zero, 1))
    return codes, autoround(codes, bits, packing)


def settings(packing=LESS, **changes):
    return {**CONFIG, "packing_format": packing, **changes}


@pytest.mark.parametrize("size", [-1, 32, 128])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize(
    ("packing", "bits"),
    [(packing, bits) for packing in (LESS, PLAIN, "auto_round:gptqmodel") for bits in range(2, 9)] + [(AWQ, 4)],
)
def test_values_are_those_of_the_file(packing, bits, symmetric, size):
    codes, tensors = layer_of(packing, bits, size, symmetric)
    reader = AutoRoundReader(settings(packing, bits=bits, group_size=size, sym=symmetric))
    plan, layer = read(reader, stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)
    groups = "a channel" if size == -1 else f"groups of {size}"
    assert plan.stored_as.startswith(f"AutoRound, {bits} bits, {groups}")
    assert plan.format == ("int4" if bits == 4 or (not symmetric and bits < 4) else "planes" if symmetric else "")


def test_negative_scales():
    codes, _ = layer_of()
    codes.scale[::3] *= -1
    _, layer = read(AutoRoundReader(settings()), stored(autoround(codes, 4, LESS), INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)


def test_one_code_and_one_zero_point_are_where_the_layout_has_them():
    codes, _ = layer_of(symmetric=False)
    codes = dataclasses.replace(codes, code=np.zeros_like(codes.code), zero=np.ones_like(codes.zero))
    codes.code[5, 11], codes.zero[9, 2] = 9, 6
    tensors = autoround(codes, 4, LESS)
    assert tensors["qweight"][1, 5] == 9 << 12  # nibble 3 of the second word of column 5
    assert tensors["qzeros"][2].tolist() == [0, 5 << 4, 0, 0, 0, 0, 0, 0]
    _, layer = read(AutoRoundReader(settings(sym=False)), stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)


@pytest.mark.parametrize("word", ["up_proj", "model.up_proj", ".*up.*", "^up_proj$"])
def test_a_layer_has_settings_of_its_own(word):
    codes, tensors = layer_of(PLAIN, 8, 32, True)
    extra = {"down_proj": {"bits": 16}, "([": {"bits": 3}, word: {"bits": 8, "group_size": 32}, "up": {"bits": 2}}
    reader = AutoRoundReader(settings(PLAIN, sym=True, extra_config=extra))
    _, layer = read(reader, stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.float16), codes.values)
    assert not reader.holds(stored({"weight": torch.zeros(2, 2)}, 2, 2))


def test_of_a_model_in_16_bits_one_layer_is_quantized():
    codes, tensors = layer_of()
    reader = AutoRoundReader(settings(bits=16, extra_config={"up_proj": {"bits": 4}}))
    assert torch.equal(values(read(reader, stored(tensors, INPUTS, OUTPUTS))[1], torch.float16), codes.values)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda t: t.pop("scales"), ValueError, "up_proj: scales is missing"),
        (lambda t: t.pop("qzeros"), ValueError, "up_proj: qzeros is missing"),
        (lambda t: t.update(qweight=t["qweight"][:-1]), ValueError, r"qweight in the.file has shape \[31, 64\]"),
        (lambda t: t.update(qweight=t["qweight"][:16]), ValueError, "are no codes of 4 bits"),
        (lambda t: t.update(qzeros=t["qzeros"][:-1]), ValueError, r"qzeros in the.file has shape \[3, 8\]"),
        (lambda t: t.update(scales=t["scales"][:1]), ValueError, r"scales in the.file has shape \[1, 64\]"),
        (lambda t: t["scales"][1, 3].fill_(float("inf")), ValueError, r"\(inf\) at \[1, 3\]"),
        (lambda t: t.update(scales=t["scales"].long()), TypeError, "scales in the.file is torch.int64"),
        (lambda t: t.update(had_K=torch.ones(2)), ValueError, "had_K in the.file is no tensor of an AutoRound layer"),
        (lambda t: t["qzeros"][0, 0].fill_(-1), ValueError, "qzeros in the.file holds zero points of 16"),
        (lambda t: t["qzeros"][0, 0].fill_(0), ValueError, "a zero point of 1, and config.json .* makes it 8"),
    ],
)
def test_damage_is_named(change, error, said):
    _, tensors = layer_of()
    change(tensors)
    with pytest.raises(error, match=said):
        AutoRoundReader(settings()).plan(stored(tensors, INPUTS, OUTPUTS))


@pytest.mark.parametrize(("wrote", "told", "found"), [(LESS, PLAIN, 7), (PLAIN, LESS, 9), (PLAIN, "", 9)])
def test_zero_points_stored_the_other_way_are_named(wrote, told, found):
    _, tensors = layer_of(wrote)
    with pytest.raises(ValueError, match=f"qzeros in the.file holds a zero point of {found}, "):
        AutoRoundReader(settings(told)).plan(stored(tensors, INPUTS, OUTPUTS))


def test_a_zero_point_of_an_awq_layer_that_is_not_the_middle_is_named():
    _, tensors = layer_of(AWQ, symmetric=False)
    with pytest.raises(ValueError, match=r"qzeros in the.file holds a zero point of "):
        AutoRoundReader(settings(AWQ)).plan(stored(tensors, INPUTS, OUTPUTS))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"packing_format": "auto_round:fp8_static"}, "packing_format 'auto_round:fp8_static': 'auto_round"),
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format 'auto_round:llm_compressor'"),
        ({"packing_format": AWQ, "bits": 8}, "8 bits in config.json, 4 are read"),
        ({"bits": 1}, "1 bits in config.json, 2 to 8 are read"),
        ({"bits": "4"}, "'4' bits in config.json"),
        ({"group_size": 0}, "group_size 0 in config.json"),
        ({"sym": "yes"}, "sym 'yes' in config.json"),
        ({"data_type": "mx_fp"}, "data_type 'mx_fp' in config.json"),
        ({"act_bits": 8}, "activations of 8 bits"),
        ({"rotation_config": {"kind": "hadamard"}}, "were rotated"),
        ({"extra_config": ["lm_head"]}, "extra_config holds no settings"),
    ],
)
def test_other_settings_are_named(change, said):
    with pytest.raises(ValueError, match=said):
        AutoRoundReader({**settings(), **change})


@pytest.mark.parametrize(("own", "said"), [({"bits": 16}, "16 bits"), ({"bits": 8}, "no codes of 8 bits")])
def test_a_layer_that_is_not_as_it_should_be_is_named(own, said):
    _, tensors = layer_of()
    with pytest.raises(ValueError, match=rf"up_proj.*{said}"):
        AutoRoundReader(settings(extra_config={"up_proj": own})).plan(stored(tensors, INPUTS, OUTPUTS))
