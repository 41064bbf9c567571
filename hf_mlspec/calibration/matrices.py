"""Which rotations are kept in a file, and is a matrix one?

SpinQuant (arXiv 2405.16406) keeps those that it learned as ``R.bin``, written by torch.save: ``R1``, of the residual
stream, and ``model.layers.N.self_attn.R2``, of the values of each head of layer N. A row x becomes x R.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoints.pickles import read_pickle
from ..checkpoints.whole_file import written_whole

_STREAM, _VALUES = "R1", re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.self_attn\.R2")
_MOST_OFF, _EXACT = 0.01, 1e-12  # of R^T R from the identity: bfloat16 rounds by .004


@dataclass(frozen=True, eq=False)
class GivenRotation:
    """The rotation nearest to a matrix that was rounded, so that outputs stay; beside `Hadamard` where weights are
    rotated. given: float64 ``[width, width]``, off from orthogonal by at most `_MOST_OFF`."""

    given: Tensor

    @cached_property
    def matrix(self) -> Tensor:
        """Float64 ``[width, width]``, orthogonal; found when it is needed: planning a rotation looks at none."""
        wide, off = self.given, _off(self.given)
        while off > _EXACT:
            gram = wide.T @ wide
            wide = (3 * wide - wide @ gram) / 2  # Newton's iteration for the polar factor, which is the nearest
            before, off = off, _off(wide)
            if off >= before:
                break
        return wide

    def rotate(self, x: Tensor) -> Tensor:
        """Floats ``[..., width]`` -> float64, every row times the matrix."""
        return x.double() @ self.matrix.to(x.device)


def given_rotation(matrix: object, width: int, name: str) -> GivenRotation:
    """TypeError and ValueError, naming it, for what is no ``[width, width]`` rotation."""
    if not isinstance(matrix, Tensor) or not matrix.is_floating_point():
        kind = matrix.dtype if isinstance(matrix, Tensor) else type(matrix).__name__
        raise TypeError(f"rotate: {name} is a {kind}, expected a tensor of floating-point numbers")
    if list(matrix.shape) != [width, width]:
        raise ValueError(f"rotate: {name} is {list(matrix.shape)}, this model's is [{width}, {width}]: the rotation "
                         "belongs to another model")
    wide = matrix.detach().cpu().double()
    off = _off(wide)
    if not off <= _MOST_OFF:  # NaN
        raise ValueError(f"rotate: {name} is not orthogonal: its columns are off by {off:.3g}")
    return GivenRotation(wide)


def _off(matrix: Tensor) -> float:
    """How far R^T R is from the identity."""
    gram = matrix.T @ matrix
    gram.diagonal().sub_(1)
    return float(gram.abs().max())


def read_rotations(file: str | os.PathLike) -> tuple[Tensor, list[Tensor] | None]:
    """What a file like SpinQuant's holds: ``[hidden_size, hidden_size]``, and for each layer ``[head_dim, head_dim]``
    or None for all, as `rotate` takes them: ``residual=`` and ``heads=``. Nothing in the file is run.

    ValueError for a file of something else, or that lacks a layer; OSError where there is none.
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is no file of rotations, such as SpinQuant's R.bin")
    held = read_pickle(path)
    if not isinstance(held, Mapping) or _STREAM not in held:
        raise ValueError(f"{path} holds no {_STREAM}, the rotation of the residual stream: it is no file of rotations")
    if wrong := [name for name, matrix in held.items() if not isinstance(matrix, Tensor)]:
        raise ValueError(f"{path}: {wrong[0]} is a {type(held[wrong[0]]).__name__}, expected a tensor")
    layers = {name: _VALUES.fullmatch(str(name)) for name in held if name != _STREAM}
    if strange := [name for name, found in layers.items() if found is None]:
        raise ValueError(f"{path} holds {strange[0]}, expected {_STREAM} and model.layers.N.self_attn.R2")
    values = {int(found[1]): held[name] for name, found in layers.items()}
    if sorted(values) != list(range(len(values))):
        missing = next(index for index in range(len(values)) if index not in values)
        raise ValueError(f"{path} holds no model.layers.{missing}.self_attn.R2, but those of other layers")
    return held[_STREAM], [values[index] for index in range(len(values))] or None


def write_rotations(file: str | os.PathLike, residual: Tensor, heads: Sequence[Tensor] | None = None) -> None:
    """A file that `read_rotations` reads, written aside and renamed; matrices keep their dtype."""
    path = Path(file)
    held = {_STREAM: residual.detach().cpu().contiguous()}
    for index, matrix in enumerate(heads or ()):
        held[f"model.layers.{index}.self_attn.R2"] = matrix.detach().cpu().contiguous()
    with written_whole(path) as aside:
        torch.save(held, aside)
