"""What do caches that hold codes look like on a GPU, and what do queries attend to over them exactly?"""

from __future__ import annotations

from dataclasses import replace

import torch
from ragged_cases import Case, exact
from torch import Tensor

from hf_mlspec.formats.cache import INT4, INT8, CacheFormat, stored_format

FORMATS = [INT8, INT4]
NO_NUMBER = {INT8: [0, 0, 0xC0, 0x7F], INT4: [0xC0, 0x7F, 0xC0, 0x7F]}  # bytes behind codes: a scale, ends of NaN


def in_bytes(record: CacheFormat, numbers: list[int], device: torch.device | str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.uint8, device=device).view(record.dtype)


def coded(case: Case, record: CacheFormat) -> Case:
    """The same over codes: rows that were NaN get a scale, or ends, of NaN, and codes that are none."""
    lanes = []
    for lane in (case.keys, case.values):
        rows = record.quantize(lane)
        codes = [0x80, 0x7F] * ((rows.shape[-1] - 4) // 2)
        rows[lane.isnan().any(-1)] = in_bytes(record, codes + NO_NUMBER[record], rows.device)
        lanes.append(rows)
    return replace(case, keys=lanes[0], values=lanes[1])


def plain(case: Case) -> Case:
    """The same over what the codes stand for, float32."""
    record = stored_format(case.keys.dtype)
    keys, values = (record.dequantize(lane, torch.float32) for lane in (case.keys, case.values))
    return replace(case, keys=keys, values=values)


def multiplied(rows: Tensor) -> Tensor:
    """What a weight multiplies of values, float32: they themselves; of int4 codes how far they are from code 8."""
    values = stored_format(rows.dtype).dequantize(rows, torch.float32)
    if rows.dtype != INT4.dtype:
        return values
    low, high = rows[..., -4:].contiguous().view(torch.bfloat16).float().split(1, dim=-1)
    return values - (7 * low + 8 * high) / 15


def check(case: Case) -> Tensor:
    """Float64 over what the codes stand for, within the rounding of the result and of the weights, both bfloat16; and
    of float32 numbers as large as the values, which may cancel."""
    y, wide = case.attend(), plain(case)
    expected, _ = exact(wide)
    _, size = exact(replace(wide, values=multiplied(case.values)))
    error = (y.double().cpu() - expected).abs()
    bound = 2.0**-8 * expected.abs() + 2.0**-7 * size + 2.0**-20 * float(wide.values.nan_to_num().abs().max())
    assert (error <= bound).all(), (error / bound).max()
    for row, count in enumerate(case.counts):
        assert y[row, max(count, 0) :].eq(0).all()
    return y
