"""What must every op compute, whatever the instruction set? Checks that run in the tests' process and in others."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.formats import CACHE_FORMATS, activations, int4, int4_int8, mxfp4, nested, stored_format
from hf_mlspec.formats import planes as bitplanes
from hf_mlspec.formats.cache import CacheFormat
from hf_mlspec.formats.nested import codebooks
from hf_mlspec.formats.packing import unpack_nibbles
from hf_mlspec.ops import library
from hf_mlspec.ops.operator import REFERENCES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
BF16_SETS = ("avx512bf16", "amx")  # instruction sets that multiply bfloat16
SHAPES = ((1, 32), (16, 64), (33, 96), (50, 1120), (130, 512))  # out, in: one block; no multiple of a tile, of a piece
# Rows of a call. The sanitizers of .ci/run, under which kernels are slow, see those at the edges of tiles.
FEW = os.environ.get("MLSPEC_FEW_ROWS") == "1"
EDGES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64)
COUNTS = (*EDGES, 72) if FEW else (*range(1, 65), 288, 640)


@dataclass
class Linear:
    """A linear op with its weight. dense: float64 ``[out, in]``; seen: x as the kernel multiplies it, float64."""

    name: str
    call: Callable[..., Tensor]
    refer: Callable[..., Tensor]
    dense: Tensor
    seen: Callable[[Tensor], Tensor]
    integers: tuple[Tensor, Tensor, int, int] | None = None  # weight codes, float32 scales, group, activation bits


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mxfp4_case(out: int, size: int, bits: int) -> Linear:
    packed, scale = mxfp4.quantize(seeded(out, size, seed=1) * 0.05)
    tiles = ops.prepack_mxfp4(packed, scale)
    doubled = mxfp4.dequantize(packed, torch.full_like(scale, 128)).to(torch.int8)
    return Linear(
        f"mxfp4 {bits}",
        lambda x, bias=None: ops.mxfp4_linear(x, *tiles, out, bias, bits),
        lambda x, bias=None: REFERENCES["mxfp4_linear"](x, *tiles, out, bias, bits),
        mxfp4.dequantize(packed, scale, torch.float64),
        (lambda x: x.bfloat16().double()) if bits == 16 else lambda x: quantized(x, 32, 8),
        None if bits == 16 else (doubled, mxfp4.scale_values()[scale.int()] / 2, 32, 8),
    )


def int4_case(out: int, size: int, group: int, symmetric: bool, bits: int, clip: float = 1.0) -> Linear:
    packed, scale, zero = int4.quantize(seeded(out, size, seed=2) * 0.05, group, symmetric)
    tiles = ops.prepack_int4(packed, scale, zero)
    codes = unpack_nibbles(packed).to(torch.int8).unflatten(-1, (-1, group))
    codes = (codes - (8 if zero is None else zero.to(torch.int8).unsqueeze(-1))).flatten(-2)
    return Linear(
        f"int4 g{group} {'symmetric' if symmetric else 'asymmetric'} {bits} clipped at {clip}",
        lambda x, bias=None: ops.int4_linear(
            x, *tiles, out, bias, group_size=group, activation_bits=bits, activation_clip=clip
        ),
        lambda x, bias=None: REFERENCES["int4_linear"](x, *tiles, out, bias, group, bits, clip),
        int4.dequantize(packed, scale, zero, torch.float64),
        (lambda x: x.bfloat16().double()) if bits == 16 else lambda x: quantized(x, group, bits, clip),
        None if bits == 16 or clip != 1 else (codes, scale.float(), group, bits),
    )


def int4_int8_case(out: int, size: int, bits: int, clip: float = 1.0) -> Linear:
    """Outliers that matter: their weights are larger. At 4 bits they meet 8-bit activations, which are not clipped."""
    wide = seeded(out, size, seed=6) * 0.05
    wide[:, -128:] *= 4
    weight = int4_int8.Int4Int8Weight.from_dense(wide)
    tiles = ops.prepack_int4_int8(*weight.parts)

    def seen(x: Tensor) -> Tensor:
        inputs, outliers = x.split([size - 128, 128], -1)
        return torch.cat([quantized(inputs, 128, bits, clip), quantized(outliers, 128, 8)], -1)

    return Linear(
        f"int4-int8 {bits} clipped at {clip}",
        lambda x, bias=None: ops.int4_int8_linear(x, *tiles, out, bias, activation_bits=bits, activation_clip=clip),
        lambda x, bias=None: REFERENCES["int4_int8_linear"](x, *tiles, out, bias, bits, clip),
        weight.dequantize(torch.float64),
        (lambda x: x.bfloat16().double()) if bits == 16 else seen,
    )


def nested_case(out: int, size: int, weight_bits: int, bits: int, codebook: str = "lloyd_max") -> Linear:
    levels, weight = codebooks.codebook_of(codebook), (seeded(out, size, seed=4) * 0.05).bfloat16()
    parts = nested.split(weight, levels)
    tiles = ops.prepack_nested(*parts[:4])
    units = nested.draft_levels(levels)[unpack_nibbles(parts.packed).int()]
    return Linear(
        f"nested {weight_bits} {bits} {codebook}",
        lambda x, bias=None: ops.nested_linear(
            x, *tiles, levels, out, bias, weight_bits=weight_bits, activation_bits=bits
        ),
        lambda x, bias=None: REFERENCES["nested_linear"](x, *tiles, levels, out, bias, weight_bits, bits),
        weight.double() if weight_bits == 16 else nested.dequantize_draft(*parts[:2], levels, torch.float64),
        (lambda x: x.bfloat16().double()) if bits == 16 else lambda x: quantized(x, 32, 8),
        None if bits == 16 else (units, nested.draft_scales(parts.scale), 32, 8),
    )


def planes_case(out: int, size: int, planes: int | str, group: int, used: int) -> Linear:
    weight = bitplanes.quantize(seeded(out, size, seed=5) * 0.05, planes, group)
    tiles = ops.prepack_planes(weight.planes, weight.scale)
    numbers = {"group_size": group, "zero_doubled": weight.zero_doubled, "num_planes": used}
    return Linear(
        f"planes {planes} g{group}, the first {used}",
        lambda x, bias=None: ops.bitplane_linear(x, *tiles, out, bias, **numbers),
        lambda x, bias=None: REFERENCES["bitplane_linear"](x, *tiles, out, bias, *numbers.values()),
        bitplanes.dequantize(*weight, used, torch.float64),
        lambda x: x.bfloat16().double(),
    )


def many_precisions(out: int, size: int) -> Iterator[Linear]:
    """Nested weights and bit-planes, every mode of them."""
    yield from (nested_case(out, size, *bits) for bits in ((16, 16), (4, 16), (4, 8)))
    yield nested_case(out, size, 4, 8, "mxfp4")
    for planes in (8, 7, 6, 5, 4, 3, 2, 1, "int3", "int2", "ternary"):
        total = bitplanes.cast_of(planes).num_planes
        fitting = [group for group in (32, 64, 128) if size % group == 0]
        group = fitting[total % len(fitting)]
        yield from (planes_case(out, size, planes, group, used) for used in sorted({1, (total + 1) // 2, total}))


def dense_case(out: int, size: int, dtype: torch.dtype) -> Linear:
    weight = (seeded(out, size, seed=3) * 0.05).to(dtype)
    name = "bf16_linear" if dtype == torch.bfloat16 else "f32_linear"
    op, refer = getattr(ops, name), REFERENCES[name]
    return Linear(
        f"{dtype} weight",
        lambda x, bias=None: op(x, weight, bias),
        lambda x, bias=None: refer(x, weight, bias),
        weight.double(),
        lambda x: x.to(dtype).double(),
    )


def linears(out: int, size: int) -> Iterator[Linear]:
    yield from (mxfp4_case(out, size, bits) for bits in (8, 16))
    for group in (32, 64, 128):
        if size % group == 0:
            yield from (int4_case(out, size, group, group != 64, bits) for bits in (4, 8, 16))
    yield int4_case(out, size, 32, False, 8)
    yield int4_case(out, size, 32, True, 4, 0.8)
    if size % 128 == 0 and size > 128:
        yield from (int4_int8_case(out, size, bits) for bits in (4, 8, 16))
    yield dense_case(out, size, torch.bfloat16)
    yield dense_case(out, size, torch.float32)
    yield from many_precisions(out, size)


def quantized(x: Tensor, group: int, bits: int, clip: float = 1.0) -> Tensor:
    return activations.dequantize_rows(*activations.quantize_rows(x, group, bits, clip), group, torch.float64)


def check_linear(case: Linear, x: Tensor, bias: Tensor | None) -> None:
    """Within one rounding to the dtype and float32 sums of the exact value; reference and kernel alike."""
    size = x.shape[-1]
    seen = case.seen(x)
    exact = seen @ case.dense.T + (0 if bias is None else bias.double())
    magnitude = seen.abs() @ case.dense.abs().T + (0 if bias is None else bias.double().abs())
    bound = ROUNDING[x.dtype] * exact.abs() + 2.0**-24 * (size / 16 + 8) * magnitude + 2.0**-25
    for y in (case.call(x, bias), case.refer(x, bias)):
        assert y.dtype == x.dtype
        assert y.shape == (*x.shape[:-1], len(case.dense))
        assert ((y.double() - exact).abs() <= bound).all(), (case.name, x.dtype, size)


def check_integers(case: Linear, x: Tensor) -> None:
    """Bit for bit: exact integer dot products of a group, then one fused multiply-add a group."""
    codes, scale, group, bits = case.integers
    x_codes, x_scale = activations.quantize_rows(x, group, bits)
    sums = torch.zeros(len(x), len(codes))
    for g in range(scale.shape[1]):
        part = slice(g * group, (g + 1) * group)
        dot = x_codes[:, part].double() @ codes[:, part].double().T
        factor = x_scale[:, g, None] * scale[None, :, g]  # float32
        sums = (sums.double() + dot * factor.double()).float()  # rounded once, but for a rare double rounding
    assert torch.equal(case.call(x), sums), case.name


def check_rows_stand_alone(case: Linear, size: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = seeded(max(COUNTS), size, seed=4).to(dtype)
        whole = case.call(x)
        alone = torch.cat([case.call(x[r : r + 1]) for r in range(72)])
        assert torch.equal(whole[:72], alone), case.name
        for n in COUNTS:
            assert torch.equal(case.call(x[:n]), whole[:n]), (case.name, n)
            assert torch.equal(case.call(x[-n:]), whole[-n:]), (case.name, n)


def check_no_worse_than_torch(case: Linear, size: int, dtype: torch.dtype) -> None:
    """Mean square error of float32 results against float64 at most twice that of torch's own float32 product."""
    x = seeded(40, size, seed=5).to(dtype).float()
    exact = x.double() @ case.dense.T
    torch_error = (torch.nn.functional.linear(x, case.dense.float()).double() - exact).square().mean().sqrt()
    error = (case.call(x).double() - exact).square().mean().sqrt()
    assert error <= 2 * torch_error, (case.name, error / torch_error)


