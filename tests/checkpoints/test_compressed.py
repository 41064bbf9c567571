"""Is what compressed-tensors writes read bit for bit, and is a damaged layer refused by name?"""

import pytest
import torch

from hf_mlspec.checkpoints.compressed import CompressedReader
from tests.checkpoints.memory import read, stored, values
from tests.foreign_checkpoints import rounded

pytest.importorskip("compressed_tensors", reason="compressed-tensors writes the checkpoints of these tests")
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

INPUTS, OUTPUTS = 256, 48
CONFIG = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
          "version": "0.20.0", "config_groups": {"group_0": {"format": "pack-quantized"}}}  # fmt: skip


def scheme_of(bits, size, symmetric):
    strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, dynamic=False, **strategy)
    return QuantizationScheme(targets=["Linear"], weights=args)


def written(bits=4, size=64, symmetric=True, act_order=False, dtype=torch.bfloat16):
    """What the library writes, and what it makes of it again."""
    torch.manual_seed(bits)
    codes = rounded(torch.randn(OUTPUTS, INPUTS), bits, size, symmetric, bits, act_order, dtype)
    scheme, middle = scheme_of(bits, size, symmetric), 2 ** (bits - 1)
    state = {"weight": codes.values, "weight_scale": codes.scale}
    state["weight_zero_point"] = torch.from_numpy(codes.zero - middle).to(torch.int8)
    packed = PackedQuantizationCompressor.compress(state, scheme)
    if not act_order:
        return packed, PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    # Versions before 0.20 stored a group of every input.
    packed["weight_packed"] = pack_to_int32(torch.from_numpy(codes.code - middle).to(torch.int8), bits)
    return {**packed, "weight_g_idx": torch.from_numpy(codes.group).to(torch.int32)}, codes.values


