"""Which codes make up for each other's errors? GPTQ's feedback for the free index bits of a nested weight.

Columns are rounded from left to right; the error of each is handed to the columns behind it, weighted by the inverse
of H = X^T X, X being the layer's inputs on calibration text (Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1). The
exact weight does not need the index, so the choice costs nothing; signs are the exact weight's and stay: a column
whose target has changed its sign gets the lowest level.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..hessian import DAMPING, inverse_factor
from .fields import BLOCK, draft_scales

_COLUMNS = 128  # whose errors are handed on at once


def feedback_indices(
    weight: Tensor, exponent: Tensor, codebook: Tensor, hessian: Tensor, damping: float = DAMPING
) -> Tensor:
    """Codebook indices uint8 ``[out, in]`` of a weight ``[out, in]`` (float) with exponent bytes uint8 ``[out, in /
    32]`` and codebook uint8 ``[8]``, chosen for a small ``|x (weight - draft)^T|`` over inputs x with ``hessian``, the
    float ``[in, in]`` sum of ``x^T x`` over tokens.

    damping: the share of the Hessian's mean diagonal that is added to its diagonal. ValueError for a Hessian of
    another shape, with NaN or Inf, or one whose Cholesky factor float32 does not find.
    """
    in_features = weight.shape[1]
    factor = inverse_factor(hessian, in_features, damping).to(weight.device)
    targets = weight.float().T.contiguous()  # [in, out]: what is left to be rounded; one more copy of the weight
    units = draft_scales(exponent).T.contiguous()  # [in / 32, out]
    levels = codebook.float()
    middles = (levels[1:] + levels[:-1]) / 2
    index = torch.empty(targets.shape, dtype=torch.uint8, device=weight.device)
    for first in range(0, in_features, _COLUMNS):
        end = min(first + _COLUMNS, in_features)
        errors = torch.empty_like(targets[first:end])
        for column in range(first, end):
            unit = units[column // BLOCK] * torch.where(weight[:, column].signbit(), -1.0, 1.0)
            index[column] = torch.bucketize(targets[column] / unit, middles)  # the lower of two equally near
            draft = levels[index[column].int()] * unit
            errors[column - first] = (targets[column] - draft) / factor[column, column]
            targets[column + 1 : end].addr_(factor[column, column + 1 : end], errors[column - first], alpha=-1)
        targets[end:].addmm_(factor[first:end, end:].T, errors, alpha=-1)
    return index.T.contiguous()
