"""Is every operand that does not fit refused by name, before anything is computed, by kernel and reference alike?"""

import cases
import pytest
import test_step_ops
import torch

from hf_mlspec import ops
from hf_mlspec.formats import int4, int4_int8, mxfp4, nested
from hf_mlspec.formats import planes as bitplanes
from hf_mlspec.formats.nested import codebooks
from hf_mlspec.ops.operator import REFERENCES

F16, U8 = torch.float16, torch.uint8


def good(op: str) -> dict:
    """Operands that fit, by the names of the schema."""
    x = torch.zeros(2, 64)
    if op in ("bf16_linear", "f32_linear"):
        dtype = torch.bfloat16 if op == "bf16_linear" else torch.float32
        return {"x": x, "weight": torch.zeros(8, 64, dtype=dtype), "bias": None}
    if op == "quantize_rows":
        return {"x": x, "group_size": 32, "bits": 8, "activation_clip": 1.0}
    if op == "rms_norm":
        return {"x": x, "weight": torch.ones(64), "eps": 1e-5, "residual": x}
    if op == "silu_mul":
        return {"gate": x, "up": x}
    if op in ("rope_write", "ragged_attention"):
        q, k, v, cos, sin, starts, keys, values = cases.cache_operands(torch.float32, torch.float32)
        cache = {"keys": keys, "values": values}
        if op == "rope_write":
            return {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "starts": starts, **cache}
        return {"q": q, **cache, "starts": starts, "scale": 1.0, "window": 0, "softcap": 0.0, "draft_window": 0}
    of_planes = op.startswith("bitplane_") or op.startswith("nested_")
    return good_of_planes(op, x) if of_planes else good_of_codes(op, x)


def good_of_codes(op: str, x: torch.Tensor) -> dict:
    """Of an op of 4-bit codes."""
    if op == "mxfp4_linear":
        tiles = ops.prepack_mxfp4(*mxfp4.quantize(torch.ones(8, 64)))
        weight = dict(zip(("weight_tiles", "scale_tiles"), tiles, strict=True))
        return {"x": x, **weight, "out_features": 8, "bias": None, "activation_bits": 16}
    if op == "int4_int8_linear":
        tiles = ops.prepack_int4_int8(*int4_int8.Int4Int8Weight.from_dense(torch.ones(8, 256)).parts)
        return {"x": torch.zeros(2, 256), "weight_tiles": tiles.weight, "scale_tiles": tiles.scale,
                "out_features": 8, "bias": None, "activation_bits": 4, "activation_clip": 1.0}  # fmt: skip
    tiles = ops.prepack_int4(*int4.quantize(torch.ones(8, 64), 32, False))
    weight = dict(zip(("weight_tiles", "scale_tiles", "zero_tiles"), tiles, strict=True))
    if op == "int4_dequantize":
        return {**weight, "out_features": 8, "group_size": 32}
    return {"x": x, **weight, "out_features": 8, "bias": None, "group_size": 32, "activation_bits": 8,
            "activation_clip": 1.0}  # fmt: skip


def good_of_planes(op: str, x: torch.Tensor) -> dict:
    """Of an op of nested weights or of bit-planes."""
    if op == "bitplane_part":
        return {**good_of_planes("bitplane_linear", x), "total_planes": 8, "outputs_of_weight": 0}
    if op == "bitplane_linear":
        weight = bitplanes.quantize(torch.ones(8, 64), 6, 32)
        tiles = ops.prepack_planes(weight.planes, weight.scale)
        return {"x": x, "plane_tiles": tiles[0], "scale_tiles": tiles[1], "out_features": 8, "bias": None,
                "group_size": 32, "zero_doubled": 64, "num_planes": 3}  # fmt: skip
    if op == "bitplane_integers":
        names = ("x", "plane_tiles", "scale_tiles", "out_features", "bias", "group_size")
        given = good_of_planes("bitplane_linear", x)
        return {name: given[name] for name in names} | {"activation_group": 32, "activation_bits": 8}
    levels = codebooks.codebook_of("lloyd_max")
    tiles = ops.prepack_nested(*nested.split(torch.ones(8, 64).bfloat16(), levels)[:4])
    table = dict(zip(("draft_tiles", "exponent_tiles", "low_tiles"), tiles, strict=True))
    if op == "nested_rows":
        return {"ids": torch.zeros(2, dtype=torch.int32), **table, "out_features": 8, "scale": 1.0}
    return {"x": x, **table, "codebook": levels, "out_features": 8, "bias": None, "weight_bits": 4,
            "activation_bits": 8}  # fmt: skip


