"""Which saved tensors cannot be what a quantizer wrote? Shapes, dtypes and numbers, with errors that name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .packing import LARGEST_CODE

NAN_SCALE = 255  # of E8M0
# The bits of Inf, and an integer of that size. Numbers above 0 are below it and in the order of their bits.
_INFINITIES = {
    torch.float16: (0x7C00, torch.int16), torch.bfloat16: (0x7F80, torch.int16),
    torch.float32: (0x7F800000, torch.int32),
}  # fmt: skip


# What a part may hold: ``(name, tensor_name, tensor)`` -> ValueError for numbers that no quantizer writes: damage.
# It names both, how many there are, and the first with its place. Any number of axes; the meta device passes.
ValueCheck = Callable[[str, str, torch.Tensor], None]


def require_finite(name: str, tensor_name: str, tensor: torch.Tensor) -> None:
    """A `ValueCheck` for any floating dtype, float8 too: no NaN, no Inf."""
    _require(lambda: ~tensor.float().isfinite(), name, tensor_name, tensor, "values that are NaN or Inf")


def all_positive(numbers: torch.Tensor) -> bool:
    """Whether every number is finite and above 0. Of float16, bfloat16 and float32 it is one pass over their bits, in
    a tenth of the time of comparisons."""
    if not numbers.numel():
        return True
    if numbers.dtype not in _INFINITIES:
        return bool((numbers.isfinite() & (numbers > 0)).all())
    infinity, word = _INFINITIES[numbers.dtype]
    low, high = numbers.view(word).aminmax()
    return int(low) > 0 and int(high) < infinity


def require_positive(name: str, tensor_name: str, tensor: torch.Tensor) -> None:
    """A `ValueCheck` of float16 scales: finite and above 0."""
    if not tensor.is_meta and all_positive(tensor):
        return
    what = "values that are NaN, Inf, zero or negative"
    _require(lambda: ~(tensor.isfinite() & (tensor > 0)), name, tensor_name, tensor, what)


def require_exponents(name: str, tensor_name: str, tensor: torch.Tensor) -> None:
    """A `ValueCheck` of E8M0 scales, uint8: no NaN code."""
    _require(lambda: tensor == NAN_SCALE, name, tensor_name, tensor, f"NaN codes ({NAN_SCALE})")


def require_zero_points(name: str, tensor_name: str, tensor: torch.Tensor) -> None:
    """A `ValueCheck` of the zero points of 4-bit codes, uint8: 0 to 15."""
    if not tensor.is_meta and (not tensor.numel() or int(tensor.amax()) <= LARGEST_CODE):
        return
    _require(lambda: tensor > LARGEST_CODE, name, tensor_name, tensor, f"zero points above {LARGEST_CODE}")


def require_permutation(name: str, tensor_name: str, tensor: torch.Tensor) -> None:
    """A `ValueCheck` of an order, integers ``[n]``: every one of 0 to n - 1, once."""
    if tensor.is_meta:
        return
    what = f"entries that are none of its {tensor.numel()} inputs or there more than once"
    require_none(misplaced(tensor), name, tensor_name, tensor, what, "its order is no permutation")


def misplaced(order: torch.Tensor) -> torch.Tensor:
    """bool ``[n]``: entries of integers ``[n]`` that are none of 0 to n - 1, or there more than once."""
    count = order.numel()
    inside = (order >= 0) & (order < count)
    times = torch.bincount(order[inside].long(), minlength=count)
    return ~inside | (times[order.clamp(0, count - 1).long()] > 1)


def _require(
    wrong: Callable[[], torch.Tensor], name: str, tensor_name: str, tensor: torch.Tensor, what: str
) -> None:
    if not tensor.is_meta:
        require_none(wrong(), name, tensor_name, tensor, what, "it was written from NaN weights")


def require_none(
    wrong: torch.Tensor, name: str, tensor_name: str, tensor: torch.Tensor, what: str, otherwise: str = ""
) -> None:
    """ValueError with the number and the first place of ``wrong`` (bool, ``tensor``'s shape); ``otherwise``: how else
    than by damage that can have come about."""
    if not wrong.any():
        return
    first = tuple(wrong.nonzero()[0].tolist())
    raise ValueError(
        f"{name}: {tensor_name} holds {int(wrong.sum())} {what}, the first ({tensor[first].item():g}) at "
        f"{_place(first, tensor_name, tensor)}: the checkpoint is damaged{f' or {otherwise}' if otherwise else ''}"
    )


def _place(first: tuple[int, ...], tensor_name: str, tensor: torch.Tensor) -> str:
    if len(first) < 2:
        return f"index {list(first)}"
    *expert, row, column = first
    unit = "group" if tensor.is_floating_point() or tensor_name.endswith("_zero") else "block"
    return "".join(f"expert {index}, " for index in expert) + f"row {row}, {unit} {column}"


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
