"""What becomes of the weights of a model that is rotated? Products in float64, each rounded to its dtype once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..engines.architecture.description import Description
from ..formats.hadamard import Hadamard
from ..nn.transforms import HADAMARD, TransformedLinear, record_of
from .freed import release_pages
from .matrices import GivenRotation

ROWS = 128  # of a weight, or columns, in float64 at once
READERS = {"attention": ("q", "k", "v", "qkv"), "mlp": ("gate", "up", "gate_up")}  # of what each norm writes
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Heads:
    """How many of queries and of keys, and the elements of one."""

    queries: int
    keys: int
    dim: int

    @classmethod
    def of(cls, model: nn.Module, parts: Mapping[str, nn.Module]) -> Heads:
        """Of a model; parts: the linears of a layer."""
        queries = model.config.num_attention_heads
        return cls(queries, model.config.num_key_value_heads, parts["o"].weight.shape[1] // queries)


def drawn_signs(count: int, generator: torch.Generator) -> Tensor:
    """1 and -1, float64 ``[count]``."""
    return torch.randint(0, 2, (count,), generator=generator, dtype=torch.float64) * 2 - 1


def signs_before(how: Hadamard | GivenRotation, count: int, generator: torch.Generator) -> Tensor:
    """What is multiplied before a rotation: before a given one nothing, and what is drawn behind it stays the same."""
    signs = drawn_signs(count, generator)
    return signs if isinstance(how, Hadamard) else torch.ones_like(signs)


Step = Callable[[Tensor], None]


class Turns:
    """What becomes of weights and biases, step by step in place. Until `apply` nothing does; then one after another is
    in float32 (those of 16 bits), a few rows at a time where no step needs more."""

    def __init__(self) -> None:
        self._steps: dict[nn.Parameter, list[tuple[Step, bool]]] = {}

    def rows(self, parameter: nn.Parameter, step: Step) -> None:
        """One for any rows, each by itself."""
        self._steps.setdefault(parameter, []).append((step, True))

    def whole(self, parameter: nn.Parameter, step: Step) -> None:
        """One for all of it."""
        self._steps.setdefault(parameter, []).append((step, False))

    def apply(self, names: Mapping[nn.Parameter, str]) -> None:
        """ValueError naming a weight that float16 does not hold any more; the model is then rotated in part."""
        while self._steps:
            parameter, steps = self._steps.popitem()
            narrow = parameter.data
            if all(by_rows for _, by_rows in steps):
                turned = narrow if narrow.dtype.itemsize > 2 else torch.empty_like(narrow)
                for some, into in zip(narrow.split(ROWS), turned.split(ROWS), strict=True):
                    _turn(some, into, steps, names[parameter])
            else:
                turned = _turn(narrow, narrow, steps, names[parameter])
            if turned is not narrow:
                parameter.data = turned
                release_pages([narrow])


def _turn(narrow: Tensor, turned: Tensor, steps: list[tuple[Step, bool]], name: str) -> Tensor:
    """What steps make of ``narrow``, in its dtype; in ``turned`` where that is other memory, or of 32 bits or more."""
    wide = narrow.to(torch.promote_types(narrow.dtype, torch.float32))
    for step, by_rows in steps:
        for some in wide.split(ROWS) if by_rows else (wide,):
            step(some)
    if narrow.dtype == torch.float16 and wide.numel():
        most = max(map(abs, map(float, torch.aminmax(wide))))
        if not torch.tensor(most).half().isfinite():
            raise ValueError(f"rotate: {name} would hold {most:.3g}, float16 holds {_LARGEST:.0f} at most; load the "
                             "model again, in bfloat16 or float32")  # fmt: skip
    if wide is narrow:
        return narrow
    return wide.to(narrow.dtype) if turned is narrow else turned.copy_(wide)


def _write(rows: Tensor, value: Tensor) -> None:
    rows.copy_(value)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().double()


def fold_norms(turns: Turns, layer: nn.Module, entry: Description, parts: Mapping[str, nn.Module]) -> None:
    """Gains of a layer's norms into what reads them."""
    for norm, names in READERS.items():
        readers = [parts[name] for name in names if name in parts]
        fold_gain(turns, layer.get_submodule(entry.norms[norm]), readers, entry)


