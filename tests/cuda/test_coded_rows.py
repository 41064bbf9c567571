"""Do the kernels of a GPU write keys and values as codes as formats/cache/ says, bit for bit?"""

from __future__ import annotations

import pytest
import torch
from coded_cases import FORMATS
from ragged_cases import DEVICE
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.formats.cache import INT4, CacheFormat

SLOTS = 48
UNTOUCHED = 7
WORDS = [record.word for record in FORMATS]


def write(
    record: CacheFormat, states: Tensor, cos: Tensor, sin: Tensor, starts: list[int], counts: list[int],
    norm: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Keys and values after a step whose keys and values are `states`, bfloat16 `[batch, width, 2, kv_heads, dim]`."""
    batch, width, _, kv_heads, dim = states.shape
    qkv = torch.cat([torch.ones(batch, width, 1, dim), states.flatten(2, 3)], dim=2)
    qkv = qkv.bfloat16().flatten(2).to(DEVICE)
    lanes = [torch.full((batch, kv_heads, SLOTS, record.width(dim)), UNTOUCHED, dtype=record.dtype, device=DEVICE)
             for _ in range(2)]  # fmt: skip
    lengths = [torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in (starts, counts)]
    tables, norms = [t.to(DEVICE) for t in (cos, sin)], (None, None if norm is None else norm.to(DEVICE))
    ops.rope_write_rows(qkv, *norms, 1e-6, *tables, *lengths, *lanes, 1)
    return [lane.cpu() for lane in lanes]


def random_states(batch: int, width: int, kv_heads: int, dim: int) -> Tensor:
    random = torch.Generator().manual_seed(dim + width)
    size = 2.0 ** torch.randint(-20, 20, (batch, width, 2, kv_heads, 1), generator=random)
    return (torch.randn(batch, width, 2, kv_heads, dim, generator=random) * size).bfloat16()


@pytest.mark.parametrize(("dim", "half"), [(64, 32), (128, 64), (128, 16), (16, 3), (80, 5), (96, 48), (256, 128),
                                           (112, 0)])  # fmt: skip
@pytest.mark.parametrize("width", [1, 9, 17])
@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_codes_are_those_of_the_reference_bit_for_bit(record, dim, half, width):
    """A rotation by powers of two: its products are exact, so that a key is one float32 however it is added up."""
    states = random_states(3, width, 2, dim)
    random = torch.Generator().manual_seed(half)
    cos, sin = (2.0 ** torch.randint(-3, 1, (SLOTS, half), generator=random) for _ in range(2))
    starts, counts = [0, 17, SLOTS - width], [width, max(width - 1, 0), width + 3]
    written = write(record, states, cos, sin, starts, counts)
    expected = [torch.full_like(lane, UNTOUCHED) for lane in written]
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        real = min(count, width)
        slots = slice(start, start + real)
        keys, values = states[row, :real].float().unbind(1)  # [tokens, kv_heads, dim]
        a, b, rest = keys.split([half, half, dim - 2 * half], dim=-1)
        c, s = cos[slots, None], sin[slots, None]
        keys = torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1)
        expected[0][row, :, slots] = record.quantize(keys).transpose(0, 1)
        expected[1][row, :, slots] = record.quantize(values).transpose(0, 1)
    assert torch.equal(written[0], expected[0])
    assert torch.equal(written[1], expected[1])


@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_rows_that_are_not_finite_tiny_or_zero(record):
    dim = 64
    rows = torch.randn(14, dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows[0, 3], rows[1, 63], rows[2, 0] = torch.nan, torch.inf, -torch.inf
    rows[3] = 0
    rows[4], rows[5], rows[6] = rows[4] * 2.0**-105, rows[5] * 2.0**-99, rows[6] * 2.0**-126
    rows[7, 5] = torch.finfo(torch.bfloat16).max
    rows[8], rows[8, 0] = 0, 2.0**-100
    rows[9], rows[9, 63] = 0, -(2.0**-101)
    rows[10], rows[10, 1], rows[11, 2:4] = 1.0, 2.0, torch.tensor([127.0, -127.0])  # ties to even
    rows[11, 4:] = torch.arange(60) / 2
    states = rows[None, :, None, None].expand(1, 14, 2, 1, dim)
    written = write(record, states, torch.ones(SLOTS, 0), torch.ones(SLOTS, 0), [0], [14])
    for lane in written:
        assert torch.equal(lane[0, 0, :14], record.quantize(rows))
        assert lane[0, 0, 14:].eq(UNTOUCHED).all()


@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_normed_and_rotated_keys_are_within_a_code(record):
    torch.manual_seed(0)
    dim, angle, norm = 128, torch.rand(SLOTS, 64) * 6, torch.rand(128) + 0.5
    states = torch.randn(2, 9, 2, 2, dim).bfloat16()
    written = write(record, states, angle.cos(), angle.sin(), [3, 20], [9, 9], norm=norm)
    lanes = [torch.full_like(lane, UNTOUCHED) for lane in written]
    qkv = torch.cat([torch.ones(2, 9, 2, dim), states.flatten(2, 3)], dim=2).bfloat16().flatten(2)
    lengths = [torch.tensor(n, dtype=torch.int32) for n in ([3, 20], [9, 9])]
    ops.rope_write_rows(qkv, None, norm, 1e-6, angle.cos(), angle.sin(), *lengths, *lanes, 2)
    assert torch.equal(written[1], lanes[1])
    ours, theirs = record.dequantize(written[0]), record.dequantize(lanes[0])
    # A norm that rounds the other way moves an element by a step of bfloat16, and a code by one.
    code = 2 / 15 if record is INT4 else 1 / 127
    step = theirs.abs().amax(-1, keepdim=True) * (2.0**-7 + code)
    inside = torch.zeros(2, 1, SLOTS, 1, dtype=torch.bool)
    inside[0, :, 3:12], inside[1, :, 20:29] = True, True
    assert ((ours - theirs).abs() <= step)[inside.expand_as(ours)].all()
    assert written[0][~inside.expand_as(written[0])].eq(UNTOUCHED).all()


@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_the_reference_gives_the_same_codes_here(record):
    """What is given back as plain keys and values is quantized by torch, on this device."""
    x = random_states(64, 9, 2, 128).float() * torch.rand(64, 9, 2, 2, 128)
    for one in (x, x.bfloat16()):
        here = record.quantize(one.to(DEVICE))
        assert torch.equal(here.cpu(), record.quantize(one))
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(record.dequantize(here, dtype).cpu(), record.dequantize(record.quantize(one), dtype))
            assert torch.equal(record.quantize(record.dequantize(here, dtype)), here)