OPS = ("mxfp4_linear", "int4_linear", "int4_dequantize", "bf16_linear", "f32_linear", "quantize_rows", "rms_norm",
       "silu_mul", "rope_write", "ragged_attention", "nested_linear", "nested_rows", "bitplane_linear",
       "bitplane_integers", "int4_int8_linear")  # fmt: skip
I8_LANES = torch.zeros(3, 2, 150, 44, dtype=torch.int8)
EIGHT_PLANES = torch.zeros(8, 1, 2, 64, dtype=U8)
BAD = [
    ("bitplane_integers", {"x": torch.zeros(2, 96)}, ValueError, r"x has shape .*takes in_features = 64"),
    ("bitplane_integers", {"x": torch.zeros(2, 64, dtype=torch.int8)}, TypeError, "x is .*, expected float32"),
    ("bitplane_integers", {"plane_tiles": EIGHT_PLANES}, ValueError, "stores 8 planes, integers meet 1 to 7"),
    ("bitplane_integers", {"plane_tiles": torch.zeros(6, 1, 64, dtype=U8)}, ValueError, "plane_tiles has shape"),
    ("bitplane_integers", {"scale_tiles": torch.zeros(1, 2, 16)}, TypeError, "scale_tiles is"),
    ("bitplane_integers", {"scale_tiles": torch.zeros(1, 1, 16, dtype=F16)}, ValueError, "scale_tiles has shape"),
    ("bitplane_integers", {"activation_bits": 16}, ValueError, r"activation_bits is 16, choose one of \[4, 8\]"),
    ("bitplane_integers", {"activation_group": 16}, ValueError, r"activation_group is 16, choose one of \[32, 64"),
    ("bitplane_integers", {"activation_group": 64}, ValueError, "activation_group is 64, more than group_size = 32"),
    ("bitplane_integers", {"group_size": 48}, ValueError, r"group_size is 48, choose one of \[32, 64, 128\]"),
    ("bitplane_integers", {"out_features": 17}, ValueError, "plane_tiles has shape"),
    ("bitplane_integers", {"bias": torch.zeros(9)}, ValueError, r"bias has shape \[9\], expected \[8\]"),
    (
        "mxfp4_linear",
        {"x": torch.zeros(2, 96)},
        ValueError,
        r"x has shape \[2, 96\], the weight takes in_features = 64",
    ),
    ("mxfp4_linear", {"x": torch.tensor(1.0)}, ValueError, r"x has shape \[\]"),
    (
        "mxfp4_linear",
        {"x": torch.zeros(2, 64, dtype=torch.float64)},
        TypeError,
        "expected float32, bfloat16 or float16",
    ),
    (
        "mxfp4_linear",
        {"weight_tiles": torch.zeros(8, 32, dtype=U8)},
        ValueError,
        r"weight_tiles has shape \[8, 32\].*prepack",
    ),
    ("mxfp4_linear", {"weight_tiles": torch.zeros(1, 2, 256)}, TypeError, "weight_tiles is"),
    (
        "mxfp4_linear",
        {"weight_tiles": torch.zeros(1, 256, 2, dtype=U8).transpose(1, 2)},
        ValueError,
        "weight_tiles .*not contiguous",
    ),
    (
        "mxfp4_linear",
        {"scale_tiles": torch.zeros(1, 3, 16, dtype=U8)},
        ValueError,
        r"scale_tiles has shape \[1, 3, 16\], expected \[1, 2, 16\]",
    ),
    ("mxfp4_linear", {"scale_tiles": torch.zeros(1, 2, 16)}, TypeError, "scale_tiles is"),
    ("mxfp4_linear", {"out_features": 17}, ValueError, "out_features is 17, weight_tiles hold 1 tiles of 16"),
    ("mxfp4_linear", {"out_features": -1}, ValueError, "out_features is -1"),
    ("mxfp4_linear", {"bias": torch.zeros(9)}, ValueError, r"bias has shape \[9\], expected \[8\]"),
    ("mxfp4_linear", {"bias": torch.zeros(8, dtype=torch.int64)}, TypeError, "bias is"),
    ("mxfp4_linear", {"activation_bits": 4}, ValueError, r"activation_bits is 4, choose one of \[8, 16\]"),
    ("int4_linear", {"group_size": 16}, ValueError, r"group_size is 16, choose one of \[32, 64, 128\]"),
    ("int4_linear", {"group_size": 128}, ValueError, "group_size 128 does not divide in_features = 64"),
    ("int4_linear", {"activation_bits": 5}, ValueError, r"activation_bits is 5, choose one of \[4, 8, 16\]"),
    ("int4_linear", {"zero_tiles": torch.zeros(1, 1, 16, dtype=U8)}, ValueError, r"zero_tiles has shape \[1, 1, 16\]"),
    ("int4_linear", {"scale_tiles": torch.zeros(1, 2, 16, dtype=torch.bfloat16)}, TypeError, "scale_tiles is"),
    ("int4_int8_linear", {"x": torch.zeros(2, 384)}, ValueError, "the weight takes in_features = 256"),
    ("int4_int8_linear", {"activation_bits": 5}, ValueError, r"activation_bits is 5, choose one of \[4, 8, 16\]"),
    ("int4_int8_linear", {"scale_tiles": torch.zeros(1, 3, 16)}, TypeError, "scale_tiles is"),
    ("int4_int8_linear", {"scale_tiles": torch.zeros(1, 2, 16, dtype=F16)}, ValueError, r"scale_tiles has shape"),
    ("int4_int8_linear", {"weight_tiles": torch.zeros(1, 8, 256, dtype=U8), "x": torch.zeros(2, 128),
                          "scale_tiles": torch.zeros(1, 2, 16, dtype=F16)},
     ValueError, "weight_tiles have 256 columns, expected .*384"),
    ("int4_dequantize", {"weight_tiles": torch.zeros(1, 2, 256)}, TypeError, "weight_tiles is"),
    ("int4_dequantize", {"weight_tiles": torch.zeros(1, 2, 128, dtype=U8)}, ValueError, "weight_tiles .*prepack"),
    ("int4_dequantize", {"out_features": 17}, ValueError, "out_features is 17, weight_tiles hold 1 tiles of 16"),
    ("int4_dequantize", {"group_size": 16}, ValueError, r"group_size is 16, choose one of \[32, 64, 128\]"),
    ("int4_dequantize", {"group_size": 128}, ValueError, "group_size 128 does not divide in_features = 64"),
    ("int4_dequantize", {"scale_tiles": torch.zeros(1, 1, 16, dtype=F16)}, ValueError, r"scale_tiles has shape"),
    ("int4_dequantize", {"scale_tiles": torch.zeros(1, 2, 16)}, TypeError, "scale_tiles is"),
    ("int4_dequantize", {"zero_tiles": torch.zeros(1, 16, 2, dtype=U8).mT}, ValueError, "zero_tiles .*not contiguous"),
    ("nested_linear", {"x": torch.zeros(2, 96)}, ValueError, r"x has shape \[2, 96\], the weight takes"),
    ("nested_linear", {"x": torch.zeros(2, 64).double()}, TypeError, "expected float32, bfloat16 or float16"),
    ("nested_linear", {"draft_tiles": torch.zeros(2, 256, dtype=U8)}, ValueError, r"draft_tiles has .*prepack_nested"),
    ("nested_linear", {"draft_tiles": torch.zeros(1, 2, 256)}, TypeError, "draft_tiles is"),
    ("nested_linear", {"exponent_tiles": torch.zeros(1, 3, 16, dtype=U8)}, ValueError, r"expected \[1, 2, 16\]"),
    ("nested_linear", {"exponent_tiles": torch.zeros(1, 2, 16, dtype=F16)}, TypeError, "exponent_tiles is"),
    ("nested_linear", {"low_tiles": torch.zeros(1, 2, 512, dtype=U8)}, ValueError, r"low_tiles .*\[1, 2, 768\]"),
    ("nested_linear", {"low_tiles": torch.zeros(1, 768, 2, dtype=U8).mT}, ValueError, "low_tiles .*not contiguous"),
    ("nested_linear", {"codebook": torch.zeros(16, dtype=U8)}, ValueError, r"codebook has shape \[16\]"),
    ("nested_linear", {"codebook": torch.zeros(8, dtype=torch.int8)}, TypeError, "codebook is"),
    ("nested_linear", {"out_features": 17}, ValueError, "out_features is 17, draft_tiles hold 1 tiles of 16"),
    ("nested_linear", {"out_features": -1}, ValueError, "out_features is -1"),
    ("nested_linear", {"bias": torch.zeros(9)}, ValueError, r"bias has shape \[9\], expected \[8\]"),
    ("nested_linear", {"weight_bits": 16}, ValueError, "weight_bits is 16 and activation_bits 8, choose one of"),
    ("nested_linear", {"weight_bits": 8}, ValueError, "weight_bits is 8 and activation_bits 8, choose"),
    ("nested_linear", {"activation_bits": 4}, ValueError, "weight_bits is 4 and activation_bits 4, choose"),
    ("nested_rows", {"ids": torch.zeros(2)}, TypeError, "ids is"),
    ("nested_rows", {"ids": torch.zeros(1, 2, dtype=torch.int32)}, ValueError, r"ids has shape \[1, 2\]"),
    ("nested_rows", {"out_features": 99}, ValueError, "out_features is 99, draft_tiles hold 1 tiles of 16"),
    ("nested_rows", {"low_tiles": torch.zeros(1, 2, 512, dtype=U8)}, ValueError, r"low_tiles .*\[1, 2, 768\]"),
    ("nested_rows", {"scale": float("inf")}, ValueError, "scale is inf, expected a finite number"),
    ("bitplane_linear", {"x": torch.zeros(2, 96)}, ValueError, r"x has shape \[2, 96\], the weight takes"),
    ("bitplane_linear", {"plane_tiles": torch.zeros(6, 1, 128, dtype=U8)}, ValueError, "plane_tiles .*prepack_planes"),
    ("bitplane_linear", {"plane_tiles": torch.zeros(9, 1, 2, 64, dtype=U8)}, ValueError, "expected .1 to 8 planes"),
    ("bitplane_linear", {"plane_tiles": torch.zeros(6, 1, 2, 64)}, TypeError, "plane_tiles is"),
    ("bitplane_linear", {"scale_tiles": torch.zeros(1, 1, 16).half()}, ValueError, r"scale_tiles .*\[1, 2, 16\]"),
    ("bitplane_linear", {"scale_tiles": torch.zeros(1, 2, 16)}, TypeError, "scale_tiles is"),
    ("bitplane_linear", {"out_features": 17}, ValueError, r"plane_tiles .*\[6, 1, 2, 64\], expected \[6, 2, 2, 64\]"),
    ("bitplane_linear", {"out_features": -1}, ValueError, "out_features is -1"),
    ("bitplane_linear", {"group_size": 16}, ValueError, r"group_size is 16, choose one of \[32, 64, 128\]"),
    ("bitplane_linear", {"group_size": 128}, ValueError, "group_size 128 does not divide in_features = 64"),
    ("bitplane_linear", {"num_planes": 7}, ValueError, "num_planes is 7, the weight stores 6: choose 1 to 6"),
    ("bitplane_linear", {"num_planes": 0}, ValueError, "num_planes is 0"),
    ("bitplane_linear", {"zero_doubled": 127}, ValueError, "zero_doubled is 127, twice a code of 6 .* 0 to 126"),
    ("bitplane_linear", {"zero_doubled": -1}, ValueError, "zero_doubled is -1"),
    ("bitplane_part", {"total_planes": 5}, ValueError, "total_planes is 5, the tiles store 6: it is that to 8"),
    ("bitplane_part", {"total_planes": 9}, ValueError, "total_planes is 9"),
    ("bitplane_part", {"outputs_of_weight": 7}, ValueError, "outputs_of_weight is 7, and out_features, some .* 8"),
    ("bitplane_part", {"num_planes": 7}, ValueError, "num_planes is 7, the weight stores 6: choose 1 to 6"),
    ("bitplane_part", {}, ValueError, "zero_doubled is 64, twice a code of 8 planes .* from 254 to 256"),
    ("bf16_linear", {"weight": torch.zeros(8, 64)}, TypeError, "weight is"),
    ("bf16_linear", {"weight": torch.zeros(64, 8, dtype=torch.bfloat16).T}, ValueError, "weight .*not contiguous"),
    ("f32_linear", {"weight": torch.zeros(64)}, ValueError, r"weight has shape \[64\], expected \[out, in\]"),
    ("quantize_rows", {"bits": 2}, ValueError, r"bits is 2, choose one of \[4, 8\]"),
    ("quantize_rows", {"group_size": 0}, ValueError, "group_size is 0"),
    ("quantize_rows", {"x": torch.tensor(1.0)}, ValueError, "x is a scalar"),
    ("rms_norm", {"weight": torch.ones(63)}, ValueError, r"weight has shape \[63\], expected \[64\]"),
    ("rms_norm", {"residual": torch.zeros(1, 64)}, ValueError, r"residual has shape \[1, 64\], expected \[2, 64\]"),
    ("rms_norm", {"residual": torch.zeros(2, 64, dtype=F16)}, TypeError, "residual is"),
    ("silu_mul", {"up": torch.zeros(2, 32)}, ValueError, r"up has shape \[2, 32\], expected \[2, 64\]"),
    (
        "rope_write",
        {"starts": [0, 146, 70]},
        ValueError,
        "row 1 starts at 146 and has 5 tokens, the cache has slots 0 to 149",
    ),
    ("rope_write", {"starts": [0, 1, -1]}, ValueError, "row 2 starts at -1"),
    ("rope_write", {"starts": [0, 1]}, ValueError, "2 starts for 3 rows"),
    (
        "rope_write",
        {"k": torch.zeros(3, 5, 3, 40)},
        ValueError,
        r"k has shape \[3, 5, 3, 40\], expected \[3, 5, 2, 40\]",
    ),
    ("rope_write", {"v": torch.zeros(3, 5, 2, 40, dtype=F16)}, TypeError, "v is"),
    ("rope_write", {"cos": torch.zeros(9, 18)}, ValueError, r"sin has shape|row 0|row 1 reaches position"),
    ("rope_write", {"cos": torch.zeros(9, 21)}, ValueError, r"cos has shape \[9, 21\].*rotary_dim up to 40"),
    (
        "rope_write",
        {"cos": torch.zeros(9, 18), "sin": torch.zeros(9, 18)},
        ValueError,
        "row 1 reaches position 149, cos has positions 0 to 8",
    ),
    ("rope_write", {"keys": torch.zeros(3, 2, 150, 40, dtype=F16)}, TypeError, "a cache is .*bfloat16, int8 or uint8"),
    (
        "rope_write",
        {"keys": I8_LANES[..., :40], "values": I8_LANES[..., :40]},
        ValueError,
        r"keys of shape \[3, 2, 150, 40\] is not contiguous",
    ),
    (
        "rope_write",
        {"keys": torch.zeros(3, 2, 150, 40, dtype=torch.int8), "values": torch.zeros(3, 2, 150, 40, dtype=torch.int8)},
        ValueError,
        r"q has shape \[3, 5, 6, 40\], the cache takes \[3, tokens, a multiple of 2 heads, 36\]",
    ),
    ("rope_write", {"values": I8_LANES}, TypeError, "values is .*, keys is"),
    (
        "ragged_attention",
        {"keys": torch.zeros(3, 2, 150, 4, dtype=torch.int8), "values": torch.zeros(3, 2, 150, 4, dtype=torch.int8)},
        ValueError,
        r"keys has shape \[3, 2, 150, 4\], rows of (an int8 cache|Char) are codes and 4 bytes behind them",
    ),
    (
        "rope_write",
        {"keys": torch.zeros(3, 2, 40, 150).transpose(2, 3)},
        ValueError,
        "keys .* not contiguous in its last two axes",
    ),
    (
        "rope_write",
        {"values": torch.zeros(3, 2, 149, 40)},
        ValueError,
        r"values has shape \[3, 2, 149, 40\], expected \[3, 2, 150, 40\]",
    ),
    ("ragged_attention", {"q": torch.zeros(3, 5, 5, 40)}, ValueError, r"q has shape \[3, 5, 5, 40\], the cache takes"),
    ("ragged_attention", {"q": torch.zeros(3, 151, 2, 40)}, ValueError, "row 0 starts at 0 and has 151 tokens"),
    ("ragged_attention", {"window": -1}, ValueError, "window is -1"),
    ("ragged_attention", {"draft_window": -1}, ValueError, "draft_window is -1"),
    ("ragged_attention", {"softcap": float("nan")}, ValueError, "softcap nan"),
    (
        "ragged_attention",
        {
            "q": torch.zeros(1, 1, 1, 520),
            "keys": torch.zeros(1, 1, 8, 520),
            "values": torch.zeros(1, 1, 8, 520),
            "starts": [0],
        },
        ValueError,
        "head_dim is 520, the kernel takes up to 512",
    ),
]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("op", "change", "error", "message"), BAD, ids=[f"{b[0]}-{'-'.join(b[1])}" for b in BAD])
def test_operands_that_do_not_fit(op, change, error, message, compiled):
    operands = {**good(op), **change}
    function = getattr(torch.ops.mlspec, op).default if compiled else REFERENCES[op]
    with pytest.raises(error, match=rf"{op}: .*({message})"):
        function(*operands.values())


OPERANDS = {op: good for op in OPS} | {op: test_step_ops.good for op in test_step_ops.OPS}


@pytest.mark.parametrize("op", OPERANDS)
def test_operands_on_two_devices_are_refused(op):
    one_tensor = op in ("quantize_rows", "gated", "gated_pairs")
    assert cases.refuses_two_devices(op, OPERANDS[op](op)) == (not one_tensor)


@pytest.mark.parametrize("op", OPERANDS)
def test_opcheck_and_meta_tensors(op):
    cases.check_registration(op, OPERANDS[op](op))
