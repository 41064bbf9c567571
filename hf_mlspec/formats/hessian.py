"""Which share of a column's rounding error do the columns behind it make up for? GPTQ's factor of the Hessian.

H = X^T X, X being a layer's inputs on calibration text (Frantar et al., GPTQ, arXiv 2210.17323, section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

DAMPING = 0.01


def inverse_factor(hessian: Tensor, in_features: int, damping: float = DAMPING, overwrite: bool = False) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse, float32 ``[in, in]``.

    hessian: float ``[in, in]``, the sum of ``x^T x`` over tokens. damping: the share of its mean diagonal that is
    added to its diagonal; an input that was zero throughout gets 1 as well, and so hands no error on. overwrite: the
    factor is in the memory of a float32 Hessian, which is lost. ValueError for another shape or damping, NaN or Inf,
    or a Hessian whose Cholesky factor float32 does not find.
    """
    if list(hessian.shape) != [in_features, in_features]:
        raise ValueError(f"the Hessian has shape {list(hessian.shape)}, expected {[in_features, in_features]}")
    if not 0 < damping < torch.inf:
        raise ValueError(f"damping is {damping}, it must be above 0 and finite")
    damped = hessian if overwrite and hessian.dtype == torch.float32 else hessian.to(torch.float32, copy=True)
    if (bad := int((~damped.isfinite()).sum())) > 0:
        raise ValueError(f"the Hessian holds {bad} NaN or Inf: calibrate with inputs that are finite in float32")
    diagonal = damped.diagonal()
    idle = diagonal == 0  # inputs that were zero throughout
    diagonal.add_(damping * diagonal.mean())
    diagonal[idle | (diagonal == 0)] += 1.0
    upper = damped.mT  # LAPACK's order of elements: of others it makes a copy
    failed = _factorize(upper, upper=False)
    if not failed:
        torch.cholesky_inverse(upper, out=upper)
        failed = _factorize(upper, upper=True)
    if failed or not upper.isfinite().all():
        raise ValueError(
            f"the Hessian [{in_features}, {in_features}] damped by {damping:g} has no Cholesky factor in float32: "
            "calibrate on more text, or raise the damping"
        )
    return upper


def _factorize(matrix: Tensor, upper: bool) -> bool:
    """Put its Cholesky factor where a matrix is; -> whether there is none."""
    failed = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(matrix, upper=upper, out=(matrix, failed))
    return bool(failed)
