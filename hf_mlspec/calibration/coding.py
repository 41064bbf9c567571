"""Which int4 codes does a layer's weight get, given what the layer multiplies?

`feedback_weight` is GPTQ (Frantar et al., arXiv 2210.17323, algorithm 1): columns are rounded from left to right, and
the columns behind one make up for its error. A group's scale is searched when the group is reached, on what columns
before it left, with each column's cost in that algorithm, ``1 / U_cc^2``. `clipped_weight` rounds every column by
itself, with scales of the least error of the outputs (the clip search of AWQ, Lin et al., arXiv 2306.00978, section
4.1). `outlier_weight` is for layers whose last inputs are outliers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.hessian import inverse_factor
from ..formats.int4 import SYMMETRIC_ZERO, Int4Weight
from ..formats.int4_int8 import GROUP, OUTLIERS, Int4Int8Weight, quantize_outliers
from ..formats.packing import LARGEST_CODE, pack_nibbles
from .grid import clipped_scales, encode, search

# Of the mean diagonal: measured (docs/benchmarks/calibration.md). At .01, GPTQ's own, some thousands of tokens of code
# cost prose more than rounding to nearest.
DAMPING = 0.1
CLIP = 0.85  # of a group's largest weight: Atom's, for codes that are rounded to nearest
_ELEMENTS = 1 << 19  # of a weight in flight: 2 MiB each of a few temporaries


def factor_of(hessian: Tensor, name: str, damping: float = DAMPING) -> Tensor:
    """What `feedback_weight` hands errors on by, float32 ``[in, in]``, of all layers that read the same inputs.
    hessian float ``[in, in]``: the sum of ``x^T x`` over tokens x; one of float32 is lost, its memory holds the
    factor. ValueError as `inverse_factor`, naming ``name``."""
    try:
        return inverse_factor(hessian, len(hessian), damping, overwrite=True)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def feedback_weight(weight: Tensor, factor: Tensor, group_size: int, symmetric: bool, name: str) -> Int4Weight:
    """weight float ``[out, in]``, factor: of `factor_of`. ValueError as `search`, naming ``name``."""
    try:
        codes, scales, zeros, _ = _fed_back(weight, factor, group_size, symmetric, weight.shape[1])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return _weight(codes, scales, zeros, symmetric, name)


def outlier_weight(weight: Tensor, factor: Tensor | None, name: str) -> Int4Int8Weight:
    """weight float ``[out, in]``, its last 128 inputs outliers, factor: of `factor_of` in the same order. Atom (Zhao
    et al., arXiv 2310.19102, section 4): int4 groups clipped at `CLIP` of their largest, or with a factor codes as
    `feedback_weight` chooses them, errors of which outliers take up, too; these are rounded at the end. ValueError
    naming ``name``."""
    columns = weight.shape[1] - OUTLIERS
    try:
        if factor is not None:
            codes, scales, _, rest = _fed_back(weight, factor, GROUP, True, columns)
        else:
            groups, rest = weight[:, :columns].float().unflatten(-1, (-1, GROUP)), weight[:, columns:].float()
            scales = clipped_scales(groups, CLIP)
            codes = encode(groups, scales, torch.full_like(scales, SYMMETRIC_ZERO)).to(torch.uint8).flatten(-2)
        outliers = quantize_outliers(rest)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return Int4Int8Weight(pack_nibbles(codes), scales.to(torch.float16), *outliers, name)


def _fed_back(
    weight: Tensor, factor: Tensor, group_size: int, symmetric: bool, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes uint8 of the first ``columns``, their scales and zero points, and what is left to be rounded of the
    others, ``[out, in - columns]``."""
    targets = weight.float().T.contiguous()  # [in, out]: what is left to be rounded
    codes = torch.empty(columns, len(weight), dtype=torch.uint8, device=weight.device)
    scales, zeros = [], []
    for first in range(0, columns, group_size):
        end = first + group_size
        costs = factor.diagonal()[first:end].square().reciprocal()[None]
        scale, zero = search(targets[first:end].T.contiguous()[:, None], costs / costs.max(), symmetric)
        scale, zero = scale[:, 0], zero[:, 0]
        errors = _round_group(targets[first:end], codes[first:end], factor[first:end, first:end], scale, zero)
        targets[end:].addmm_(factor[first:end, end:].T, errors, alpha=-1)
        scales.append(scale)
        zeros.append(zero)
    return codes.T.contiguous(), torch.stack(scales, 1), torch.stack(zeros, 1), targets[columns:].T.contiguous()


def _round_group(targets: Tensor, codes: Tensor, factor: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Round the columns of one group, targets and codes ``[group, out]``, in place; -> their errors in units of the
    factor, ``[group, out]``."""
    errors = torch.empty_like(targets)
    for column in range(len(targets)):
        code = (targets[column] / scale).round_().add_(zero).clamp_(0, LARGEST_CODE)
        codes[column] = code.to(torch.uint8)
        errors[column] = (targets[column] - (code - zero) * scale) / factor[column, column]
        targets[column + 1 :].addr_(factor[column, column + 1 :], errors[column], alpha=-1)
    return errors


def clipped_weight(weight: Tensor, hessian: Tensor, group_size: int, symmetric: bool, name: str) -> Int4Weight:
    """As `feedback_weight`, hessian: as of `factor_of`; what a group's error does to outputs is judged by its block of
    the Hessian alone."""
    in_features = weight.shape[1]
    count = in_features // group_size
    blocks = hessian.float().unflatten(0, (count, group_size)).unflatten(2, (count, group_size))
    costs = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()  # [n, group, group]
    idle = costs.diagonal(dim1=1, dim2=2)
    idle.add_((1e-6 * idle.mean()).clamp(min=1e-12))  # groups that nothing reached are rounded to nearest
    found = []
    step = max(1, _ELEMENTS // in_features)
    for rows in weight.split(step):
        groups = rows.float().unflatten(-1, (count, group_size))
        try:
            scale, zero = search(groups, costs, symmetric)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        found.append((encode(groups, scale, zero).to(torch.uint8).flatten(-2), scale, zero))
    codes, scales, zeros = (torch.cat(parts) for parts in zip(*found, strict=True))
    return _weight(codes, scales, zeros, symmetric, name)


def _weight(codes: Tensor, scales: Tensor, zeros: Tensor, symmetric: bool, name: str) -> Int4Weight:
    zero = None if symmetric else zeros.to(torch.uint8)
    return Int4Weight(pack_nibbles(codes), scales.to(torch.float16), zero, name)