def check_outliers() -> None:
    """int4 with int8 outliers: near float64 in every dtype, and a row by itself; at 4 bits outliers keep their 8."""
    for out, size, bits, clip in ((33, 256, 4, 1), (17, 384, 8, 0.7), (40, 1280, 16, 0.7), (33, 1280, 4, 0.8)):
        case = int4_int8_case(out, size, bits, clip)
        x, bias = seeded(40, size, seed=7), seeded(out, seed=8)
        x[:, -128:] *= 20
        for dtype in DTYPES:
            check_linear(case, x.to(dtype), bias.to(dtype))
            whole = case.call(x.to(dtype))
            for rows in (slice(0, 1), slice(3, 8), slice(7, 40)):
                assert torch.equal(case.call(x[rows].to(dtype)), whole[rows]), (case.name, dtype, rows)


def check_special_blocks() -> None:
    """Every pair of codes under scales from the smallest to the largest; a NaN scale reaches its own output only."""
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 2)
    x = torch.eye(64)
    for code in (1, 100, 127, 200, 250):
        scale = torch.full((16, 2), code, dtype=torch.uint8)
        y = ops.mxfp4_linear(x, *ops.prepack_mxfp4(packed, scale), 16)
        assert torch.equal(y.T, mxfp4.dequantize(packed, scale)), code
    for bits in (8, 16):
        scale = torch.full((16, 2), 127, dtype=torch.uint8)
        scale[3, 1], scale[5] = 255, 0
        y = ops.mxfp4_linear(x, *ops.prepack_mxfp4(packed, scale), 16, None, bits)
        assert y[32:, 3].isnan().all()
        assert not y[:, :3].isnan().any()
        assert not y[:, 4:].isnan().any()
        assert y[:, 5].abs().max() < 1e-37  # scale byte 0 may count as zero


