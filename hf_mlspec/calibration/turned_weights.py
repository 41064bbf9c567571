"""What becomes of the weights of a model that is rotated? Products in float64, each rounded to its dtype once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..engines.architecture.description import Description
from ..formats.hadamard import Hadamard
from ..nn.transforms import HADAMARD, TransformedLinear, record_of
from .freed import release_pages
from .matrices import GivenRotation

ROWS = 512  # of a weight, or columns, in float64 at once
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


def _write(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value.to(parameter.dtype))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().double()


@contextmanager
def in_float32(parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """Parameters of 16 bits have 32 while it lasts. parts: modules by name. ValueError naming a weight that float16
    does not hold any more; the model is then rotated in part."""
    named = {parameter: f"{part}.{name}" for part, one in parts.items() for name, parameter in one.named_parameters()}
    own = {parameter: parameter.dtype for parameter in named}
    try:
        for parameter, dtype in own.items():
            narrow = parameter.data
            parameter.data = narrow.to(torch.promote_types(dtype, torch.float32))
            release_pages([narrow])
        yield
    finally:
        narrow = [parameter for parameter, dtype in own.items() if dtype == torch.float16 and parameter.numel()]
        largest = {parameter: max(map(abs, map(float, torch.aminmax(parameter.detach())))) for parameter in narrow}
        for parameter, dtype in own.items():
            parameter.data = parameter.data.to(dtype)
    for parameter, most in largest.items():
        if not torch.tensor(most).half().isfinite():
            raise ValueError(
                f"rotate: {named[parameter]} would hold {most:.3g}, float16 holds {_LARGEST:.0f} at most; load the "
                "model again, in bfloat16 or float32"
            )


def fold_norms(layer: nn.Module, entry: Description, parts: Mapping[str, nn.Module]) -> None:
    """Gains of a layer's norms into what reads them."""
    for norm, names in READERS.items():
        fold_gain(layer.get_submodule(entry.norms[norm]), [parts[name] for name in names if name in parts], entry)


def fold_gain(norm: nn.Module, readers: list[nn.Module], entry: Description) -> None:
    """The gain of a norm into the linears that read it."""
    plus = 1.0 if entry.norm == "rms plus one" else 0.0
    gain = _wide(norm.weight) + plus
    for linear in readers:
        for some in linear.weight.split(ROWS):
            _write(some, _wide(some) * gain.to(some.device))
    norm.weight.fill_(1.0 - plus)


def rotate_residual(parts: Mapping[str, nn.Module], how: Hadamard | GivenRotation, signs: Tensor) -> None:
    """What reads the residual stream and what writes to it, of a layer."""
    rotate_rows([parts[name].weight for names in READERS.values() for name in names if name in parts], how, signs)
    for writer in (parts["o"], parts["down"]):
        own = signs.to(writer.weight.device)
        for some in writer.weight.split(ROWS, 1):
            _write(some, how.rotate(_wide(some).T * own).T)
        if writer.bias is not None:
            _write(writer.bias, how.rotate(_wide(writer.bias) * own))


def rotate_rows(weights: list[nn.Parameter], how: Hadamard | GivenRotation, signs: Tensor) -> None:
    """Every row of weights, times signs first, by the matrix."""
    for weight in weights:
        for some in weight.split(ROWS):
            _write(some, how.rotate(_wide(some) * signs.to(some.device)))


def rotate_values(
    parts: Mapping[str, nn.Module], own: Heads, how: Hadamard | GivenRotation, generator: torch.Generator
) -> None:
    """What each head mixes, with signs per key head before a Hadamard matrix; o_proj's columns take the way back."""
    first = 0 if "v" in parts else (own.queries + own.keys) * own.dim
    values, out = parts["v" if "v" in parts else "qkv"], parts["o"].weight
    signs = signs_before(how, own.keys * own.dim, generator).view(own.keys, own.dim).to(out.device)
    for parameter in (values.weight, values.bias):
        if parameter is not None:
            some = max(1, ROWS // own.dim)
            for rows, sign in zip(parameter[first:].split(some * own.dim), signs.split(some), strict=True):
                heads = _wide(rows).view(len(sign), own.dim, -1).transpose(1, 2)
                _write(rows, how.rotate(heads * sign[:, None]).transpose(1, 2).reshape(rows.shape))
    signs = signs.repeat_interleave(own.queries // own.keys, 0)
    for some in out.split(ROWS):
        _write(some, how.rotate(_wide(some).view(len(some), own.queries, own.dim) * signs).flatten(1))


def flip_products(parts: Mapping[str, nn.Module], signs: Tensor) -> None:
    """Signs of activation(gate) * up, by the rows of up; down_proj's columns take the way back."""
    first = 0 if "up" in parts else len(signs)
    up, down = parts["up" if "up" in parts else "gate_up"], parts["down"].weight
    signs = signs.to(down.device)
    up.weight[first:].mul_(signs[:, None].to(up.weight.dtype))
    if up.bias is not None:
        up.bias[first:].mul_(signs.to(up.bias.dtype))
    down.mul_(signs.to(down.dtype))


def put_in_front(layer: nn.Module, place: str, how: Hadamard) -> None:
    """Rotate a linear's inputs at run time, and its weight so that its outputs stay."""
    linear = layer.get_submodule(place)
    rotate_rows([linear.weight], how, torch.ones(linear.in_features, dtype=torch.float64))
    layer.set_submodule(place, TransformedLinear.over(linear, HADAMARD, record_of(how)).train(linear.training))