def fold_gain(turns: Turns, norm: nn.Module, readers: list[nn.Module], entry: Description) -> None:
    """The gain of a norm into the linears that read it; the norm is without one at once."""
    plus = 1.0 if entry.norm == "rms plus one" else 0.0
    gain = _wide(norm.weight) + plus
    for linear in readers:
        turns.rows(linear.weight, lambda some: _write(some, _wide(some) * gain.to(some.device)))
    norm.weight.fill_(1.0 - plus)


def rotate_residual(
    turns: Turns, parts: Mapping[str, nn.Module], how: Hadamard | GivenRotation, signs: Tensor
) -> None:
    """What reads the residual stream and what writes to it, of a layer."""

    def columns(weight: Tensor) -> None:
        for some in weight.split(ROWS, 1):
            _write(some, how.rotate(_wide(some).T * signs.to(some.device)).T)

    readers = [name for names in READERS.values() for name in names if name in parts]
    rotate_rows(turns, [parts[name].weight for name in readers], how, signs)
    for writer in (parts["o"], parts["down"]):
        turns.whole(writer.weight, columns)
        if writer.bias is not None:
            turns.whole(writer.bias, _by(how, signs))


def _by(how: Hadamard | GivenRotation, signs: Tensor) -> Step:
    return lambda some: _write(some, how.rotate(_wide(some) * signs.to(some.device)))


def rotate_rows(turns: Turns, weights: list[nn.Parameter], how: Hadamard | GivenRotation, signs: Tensor) -> None:
    """Every row of weights, times signs first, by the matrix."""
    for weight in weights:
        turns.rows(weight, _by(how, signs))


def rotate_values(
    turns: Turns, parts: Mapping[str, nn.Module], own: Heads, how: Hadamard | GivenRotation,
    generator: torch.Generator,
) -> None:  # fmt: skip
    """What each head mixes, with signs per key head before a Hadamard matrix; o_proj's columns take the way back."""
    first = 0 if "v" in parts else (own.queries + own.keys) * own.dim
    values, out = parts["v" if "v" in parts else "qkv"], parts["o"].weight
    signs = signs_before(how, own.keys * own.dim, generator).view(own.keys, own.dim).to(out.device)
    every = signs.repeat_interleave(own.queries // own.keys, 0)

    def mixed(parameter: Tensor) -> None:
        some = max(1, ROWS // own.dim)
        for rows, sign in zip(parameter[first:].split(some * own.dim), signs.split(some), strict=True):
            heads = _wide(rows).view(len(sign), own.dim, -1).transpose(1, 2)
            _write(rows, how.rotate(heads * sign[:, None]).transpose(1, 2).reshape(rows.shape))

    for parameter in (values.weight, values.bias):
        if parameter is not None:
            turns.whole(parameter, mixed)
    shape = own.queries, own.dim
    turns.rows(out, lambda some: _write(some, how.rotate(_wide(some).view(-1, *shape) * every).flatten(1)))


def flip_products(turns: Turns, parts: Mapping[str, nn.Module], signs: Tensor) -> None:
    """Signs of activation(gate) * up, by the rows of up; down_proj's columns take the way back."""
    first = 0 if "up" in parts else len(signs)
    up, down = parts["up" if "up" in parts else "gate_up"], parts["down"].weight
    signs = signs.to(device=down.device, dtype=torch.float32)
    turns.whole(up.weight, lambda weight: weight[first:].mul_(signs[:, None]))
    if up.bias is not None:
        turns.whole(up.bias, lambda bias: bias[first:].mul_(signs))
    turns.rows(down, lambda some: some.mul_(signs))


def put_in_front(turns: Turns, layer: nn.Module, place: str, how: Hadamard) -> None:
    """Rotate a linear's inputs at run time, and its weight so that its outputs stay."""
    linear = layer.get_submodule(place)
    rotate_rows(turns, [linear.weight], how, torch.ones(linear.in_features, dtype=torch.float64))
    layer.set_submodule(place, TransformedLinear.over(linear, HADAMARD, record_of(how)).train(linear.training))