def check_dequantize() -> None:
    """Bit for bit formats/int4.py, reference and kernel: all codes under all zero points, the smallest and the largest
    scales, tiles that are not full."""
    for out, size in SHAPES:
        for group in (g for g in (32, 64, 128) if size % g == 0):
            for symmetric in (True, False):
                packed, scale, zero = int4.quantize(seeded(out, size, seed=2) * 0.05, group, symmetric)
                _check_dense(packed, scale, zero, group)
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 2)
    for step in range(16):
        zero = (torch.arange(32, dtype=torch.uint8).view(16, 2) + step) % 16
        bits = torch.randint(0, 0x7C00, (16, 2), generator=torch.Generator().manual_seed(step), dtype=torch.int16)
        _check_dense(packed, bits.view(torch.float16), zero, 32)
        _check_dense(packed, torch.full((16, 2), 2.0**-24, dtype=torch.float16), zero, 32)
    bad = torch.ones(16, 2, dtype=torch.float16)
    bad[3, 1], bad[5, 0], bad[6, 0] = torch.nan, torch.inf, torch.tensor(0x7FFF, dtype=torch.int16).view(torch.float16)
    dense = ops.int4_dequantize(*ops.prepack_int4(packed, bad, None), 16, 32)
    assert dense[3, 32:].isnan().all()
    assert dense[6, :32].isnan().all()
    assert not dense[5, :32].isfinite().any()
    assert dense[[0, 1, 2, 4, *range(7, 16)]].isfinite().all()


