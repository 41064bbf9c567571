"""Which saved tensors cannot be what a quantizer wrote? Shapes, dtypes and numbers, with errors that name them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .packing import LARGEST_CODE

NAN_SCALE = 255  # of E8M0


def require_values(name: str, tensor_name: str, tensor: torch.Tensor) -> None:
    """ValueError for numbers no quantizer writes, which mean damage: in ``<...>_scale`` of uint8 (E8M0) the NaN code,
    in one of float16 what is NaN, Inf, zero or negative, in ``<...>_zero`` what is above 15.

    Any number of axes, ``[..., out, in / group]``; a tensor of another name or on the meta device passes. The message
    names ``name``, ``tensor_name``, how many there are, and the first with its place.
    """
    if tensor.is_meta or not tensor_name.endswith(("_scale", "_zero")):
        return
    if tensor_name.endswith("_zero"):
        wrong, what = tensor > LARGEST_CODE, f"zero points above {LARGEST_CODE}"
    elif tensor.dtype == torch.uint8:
        wrong, what = tensor == NAN_SCALE, f"NaN codes ({NAN_SCALE})"
    else:
        wrong, what = ~(tensor.isfinite() & (tensor > 0)), "values that are NaN, Inf, zero or negative"
    require_none(wrong, name, tensor_name, tensor, what, "it was written from NaN weights")


def require_none(
    wrong: torch.Tensor, name: str, tensor_name: str, tensor: torch.Tensor, what: str, otherwise: str = ""
) -> None:
    """ValueError with the number and the first place of ``wrong`` (bool, ``tensor``'s shape); ``otherwise``: how else
    than by damage that can have come about."""
    if not wrong.any():
        return
    *expert, row, column = first = wrong.nonzero()[0].tolist()
    unit = "group" if tensor.dtype == torch.float16 or tensor_name.endswith("_zero") else "block"
    place = "".join(f"expert {index}, " for index in expert) + f"row {row}, {unit} {column}"
    raise ValueError(
        f"{name}: {tensor_name} holds {int(wrong.sum())} {what}, the first ({tensor[tuple(first)].item():g}) at "
        f"{place}: the checkpoint is damaged{f' or {otherwise}' if otherwise else ''}"
    )


def require_size(name: str, tensor_name: str, tensor: torch.Tensor, expected: Sequence[int]) -> None:
    """ValueError unless ``tensor`` has the shape ``expected``."""
    shape, expected = list(tensor.shape), list(expected)
    if shape == expected:
        return
    too_small = len(shape) == len(expected) and tensor.numel() < torch.Size(expected).numel()
    raise ValueError(
        f"{name}: {tensor_name} has shape {shape}, expected {expected}: the tensor is "
        f"{'truncated' if too_small else 'of another layer'}; download or write the checkpoint again"
    )


def require_dtype(name: str, tensor_name: str, tensor: torch.Tensor, dtype: torch.dtype, format: str) -> None:
    """TypeError unless ``tensor`` is ``dtype``."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: {tensor_name} is {tensor.dtype}, {format} saves it as {dtype}")
