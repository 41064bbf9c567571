"""Which zipper codes does a layer's weight get, given what the layer multiplies? GPTQ over a grid of one scale a row.

As `feedback_weight` (coding.py), but a row's step is set before its first column: its largest magnitude is the largest
code, as ZipperQuant has it (scales of fewer steps would cut outliers, which the high part is there for). Columns are
rounded to codes that the split holds, so what mode "paper" rounds away is fed back, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats import zipper
from ..formats.zipper import HIGH_PARTS, MODES, Split, ZipperWeight

_COLUMNS = 128  # whose errors the columns behind them take up at once


def row_feedback_weight(weight: Tensor, factor: Tensor, options: Mapping[str, Any], name: str) -> ZipperWeight:
    """weight float ``[out, in]``, factor: of `coding.factor_of`; options: of the format. ValueError as of
    `ZipperWeight`, naming ``name``."""
    how = Split(options["bits"], options["low_bits"], options["mode"])
    try:
        _, scale = zipper.quantize(weight, how.require())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    codes = _fed_back(weight, factor, scale.float().flatten(), how)
    header = [how.bits, how.low_bits, MODES.index(how.mode), HIGH_PARTS.index(options["high_part"])]
    split = torch.tensor(header, dtype=torch.int32, device=weight.device)
    return ZipperWeight(zipper.to_planes(codes, how.bits), scale, split, name)


def _fed_back(weight: Tensor, factor: Tensor, scale: Tensor, how: Split) -> Tensor:
    """int8 ``[out, in]``: columns from left to right, each in steps of ``scale [out]``."""
    targets = (weight.float() / scale[:, None]).T.contiguous()  # [in, out], in steps
    codes = torch.empty(targets.shape, dtype=torch.int8, device=weight.device)
    for first in range(0, len(targets), _COLUMNS):
        end = min(first + _COLUMNS, len(targets))
        errors = torch.empty_like(targets[first:end])
        for column in range(first, end):
            values = zipper.rounded_codes(targets[column], how)
            codes[column] = values.to(torch.int8)
            error = (targets[column] - values) / factor[column, column]
            targets[column + 1 : end].addr_(factor[column, column + 1 : end], error, alpha=-1)
            errors[column - first] = error
        targets[end:].addmm_(factor[first:end, end:].T, errors, alpha=-1)
    return codes.T.contiguous()