def _check_dense(packed: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> None:
    tiles, out = ops.prepack_int4(packed, scale, zero), len(packed)
    expected = int4.dequantize(packed, scale, zero, torch.bfloat16)
    for dense in (ops.int4_dequantize(*tiles, out, group), REFERENCES["int4_dequantize"](*tiles, out, group)):
        assert dense.dtype == torch.bfloat16
        assert torch.equal(dense.view(torch.int16), expected.view(torch.int16)), (out, group)


def check_exact_is_bf16_linear() -> None:
    """An exact nested product has the bits of the plain one, for every number of rows, bias and dtype."""
    for out, size in ((1, 32), (33, 96), (50, 1120), (130, 512)):
        weight, bias = (seeded(out, size, seed=4) * 0.05).bfloat16(), seeded(out, seed=8)
        weight[0, 3], weight[-1, 20], weight[out // 2, :32] = 3e-39, 7e-39, 0
        weight[out // 2, 5] = 2e-39  # a block of a subnormal alone
        levels = codebooks.codebook_of("lloyd_max")
        parts = nested.split(weight, levels)
        tiles, escapes = ops.prepack_nested(*parts[:4]), parts.escape_index // size
        rows = escapes.unique()
        for dtype in (torch.float32, torch.bfloat16):
            x = seeded(97, size, seed=6).to(dtype)
            for n in (*EDGES, 97) if FEW else (*range(1, 40), 64, 97):
                for with_bias in (None, bias):
                    y = ops.nested_linear(x[:n], *tiles, levels, out, with_bias, weight_bits=16, escape_rows=rows,
                                          escape_weight=weight[rows])  # fmt: skip
                    assert torch.equal(y, ops.bf16_linear(x[:n], weight, with_bias)), (out, size, n, dtype)


def check_nested_rows() -> None:
    """Bit for bit the rows of the plain table: every finite word, with and without escapes, ids beyond it, a scale."""
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    table = words[(words & 0x7F80) != 0x7F80].view(torch.bfloat16).view(-1, 96)
    table = torch.cat([table, table.T.reshape(-1, 96)])  # blocks of like exponents, then blocks with escapes
    levels = codebooks.codebook_of("lloyd_max")
    parts = nested.split(table, levels)
    rows = (parts.escape_index // 96).unique()
    tiles, escapes = ops.prepack_nested(*parts[:4]), {"escape_rows": rows, "escape_weight": table[rows]}
    ids = torch.cat([torch.arange(len(table)).flip(0), torch.tensor([-1, -9, len(table), 1 << 30, 5, 5])]).int()
    for scale in (1.0, 11.3125):
        expected = ops.embed_rows(ids, table, scale).view(torch.int16)
        for chosen in (ids, ids[:1], ids[:0]):
            y = ops.nested_rows(chosen, *tiles, len(table), scale, **escapes)
            assert y.dtype == torch.bfloat16
            assert torch.equal(y.view(torch.int16), expected[: len(chosen)]), scale
        plain = REFERENCES["nested_rows"](ids, *tiles, len(table), scale).view(torch.int16)
        for none in ({}, {"escape_rows": rows[:0], "escape_weight": table[:0]}):
            assert torch.equal(ops.nested_rows(ids, *tiles, len(table), scale, **none).view(torch.int16), plain)


def check_bad_activations() -> None:
    """NaN or Inf in a row spoils that row, and no other."""
    for case in linears(17, 64):
        x = seeded(5, 64)
        clean = case.call(x)
        for bad in (torch.nan, torch.inf):
            x[2, 40] = bad
            y = case.call(x)
            assert not y[2].isfinite().any(), (case.name, bad)
            assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]]), case.name


def check_quantize_rows() -> None:
    for dtype in DTYPES:
        for rows, size in ((1, 32), (3, 40), (65, 512), (2, 1121)):
            x = seeded(rows, size, seed=6).to(dtype)
            x[0, :20] = 0
            for group in (32, 64, 128):
                for bits, clip in ((4, 1), (8, 1), (4, 0.8), (4, 0.1), (8, 0.8)):
                    codes, scales = ops.quantize_rows(x, group, bits, clip)
                    expected = activations.quantize_rows(x, group, bits, clip)
                    assert torch.equal(codes, expected[0]), (dtype, size, group, bits, clip)
                    assert torch.equal(scales, expected[1]), (dtype, size, group, bits, clip)
    special = torch.zeros(3, 64)
    special[1, 3], special[2, 40] = torch.nan, -torch.inf
    for bits, clip in ((8, 1), (4, 0.8)):
        codes, scales = ops.quantize_rows(special, 32, bits, clip)
        assert scales.isnan().tolist() == [[False, False], [True, False], [False, True]]
        assert codes.eq(0).all()


def _close(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """Errors against float64 at most twice the reference's, and never more than a rounding and a little."""
    scale = exact.abs().max().item() or 1.0
    floor = 4 * ROUNDING[ours.dtype] * scale
    error, other = ((y.double() - exact).abs().max().item() for y in (ours, theirs))
    assert error <= max(2 * other, floor), (error, other)


def check_rms_norm() -> None:
    for dtype in DTYPES:
        for n in (1, 31, 64, 1000):
            x, residual, weight = seeded(6, n).to(dtype), seeded(6, n, seed=1).to(dtype), seeded(n, seed=2)
            for other in (None, residual):
                normed, total = ops.rms_norm(x, weight, 1e-5, other)
                expected, expected_total = REFERENCES["rms_norm"](x, weight, 1e-5, other)
                assert torch.equal(total, x if other is None else expected_total)
                wide = total.double()
                exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
                _close(normed, expected, exact)
                single = torch.cat([ops.rms_norm(x[r : r + 1], weight, 1e-5)[0] for r in range(6)])
                assert other is not None or torch.equal(normed, single)


def check_silu_mul() -> None:
    for dtype in DTYPES:
        for n in (1, 7, 513, 2048):
            gate, up = seeded(3, n).to(dtype) * 4, seeded(3, n, seed=1).to(dtype)
            exact = torch.nn.functional.silu(gate.double()) * up.double()
            y = ops.silu_mul(gate, up)
            _close(y, REFERENCES["silu_mul"](gate, up), exact)
            assert torch.equal(ops.silu_mul(gate[1:2], up[1:2]), y[1:2])


def check_choose_rows() -> None:
    """The winners, and their probabilities, that plain torch finds; NaN, infinities and rows of equal logits among
    them. Among two tokens every noise decides, among many the largest."""
    for rows, vocab in ((4000, 2), (500, 7), (60, 20_001), (3, 150_000)):
        for dtype in DTYPES[:2]:
            logits = (seeded(rows, vocab, seed=8) * 3).to(dtype)
            logits[0, 1] = torch.nan
            if rows > 60:
                logits[1], logits[2, 1:], logits[3, 0], logits[4] = -torch.inf, -torch.inf, torch.inf, 0.5
            numbers = torch.arange(rows, dtype=torch.int32)
            for cap in (0.0, 2.5):
                for noise in ((torch.tensor([-5 << 40]), numbers % 9, numbers * 12_345), (None, None, None)):
                    tokens, confidence = ops.choose_rows(logits, cap, *noise)
                    expected, sure = REFERENCES["choose_rows"](logits, cap, *noise)
                    close = torch.isclose(confidence, sure, rtol=1e-5, atol=1e-30, equal_nan=True)
                    # Two sums may be a tie but for an ulp.
                    assert (tokens != expected).sum() <= rows / 1000, (rows, vocab, dtype, cap)
                    assert (close | (tokens != expected)).all(), (rows, vocab, dtype, cap)
                    assert tokens.dtype == torch.int32


CACHE_DTYPES = (torch.float32, torch.bfloat16, *(record.dtype for record in CACHE_FORMATS.values()))
CODES = {torch.int8: 127, torch.uint8: 15}  # the largest one


def kept_as(kv_dtype: torch.dtype, states: Tensor) -> Tensor:
    """Keys or values as a cache of this dtype holds them."""
    record = stored_format(kv_dtype)
    return states.to(kv_dtype) if record is None else record.quantize(states)


def read_as(dtype: torch.dtype, lanes: Tensor) -> Tensor:
    """What a cache holds, rounded to a dtype, as float32."""
    record = stored_format(lanes.dtype)
    return (lanes if record is None else record.dequantize(lanes, torch.float32)).to(dtype).float()


def cache_operands(
    dtype: torch.dtype, kv_dtype: torch.dtype, dim: int = 40, heads: int = 6, kv_heads: int = 2, tokens=5
):
    batch, slots = 3, 150
    q = seeded(batch, tokens, heads, dim).to(dtype)
    k, v = (seeded(batch, tokens, kv_heads, dim, seed=s).to(dtype) for s in (1, 2))
    keys, values = (kept_as(kv_dtype, seeded(batch, kv_heads, slots, dim, seed=s)) for s in (3, 4))
    angle = seeded(slots + 3, dim // 2 - 2, seed=5)
    return q, k, v, angle.cos(), angle.sin(), [0, slots - tokens, 70], keys, values


def check_rope_write() -> None:
    for dtype in DTYPES:
        for kv_dtype in CACHE_DTYPES:
            q, k, v, cos, sin, starts, keys, values = cache_operands(dtype, kv_dtype)
            ours, theirs = (keys.clone(), values.clone()), (keys.clone(), values.clone())
            rotated = ops.rope_write(q, k, v, cos, sin, starts, *ours)
            expected = REFERENCES["rope_write"](q, k, v, cos, sin, starts, *theirs)
            step = 2 * ROUNDING[dtype]
            assert torch.allclose(rotated.float(), expected.float(), rtol=step, atol=4e-7)
            off = (read_as(torch.float32, ours[0]) - read_as(torch.float32, theirs[0])).abs()
            if kv_dtype in CODES:  # a rotation in another order may give the next code
                reach = 2 * read_as(torch.float32, theirs[0]).abs().amax(-1, keepdim=True)
                assert (off <= 1.01 / CODES[kv_dtype] * reach).all()
                assert (off > 0).sum() <= off.numel() / 1000
            else:
                assert (off <= 2 * ROUNDING[kv_dtype] * theirs[0].float().abs() + 4e-7).all()
            assert torch.equal(ours[1], theirs[1])
            for row, start in enumerate(starts):  # sentinels: every other slot is as it was
                others = [s for s in range(keys.shape[2]) if not start <= s < start + q.shape[1]]
                assert torch.equal(ours[0][row, :, others], keys[row, :, others])
                assert torch.equal(ours[1][row, :, others], values[row, :, others])


def check_cache_codes() -> None:
    """Codes that the reference gives, to the bit: halves, one-sided rows, zeros, tiny, huge and infinite ones, NaN."""
    for record, dims in zip(CACHE_FORMATS.values(), ((1, 15, 16, 17, 33, 64, 128), (2, 14, 16, 18, 34, 64, 128)),
                            strict=True):  # fmt: skip
        for dim in dims:
            check_rows_of_codes(record, dim)


def check_rows_of_codes(record: CacheFormat, dim: int) -> None:
    powers = 2.0 ** torch.arange(-126, 124, 12.5)[:20, None]
    v = torch.cat([seeded(20, dim, seed=dim) * powers, torch.zeros(14, dim), seeded(20, dim, seed=9).abs() * powers])
    v[20, 0], v[21, -1], v[22, dim // 2], v[23] = torch.nan, torch.inf, -torch.inf, 3.4e38
    v[24], v[25], v[26, 0] = 2.0**-100, 2.0**-101, -1e-45
    v[27] = (torch.arange(dim) % 255 - 127) / 2
    v[28] = (torch.arange(dim) % 3 - 1).float()
    v[29], v[30], v[31] = -(torch.arange(dim) % 31) / 2, 1.004, -1.004
    v[32, 0], v[32, -1], v[33, 0], v[33, -1] = 2.0**-101, -(2.0**-100), 2.0**120, -1.0
    for dtype in DTYPES:
        states = v.to(dtype)[None, :, None]  # [batch, tokens, kv_heads, dim]
        lanes = torch.zeros(2, 1, 1, len(v) + 2, record.width(dim), dtype=record.dtype)
        angle = torch.zeros(len(v) + 2, 0)
        ops.rope_write(states, states, states, angle, angle, [1], *lanes)
        expected = record.quantize(states)[0, :, 0]
        for lane in lanes:
            assert torch.equal(lane[0, 0, 1:-1], expected), (record.word, dim, dtype)
            assert not lane[0, 0, [0, -1]].any()


def check_attention_values(y: Tensor, q: Tensor, keys: Tensor, values: Tensor, *rest) -> None:
    """Near the reference; nearer where nothing but the result is rounded. rest: starts, and the rule."""
    attend = REFERENCES["ragged_attention"]
    narrow = keys.dtype != torch.float32 and library.kernel_of("ragged_attention", "cpu") in BF16_SETS
    seen = q.bfloat16() if narrow else q  # the kernel's own rounding of queries; that of weights is in `off`
    keys, values = (read_as(torch.bfloat16 if narrow else torch.float32, lanes) for lanes in (keys, values))
    expected = attend(seen.float(), keys, values, *rest)
    off = 2 * ROUNDING[torch.bfloat16] * attend(seen.float(), keys, values.abs(), *rest) if narrow else 0.0
    least = 1e-5 * max(1, q.shape[3] / 256)
    assert ((y.float() - expected).abs() <= off + 4 * ROUNDING[y.dtype] * expected.abs() + least).all()


def check_ragged_attention() -> None:
    for dtype in DTYPES:
        for kv_dtype in CACHE_DTYPES:
            for dim, heads, kv_heads, tokens in ((40, 6, 2, 5), (64, 4, 4, 1), (128, 8, 1, 19), (33, 3, 1, 9)):
                dim += dim % 2 if kv_dtype == torch.uint8 else 0  # two elements in a byte
                operands = cache_operands(dtype, kv_dtype, dim, heads, kv_heads, tokens)
                q, starts, keys, values = operands[0], *operands[5:]
                for rule in ((0, 0.0, 0), (7, 0.0, 0), (0, 5.0, 0), (80, 2.0, 0), (0, 0.0, 7), (80, 2.0, 40)):
                    rule = (dim**-0.5, *rule)
                    y = ops.ragged_attention(q, keys, values, starts, *rule)
                    check_attention_values(y, q, keys, values, starts, *rule)
                    for t in range(tokens):  # one by one, and each row alone
                        one = ops.ragged_attention(q[:, t : t + 1], keys, values, [s + t for s in starts], *rule)
                        assert torch.equal(one, y[:, t : t + 1]), (dim, tokens, t)
                    last = ops.ragged_attention(q[2:], keys[2:], values[2:], starts[2:], *rule)
                    assert torch.equal(last, y[2:])


def refuses_two_devices(op: str, operands: dict) -> bool:
    """False where the op has one tensor and so one device."""
    tensors = [name for name, value in operands.items() if isinstance(value, Tensor)]
    if len(tensors) == 1:
        return False
    moved = {**operands, tensors[-1]: operands[tensors[-1]].to("meta")}
    with pytest.raises(ValueError, match=rf"{op}: {tensors[-1]} is on meta, \w+ on cpu; move them to one device"):
        getattr(torch.ops.mlspec, op).default(*moved.values())
    return True


def check_registration(op: str, operands: dict) -> None:
    """torch's own checks of schema and fake result; meta tensors give shapes, dtypes and nothing else."""
    function = getattr(torch.ops.mlspec, op).default
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    result = torch.library.opcheck(function, tuple(operands.values()), test_utils=checks)
    assert set(result.values()) == {"SUCCESS"}
    computed = function(*operands.values())
    shapes = function(*(value.to("meta") if isinstance(value, Tensor) else value for value in operands.values()))
    pairs = zip(computed, shapes, strict=True) if isinstance(computed, tuple) else [(computed, shapes)]
    for real, meta in pairs:
        assert (meta.shape, meta.dtype, meta.device.type) == (real.shape, real.dtype, "meta")


def check_all() -> str:
    """Everything above, on small operands; -> a digest of what every instruction set must compute alike."""
    digest = hashlib.sha256()
    for out, size in SHAPES[:4]:
        x, bias = seeded(10, size, seed=7), seeded(out, seed=8)
        for case in linears(out, size):
            for dtype in DTYPES:
                check_linear(case, x.to(dtype), bias.to(dtype))
            if case.integers is not None:
                check_integers(case, x)
                digest.update(case.call(x).numpy().tobytes())
    for case in linears(33, 96):
        check_rows_stand_alone(case, 96)
    check_outliers()
    for check in (check_special_blocks, check_dequantize, check_exact_is_bf16_linear, check_nested_rows,
                  check_bad_activations, check_quantize_rows):  # fmt: skip
        check()
    check_rms_norm()
    check_silu_mul()
    check_choose_rows()
    check_rope_write()
    check_cache_codes()
    check_ragged_attention()
    return digest.hexdigest()