@pytest.mark.parametrize("act_order", [False, True], ids=["in-order", "act-order"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("size", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_values_are_those_of_the_library(bits, size, symmetric, act_order):
    if act_order and size == -1:
        return
    tensors, expected = written(bits, size, symmetric, act_order)
    plan, layer = read(CompressedReader(CONFIG), stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.bfloat16), expected)
    assert plan.format == ("planes" if symmetric and bits != 4 else "int4" if bits <= 4 else "")
    assert plan.ordered == (act_order and plan.format != "")


def test_the_bytes_of_symmetric_4_bit_codes_are_ours():
    tensors, _ = written()
    _, layer = read(CompressedReader(CONFIG), stored(tensors, INPUTS, OUTPUTS))
    assert torch.equal(layer.weight.weight_packed, tensors["weight_packed"].view(torch.uint8))


def test_an_index_of_minus_one_is_none():
    tensors, expected = written()
    tensors["weight_g_idx"] = torch.full((INPUTS,), -1, dtype=torch.int32)
    plan, layer = read(CompressedReader(CONFIG), stored(tensors, INPUTS, OUTPUTS))
    assert not plan.ordered
    assert torch.equal(values(layer, torch.bfloat16), expected)


def test_zero_points_of_older_files():
    tensors, expected = written(symmetric=False)
    _, plain = read(CompressedReader(CONFIG), stored(tensors, INPUTS, OUTPUTS))
    points = (plain.weight.weight_zero.to(torch.int16) - 8).to(torch.int8)
    _, layer = read(CompressedReader(CONFIG), stored({**tensors, "weight_zero_point": points}, INPUTS, OUTPUTS))
    assert torch.equal(values(layer, torch.bfloat16), expected)
    points[0, 0] = 9
    with pytest.raises(ValueError, match=r"weight_zero_point in the.file holds zero points beyond 4 bits"):
        CompressedReader(CONFIG).plan(stored({**tensors, "weight_zero_point": points}, INPUTS, OUTPUTS))


@pytest.mark.parametrize(
    ("scheme", "name"),
    [({"symmetric": False}, "weight_zero_point"), ({"symmetric": True, "actorder": "group"}, "weight_g_idx")],
)
def test_what_the_config_promises_is_missed(scheme, name):
    tensors, _ = written()
    config = {**CONFIG, "config_groups": {"group_0": {"weights": scheme}}}
    with pytest.raises(ValueError, match=f"up_proj: {name} is missing"):
        CompressedReader(config).plan(stored(tensors, INPUTS, OUTPUTS))


def test_one_scale_for_all():
    tensors, _ = written(4, -1)
    tensors["weight_scale"] = tensors["weight_scale"][:1, 0]
    plan, layer = read(CompressedReader(CONFIG), stored(tensors, INPUTS, OUTPUTS))
    assert (layer.weight.weight_scale == tensors["weight_scale"].half()).all()
    assert "a channel" in plan.stored_as


def mxfp4_written():
    torch.manual_seed(3)
    weight = torch.randn(OUTPUTS, INPUTS, dtype=torch.bfloat16)
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, dynamic=False,
                            scale_dtype=torch.uint8)  # fmt: skip
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    largest = weight.float().unflatten(-1, (-1, 32)).abs().amax(-1)
    scale = torch.exp2(torch.frexp(largest)[1] - 1 - 2).to(torch.bfloat16)
    packed = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return packed, MXFP4PackedCompressor.decompress(packed, scheme)["weight"]


MXFP4 = {**CONFIG, "format": "mxfp4-pack-quantized", "config_groups": {}}


def test_mxfp4_is_ours():
    tensors, expected = mxfp4_written()
    plan, layer = read(CompressedReader(MXFP4), stored(tensors, INPUTS, OUTPUTS))
    assert (plan.format, plan.stored_as) == ("mxfp4", "compressed-tensors, MXFP4")
    assert torch.equal(values(layer, torch.bfloat16), expected)
    assert torch.equal(layer.weight.weight_packed, tensors["weight_packed"])


def test_scales_of_the_wrong_version_are_named():
    tensors, _ = mxfp4_written()
    with pytest.raises(ValueError, match=r"compressed-tensors 0.13.0 hold scales four times too small"):
        CompressedReader({**MXFP4, "version": "0.13.0"}).plan(stored(tensors, INPUTS, OUTPUTS))


def test_nan_scales_of_mxfp4_are_named():
    tensors, _ = mxfp4_written()
    tensors["weight_scale"][3, 1] = 255
    with pytest.raises(ValueError, match=r"weight_scale in the.file holds NaN codes \(255\)"):
        CompressedReader(MXFP4).plan(stored(tensors, INPUTS, OUTPUTS))


def test_nvfp4_is_named():
    tensors, _ = mxfp4_written()
    tensors["weight_global_scale"] = torch.ones(1)
    with pytest.raises(ValueError, match="up_proj is NVFP4"):
        CompressedReader(MXFP4).plan(stored(tensors, INPUTS, OUTPUTS))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda t: t.pop("weight_scale"), ValueError, "up_proj: weight_scale is missing"),
        (lambda t: t.update(weight_packed=t["weight_packed"][:-1]), ValueError, r"weight_packed in the.file has "),
        (lambda t: t.update(weight_packed=t["weight_packed"][:, :3]), ValueError, "in 3 words are no codes of 2 to 8"),
        (lambda t: t.update(weight_shape=torch.tensor([48, 128])), ValueError, r"says \[48, 128\], .* \[48, 256\]"),
        (lambda t: t["weight_scale"][1].fill_(float("nan")), ValueError, r"weight_scale .* holds 4 .* at \[1, 0\]"),
        (lambda t: t.update(weight_scale=t["weight_scale"][:, :3]), ValueError, "3 groups, which do not divide 256"),
        (lambda t: t.update(weight_g_idx=torch.arange(256).int() // 3), ValueError, "names groups 0 to 85"),
    ],
)  # fmt: skip
def test_damage_is_named(change, error, said):
    tensors, _ = written()
    change(tensors)
    with pytest.raises(error, match=said):
        CompressedReader(CONFIG).plan(stored(tensors, INPUTS, OUTPUTS))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({"config_groups": {"g": {"format": "float-quantized"}}}, "format 'float-quantized'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({"quantization_status": "frozen"}, "'frozen', not 'compressed'"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "were rotated"),
    ],
)
def test_what_is_not_read_is_named(change, said):
    with pytest.raises(ValueError, match=said):
        CompressedReader({**CONFIG, **change})
