"""Which integers does a row of activations become before it is multiplied with 4-bit weights?

Every row is quantized for itself, in groups of 32, 64 or 128 consecutive elements along the last axis (the last group
may be short), symmetric about zero, to 8 bits (codes -127..127) or 4 bits (-7..7), all in float32:

    scale = amax / L        code = round(x * (L / amax)), ties to even        L = 127 or 7        value = code * scale

Example, 8 bits: a group with largest magnitude 2 has scale 2 / 127; 1.0 becomes round(63.5) = 64, worth 1.0079.

4-bit codes may be clipped: the largest then means ``clip`` times amax, from .1 to 1, what is beyond becomes it, and
the others are finer. In the rule above amax is clip * amax, and codes stay within -7..7.

A group of zeros has scale 0 and codes 0, and so has one so small (under 3.8e-37) that L / amax leaves float32. NaN or
Inf makes its group's scale NaN (its codes are 0). The compiled kernels follow this rule bit for bit.

Sources: ML-SpecQD (arXiv 2503.13565), activations of the MXFP4 kernel: int8, one scale per token and block; Atom (Zhao
et al., arXiv 2310.19102), whose 4-bit activations are clipped at .9.
"""

from __future__ import annotations

import torch

from .int4 import GROUP_SIZES
from .weight import INPUT_DTYPES

LARGEST_CODES = {8: 127, 4: 7}
LEAST_CLIP = 0.1


def num_groups(size: int, group_size: int) -> int:
    """Groups along an axis of ``size`` elements, the last of which may be short."""
    return -(-size // group_size)


def require_clip(clip: float, name: str = "clip") -> float:
    """``clip`` as a float; ValueError unless it is a number from `LEAST_CLIP` to 1."""
    if isinstance(clip, bool) or not isinstance(clip, int | float) or not LEAST_CLIP <= clip <= 1:
        raise ValueError(
            f"{name} is {clip!r}, expected {LEAST_CLIP:g} to 1 (nothing is clipped), a share of the largest "
            "activation of a group"
        )
    return float(clip)


def quantize_rows(
    x: torch.Tensor, group_size: int, bits: int = 8, clip: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32/bfloat16/float16 ``[..., k]`` -> codes int8 ``[..., k]``, scales float32 ``[..., ceil(k / group)]``.

    clip: of 4-bit codes; 8-bit ones are not clipped. TypeError for another dtype; ValueError for a scalar, a group
    other than 32, 64 or 128, bits other than 8 and 4, or a clip that is none.
    """
    _require_format(group_size, bits)
    require_clip(clip)
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"activations are float32, bfloat16 or float16, not {x.dtype}: convert the tensor first")
    if x.ndim == 0:
        raise ValueError("activations must have at least one axis, this is a scalar")
    largest = float(LARGEST_CODES[bits])
    groups = _split_groups(x.to(torch.float32), group_size)  # [..., groups, group_size]
    amax = groups.abs().amax(-1, keepdim=True)
    finite = amax.isfinite()
    if bits == 4:
        amax = amax * clip
    factor = torch.full_like(amax, largest) / amax  # number / tensor would be a reciprocal, rounded, times number
    coded = finite & factor.isfinite()  # neither NaN, Inf nor too small
    codes = torch.where(coded, groups * factor, 0.0).round().clamp(-largest, largest).to(torch.int8)
    scales = torch.where(coded, amax / largest, torch.where(finite, 0.0, torch.nan))
    return codes.flatten(-2)[..., : x.shape[-1]].contiguous(), scales.squeeze(-1)


def dequantize_rows(
    codes: torch.Tensor, scales: torch.Tensor, group_size: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """codes int8 ``[..., k]``, scales float32 ``[..., ceil(k / group_size)]`` -> ``dtype`` ``[..., k]``.

    TypeError for other dtypes, ValueError when the shapes do not belong together.
    """
    _require_format(group_size)
    if codes.dtype != torch.int8 or scales.dtype != torch.float32:
        raise TypeError(f"codes are {codes.dtype} and scales {scales.dtype}, expected torch.int8 and torch.float32")
    expected = [*codes.shape[:-1], num_groups(codes.shape[-1], group_size)] if codes.ndim else None
    if list(scales.shape) != expected:
        raise ValueError(
            f"codes {list(codes.shape)} and scales {list(scales.shape)} do not belong together: "
            f"groups of {group_size} give scales {expected}"
        )
    groups = _split_groups(codes.to(torch.float32), group_size)
    return (groups * scales.unsqueeze(-1)).flatten(-2)[..., : codes.shape[-1]].to(dtype)


def _require_format(group_size: int, bits: int = 8) -> None:
    if group_size not in GROUP_SIZES:
        raise ValueError(f"activations share a scale in groups of 32, 64 or 128 elements, not {group_size!r}")
    if bits not in LARGEST_CODES:
        raise ValueError(f"activations are quantized to 8 or 4 bits, not {bits!r}")


def _split_groups(x: torch.Tensor, group_size: int) -> torch.Tensor:
    missing = -x.shape[-1] % group_size
    return torch.nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, group_size))
