"""How is an op defined? Once: one typed function gives its parameters, and computes it where no kernel is registered.

    @operator(check=_check_scaled, fake=lambda given: given.x.new_empty(given.x.shape), writes=("sums",))
    def scaled(x: Tensor, sums: Tensor, factor: float) -> Tensor: ...

is ``torch.ops.mlspec.scaled``. The schema follows from the signature; ``check`` and ``fake`` (shapes and dtypes
without computing, for torch.compile and meta tensors) get the operands of a call by the names of the signature. C++
only adds implementations (TORCH_LIBRARY_IMPL), so Python and C++ cannot disagree about a signature.
"""

from __future__ import annotations

import functools
import inspect
import math
import string
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..formats.activations import require_clip
from . import library

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CACHE_FLOATS = FLOATS[:2]  # of a cache, and of the steps of a whole model
_SCHEMA_TYPES = {"Tensor": "Tensor{}", "Tensor | None": "Tensor{}?", "int": "int", "float": "float",
                 "list[int]": "int[]"}  # fmt: skip

REFERENCES: dict[str, Callable] = {}  # of every op: its checks, then plain torch


class Operands:
    """The operands of one call, attributes by the names of the op's parameters, and what may be asked of them.

    Each ``require_*`` raises TypeError for a dtype, ValueError for a shape, a number or a layout, naming the op, the
    operand and the numbers; the compiled bindings say the same words.
    """

    def __init__(self, op: str, names: Sequence[str], values: Sequence):
        self.op = op
        vars(self).update(zip(names, values, strict=True))

    def on_one_device(self) -> Operands:
        tensors = [(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)]
        first, home = tensors[0]
        for name, tensor in tensors:
            if tensor.device != home.device:
                where = f"{name} is on {tensor.device}, {first} on {home.device}"
                raise ValueError(f"{self.op}: {where}; move them to one device")
        return self

    def require_part(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self.require_dtype(name, dtype)
        self.require_shape(name, shape)
        self.require_contiguous(name)

    def require_rows(self, in_features: int, out_features: int) -> None:
        """x and bias of a linear."""
        self.require_float("x")
        if self.x.ndim == 0 or self.x.shape[-1] != in_features:
            raise ValueError(
                f"{self.op}: x has shape {list(self.x.shape)}, the weight takes in_features = {in_features}"
            )
        if self.bias is not None:
            self.require_float("bias")
            self.require_shape("bias", (out_features,))

    def require_float(self, name: str, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
        if (dtype := vars(self)[name].dtype) not in dtypes:
            expected = "float32, bfloat16 or float16" if len(dtypes) == 3 else "float32 or bfloat16"
            raise TypeError(f"{self.op}: {name} is {dtype}, expected {expected}")

    def require_dtype(self, name: str, expected: torch.dtype) -> None:
        if (dtype := vars(self)[name].dtype) != expected:
            raise TypeError(f"{self.op}: {name} is {dtype}, expected {expected}")

    def require_shape(self, name: str, expected: Sequence[int]) -> None:
        if (shape := list(vars(self)[name].shape)) != list(expected):
            raise ValueError(f"{self.op}: {name} has shape {shape}, expected {list(expected)}")

    def require_axis(self, name: str) -> None:
        if vars(self)[name].ndim == 0:
            raise ValueError(f"{self.op}: {name} is a scalar, it must have at least one axis")

    def require_same(self, name: str, like: str) -> None:
        ours, theirs = vars(self)[name], vars(self)[like]
        if ours.dtype != theirs.dtype:
            raise TypeError(f"{self.op}: {name} is {ours.dtype}, {like} is {theirs.dtype}")
        self.require_shape(name, theirs.shape)

    def require_contiguous(self, name: str) -> None:
        tensor = vars(self)[name]
        if not tensor.is_contiguous():
            raise ValueError(
                f"{self.op}: {name} of shape {list(tensor.shape)} is not contiguous (strides {list(tensor.stride())});"
                " call .contiguous() once and keep the result"
            )

    def require_numbers(self, name: str, count: int | None) -> None:
        """int32, dense, ``[count]`` (any count if None)."""
        self.require_dtype(name, torch.int32)
        tensor = vars(self)[name]
        if tensor.ndim != 1 or (count is not None and len(tensor) != count):
            expected = "[n]" if count is None else f"[{count}]"
            raise ValueError(f"{self.op}: {name} has shape {list(tensor.shape)}, expected {expected}")
        self.require_contiguous(name)

    def require_choice(self, name: str, choices: Sequence[int]) -> None:
        if (value := vars(self)[name]) not in choices:
            raise ValueError(f"{self.op}: {name} is {value}, choose one of {list(choices)}")

    def require_activation_clip(self) -> None:
        """Of 4-bit activations."""
        require_clip(self.activation_clip, f"{self.op}: activation_clip")

    def require_scale(self) -> None:
        """Of the rows of a table."""
        if not math.isfinite(self.scale):
            raise ValueError(
                f"{self.op}: scale is {self.scale}, expected a finite number (1.0: the table's rows as they are)"
            )


def operator(
    check: Callable[[Operands], None],
    fake: Callable[[Operands], object],
    writes: Sequence[str] = (),
    composed_on_cpu: bool = False,
) -> Callable[[Callable], torch._ops.OpOverload]:
    """Define the op that the decorated function computes (above), and put the op in its place.

    writes: the tensors that it changes. composed_on_cpu: on the CPU it is made of other ops, whose kernels do the
    work, or keeps a few integers: no kernel of its own is missing.
    """

    def define(compute: Callable) -> torch._ops.OpOverload:
        op, names = compute.__name__.removeprefix("_"), tuple(inspect.signature(compute).parameters)

        def checked(values: Sequence) -> Operands:
            given = Operands(op, names, values).on_one_device()
            check(given)
            return given

        @functools.wraps(compute)
        def reference(*values):
            checked(values)
            return compute(*values)

        REFERENCES[op] = reference
        return library.define(op, schema_of(compute, writes), reference, lambda *values: fake(checked(values)),
                              composed_on_cpu)  # fmt: skip

    return define


def schema_of(function: Callable, writes: Sequence[str] = ()) -> str:
    """``(Tensor x, Tensor(a!) sums, float factor) -> Tensor``, of annotations as they are written. KeyError for one
    that no op has; ValueError where ``writes`` names no parameter."""
    signature, letters, parameters = inspect.signature(function), iter(string.ascii_lowercase), []
    if unknown := [name for name in writes if name not in signature.parameters]:
        raise ValueError(f"{function.__name__}: it has no parameters {unknown} to write to")
    for name, parameter in signature.parameters.items():
        written = f"({next(letters)}!)" if name in writes else ""
        parameters.append(f"{_SCHEMA_TYPES[parameter.annotation].format(written)} {name}")
    result = signature.return_annotation
    result = "()" if result == "None" else result.removeprefix("tuple").replace("[", "(").replace("]", ")")
    return f"({', '.join(parameters)}) -> {result}"


def like_x(given: Operands) -> Tensor:
    """The fake result of a linear: x's rows and dtype, its outputs in place of inputs."""
    return given.x.new_empty((*given.x.shape[:-1], given.out_features))
