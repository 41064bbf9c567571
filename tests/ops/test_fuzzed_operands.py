"""Do compiled ops refuse what does not fit, whatever it is, as their references do, and touch no memory but their own?

Operands that fit are changed by a seeded generator: shapes, strides, dtypes, alignment, none and huge sizes. Nothing
may end in another error than one of ours; the sanitizers of .ci/run look at memory meanwhile.
"""

from __future__ import annotations

import os
import random
from functools import cache
from typing import Any

import pytest
import torch
from test_operands import OPERANDS

from hf_mlspec.ops.operator import REFERENCES

CHANGED = int(os.environ.get("MLSPEC_FUZZ", "120"))  # operands of each op; 5000 take minutes
NUMBERS = (-(2**62), -(2**31), -1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**62)
FLOATS = (-1.0, 0.0, 0.5, 1e38, float("inf"), float("nan"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32,
          torch.int64, torch.bool)  # fmt: skip


WRITTEN = ("keys", "values")


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind where memory begins."""
    room = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    room[1:] = tensor.reshape(-1)
    return room[1:].view(tensor.shape)


def changed_tensor(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    shape, axis = list(tensor.shape), chance.randrange(max(tensor.ndim, 1))
    how = chance.randrange(9)
    if how == 0:
        return tensor.to(chance.choice(DTYPES))
    if how == 1:
        return unaligned(tensor)
    if how == 2:
        return tensor[None] if chance.random() < 0.5 else tensor.flatten()
    if not shape:
        return tensor.new_zeros(0)
    if how == 3:
        return tensor.transpose(axis, chance.randrange(tensor.ndim))
    if how == 4:
        return tensor.narrow(axis, 0, chance.randrange(shape[axis] + 1))
    if how == 5:
        return torch.cat([tensor, tensor.narrow(axis, 0, min(1, shape[axis]))], dim=axis)
    if how == 6:
        return tensor.narrow(axis, 0, min(1, shape[axis])).expand(shape)  # overlapping: a stride of 0
    if how == 7:
        return tensor.repeat_interleave(2, dim=axis).narrow(axis, 0, 2 * shape[axis])[
            tuple(slice(None, None, 2) if a == axis else slice(None) for a in range(tensor.ndim))
        ]
    return torch.full_like(tensor, chance.choice((0, 1, 127)))


def changed(value: Any, chance: random.Random) -> Any:
    """Another operand of the same kind."""
    if isinstance(value, torch.Tensor):
        return changed_tensor(value, chance)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return chance.choice((*NUMBERS, value - 1, value + 1, 2 * value))
    if isinstance(value, float):
        return chance.choice(FLOATS)
    if isinstance(value, list):
        return chance.choice(([], value[:-1], value + value[-1:], [chance.choice(NUMBERS) for _ in value]))
    return value


def outcome(function: Any, operands: dict[str, Any]) -> str:
    """"taken", or "refused"; any other error than ours is raised."""
    held = [value.clone() if isinstance(value, torch.Tensor) else value for value in operands.values()]
    try:
        function(*(given if isinstance(given, torch.Tensor) and _is_view(given) else kept
                   for given, kept in zip(operands.values(), held, strict=True)))  # fmt: skip
    except (ValueError, TypeError):
        return "refused"
    return "taken"


def _is_view(tensor: torch.Tensor) -> bool:
    """A clone of these would lose what was changed; what an op writes into them stays among them."""
    return not tensor.is_contiguous() or bool(tensor.storage_offset())


@cache
def good(op: str) -> dict[str, Any]:
    return OPERANDS[op](op)


def changed_operands(op: str, chance: random.Random) -> dict[str, Any]:
    """Operands of an op, one or two of which were changed."""
    operands = dict(good(op))
    for name in chance.sample(list(operands), min(chance.choice((1, 1, 2)), len(operands))):
        other = changed(operands[name], chance)
        if name not in WRITTEN or 0 not in other.stride():  # who writes into rows that are one knows no order
            operands[name] = other
    return operands


def said_of(operands: dict[str, Any]) -> dict[str, Any]:
    """What a message says of operands."""
    return {name: (list(v.shape), v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v
            for name, v in operands.items()}  # fmt: skip


@pytest.mark.parametrize("op", OPERANDS)
def test_changed_operands(op):
    chance, found = random.Random(op), []
    for _ in range(CHANGED):
        operands = changed_operands(op, chance)
        try:
            found.append(outcome(getattr(torch.ops.mlspec, op).default, operands))
        except Exception as error:
            pytest.fail(f"{op} of {said_of(operands)} raises {error!r}")
        assert outcome(REFERENCES[op], operands) == found[-1], f"{op} of {said_of(operands)}"
    assert len(set(found)) > 1, "all were taken, or none"
