"""How is a model rotated so that its outputs stay and its activations lose their outliers?

QuaRot (arXiv 2404.00456): orthogonal matrices are folded into weights, in float64. What cannot be folded, a Hadamard
matrix in front of down_proj and one across heads in front of o_proj, becomes a transform of these layers' inputs
(nn/transforms.py), of which their weights take the way back. Any quantization may follow.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..engines.architecture.description import Description
from ..engines.architecture.known import KNOWN
from ..formats.hadamard import Hadamard, fitting_hadamard
from ..nn.castable import require_dense
from ..nn.linear import is_dense
from ..nn.replace import untie_head
from ..nn.transforms import HADAMARD, TransformedLinear, record_of

ROWS = 8192  # in float64 at once: a table of embeddings is the largest weight of many models
_log = logging.getLogger(__name__)
_IN_PART = "_mlspec_rotated_in_part"  # on a model while it is rotated, and ever after where that was interrupted
_READERS = {"attention": ("q", "k", "v", "qkv"), "mlp": ("gate", "up", "gate_up")}  # of what each norm writes


@dataclass(frozen=True)
class Rotation:
    """What `rotate` did to a model. None: nothing of the kind.

    residual: folded into everything that reads or writes the residual stream. value: folded, on each head's values.
    across_heads, down: of the inputs of o_proj and down_proj at run time. untied: whether the head was given a weight
    of its own.
    """

    residual: Hadamard | None = None
    value: Hadamard | None = None
    across_heads: Hadamard | None = None
    down: Hadamard | None = None
    untied: bool = False


def turned_inputs(model: nn.Module) -> list[str]:
    """Paths of the linears whose inputs `rotate` is going to transform, of a dense model, whose weights need not be in
    memory yet. ValueError as it raises."""
    entry = _require_rotatable(model, True)
    plan = _planned(model, entry, True, True, True)
    turned = {"o": plan.across_heads, "down": plan.down}
    places = [entry.linears[name] for name, how in turned.items() if how is not None]
    count = len(model.get_submodule(entry.layers))
    return [f"{entry.layers}.{index}.{place}" for index in range(count) for place in places]


@torch.no_grad()
def rotate(
    model: nn.Module, *, seed: int = 0, residual: bool = True, heads: bool = True, online: bool = True
) -> Rotation:
    """Rotate a dense causal model in place; its outputs stay the same but for rounding in its dtype.

    residual: gains of norms into the linears behind them, then a Hadamard matrix with random signs into the embedding,
    the linears and the head; a tied head gets a weight of its own. heads: one on the values of each head, into v_proj
    and o_proj. online: in front of o_proj across heads, and of down_proj, with random signs in up_proj. seed: of the
    signs. Which matrix a width gets: `fitting_hadamard`. Each weight is rounded to its dtype once; a layer, or the
    embedding and the head, are held in float32 meanwhile.

    ValueError, before anything changes, naming the model or the size: an unknown class, layers that are packed or
    rotated already, odd widths, and with residual norms behind a block (Gemma 2 and 3), which do not commute with it.
    """
    require_dense(model, "rotate")
    entry = _require_rotatable(model, residual)
    plan = _planned(model, entry, residual, heads, online)
    signs = torch.Generator().manual_seed(seed)
    vars(model)[_IN_PART] = True
    stream = _signs(model.config.hidden_size, signs) if residual else None
    if residual:
        _rotate_ends(model, entry, plan, stream)
    for layer in model.get_submodule(entry.layers):
        parts = {name: layer.get_submodule(place) for name, place in entry.linears.items()}
        with _in_float32(layer):
            if residual:
                _fold_norms(layer, entry, parts)
                _rotate_residual(parts, plan.residual, stream)
            if plan.value is not None:
                _rotate_values(parts, _Heads.of(model, parts), plan.value, signs)
            if plan.across_heads is not None:
                _put_in_front(layer, entry.linears["o"], plan.across_heads)
            if plan.down is not None:
                _flip_products(parts, _signs(parts["down"].weight.shape[1], signs))
                _put_in_front(layer, entry.linears["down"], plan.down)
    del vars(model)[_IN_PART]
    return plan


@dataclass(frozen=True)
class _Heads:
    queries: int
    keys: int
    dim: int

    @classmethod
    def of(cls, model: nn.Module, parts: Mapping[str, nn.Module]) -> _Heads:
        queries = model.config.num_attention_heads
        return cls(queries, model.config.num_key_value_heads, parts["o"].weight.shape[1] // queries)


def _require_rotatable(model: nn.Module, residual: bool) -> Description:
    name = type(model).__name__
    entry = KNOWN.get(name)
    if entry is None:
        raise ValueError(f"rotate: {name} is unknown, choose one of {', '.join(KNOWN)}")
    if any(isinstance(module, TransformedLinear) for module in model.modules()):
        raise ValueError(f"rotate: this {name} is rotated already: start from the original model")
    if vars(model).get(_IN_PART):
        raise ValueError(f"rotate: this {name} was rotated in part, by a call that did not end: load it again")
    behind = [entry.norms[norm] for norm in ("attention_out", "mlp_out") if norm in entry.norms]
    if residual and behind:
        raise ValueError(
            f"rotate: {name} has norms behind its blocks ({', '.join(behind)}), whose gains stand between what is "
            "written and the residual stream: a rotation of it cannot be folded; rotate(model, residual=False) does "
            "the heads and the online Hadamard matrices"
        )
    seen: set[int] = set()
    for layer in model.get_submodule(entry.layers):
        for place in entry.linears.values():
            if id(layer.get_submodule(place).weight) in seen:
                raise ValueError(f"rotate: {place} of this {name} shares its weight with another layer")
            seen.add(id(layer.get_submodule(place).weight))
            if not is_dense(linear := layer.get_submodule(place)):
                raise ValueError(f"rotate: {place} of this {name} is a {type(linear).__name__}, expected nn.Linear")
    return entry


def _planned(model: nn.Module, entry: Description, residual: bool, heads: bool, online: bool) -> Rotation:
    layer, head = model.get_submodule(entry.layers)[0], model.get_submodule(entry.head)
    parts = {name: layer.get_submodule(place) for name, place in entry.linears.items()}
    own = _Heads.of(model, parts)
    tied = head.weight.data_ptr() == model.get_submodule(entry.embedding).weight.data_ptr()
    across = fitting_hadamard(own.queries, own.dim)
    return Rotation(
        residual=_fitting(model.config.hidden_size, "hidden_size", "residual") if residual else None,
        value=_fitting(own.dim, "the size of a head,", "heads") if heads else None,
        across_heads=across if online and not across.is_nothing else None,
        down=_fitting(parts["down"].weight.shape[1], "intermediate_size", "online") if online else None,
        untied=residual and tied,
    )


def _fitting(width: int, what: str, part: str) -> Hadamard:
    found = fitting_hadamard(width)
    if found.is_nothing:
        raise ValueError(
            f"rotate: {what} {width}, is odd: no Hadamard matrix divides it; leave it out with {part}=False"
        )
    return found


def _signs(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (count,), generator=generator, dtype=torch.float64) * 2 - 1


def _write(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value.to(parameter.dtype))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().double()


@contextmanager
def _in_float32(*modules: nn.Module) -> Iterator[None]:
    """Parameters of 16 bits have 32 while it lasts."""
    own = {parameter: parameter.dtype for module in modules for parameter in module.parameters()}
    try:
        for parameter, dtype in own.items():
            parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
        yield
    finally:
        for parameter, dtype in own.items():
            parameter.data = parameter.data.to(dtype)


def _rotate_ends(model: nn.Module, entry: Description, plan: Rotation, signs: Tensor) -> None:
    """Embedding and head; the head, untied first, takes the gain of the last norm."""
    head, table = model.get_submodule(entry.head), model.get_submodule(entry.embedding)
    if plan.untied:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        untie_head(model)
        _log.warning("rotate: %s has its head tied to its embedding; the head gets a weight of its own, which holds "
                     "the gain of %s", type(model).__name__, entry.final_norm)  # fmt: skip
    with _in_float32(norm := model.get_submodule(entry.final_norm), head, table):
        _fold_gain(norm, [head], entry)
        _rotate_rows([table.weight, head.weight], plan.residual, signs)


def _fold_norms(layer: nn.Module, entry: Description, parts: Mapping[str, nn.Module]) -> None:
    for norm, names in _READERS.items():
        _fold_gain(layer.get_submodule(entry.norms[norm]), [parts[name] for name in names if name in parts], entry)


def _fold_gain(norm: nn.Module, readers: list[nn.Module], entry: Description) -> None:
    """The gain of a norm into the linears that read it."""
    plus = 1.0 if entry.norm == "rms plus one" else 0.0
    gain = _wide(norm.weight) + plus
    for linear in readers:
        for some in linear.weight.split(ROWS):
            _write(some, _wide(some) * gain.to(some.device))
    norm.weight.fill_(1.0 - plus)


def _rotate_residual(parts: Mapping[str, nn.Module], how: Hadamard, signs: Tensor) -> None:
    """What reads the residual stream and what writes to it, of a layer."""
    _rotate_rows([parts[name].weight for names in _READERS.values() for name in names if name in parts], how, signs)
    for writer in (parts["o"], parts["down"]):
        own = signs.to(writer.weight.device)
        _write(writer.weight, how.rotate(_wide(writer.weight).T * own).T)
        if writer.bias is not None:
            _write(writer.bias, how.rotate(_wide(writer.bias) * own))


def _rotate_rows(weights: list[nn.Parameter], how: Hadamard, signs: Tensor) -> None:
    for weight in weights:
        for some in weight.split(ROWS):
            _write(some, how.rotate(_wide(some) * signs.to(some.device)))


def _rotate_values(parts: Mapping[str, nn.Module], own: _Heads, how: Hadamard, generator: torch.Generator) -> None:
    """What each head mixes, with signs per key head; o_proj's columns take the way back."""
    first = 0 if "v" in parts else (own.queries + own.keys) * own.dim
    values, out = parts["v" if "v" in parts else "qkv"], parts["o"].weight
    signs = _signs(own.keys * own.dim, generator).view(own.keys, own.dim).to(out.device)

    def turned(rows: Tensor) -> Tensor:  # [keys * dim, ...]
        heads = _wide(rows).view(own.keys, own.dim, -1).transpose(1, 2)
        return how.rotate(heads * signs[:, None]).transpose(1, 2).reshape(rows.shape)

    for parameter in (values.weight, values.bias):
        if parameter is not None:
            parameter[first:].copy_(turned(parameter[first:]).to(parameter.dtype))
    columns = _wide(out).view(len(out), own.queries, own.dim)
    _write(out, how.rotate(columns * signs.repeat_interleave(own.queries // own.keys, 0)).flatten(1))


def _flip_products(parts: Mapping[str, nn.Module], signs: Tensor) -> None:
    """Signs of activation(gate) * up, by the rows of up; down_proj's columns take the way back."""
    first = 0 if "up" in parts else len(signs)
    up, down = parts["up" if "up" in parts else "gate_up"], parts["down"].weight
    signs = signs.to(down.device)
    up.weight[first:].mul_(signs[:, None].to(up.weight.dtype))
    if up.bias is not None:
        up.bias[first:].mul_(signs.to(up.bias.dtype))
    down.mul_(signs.to(down.dtype))


def _put_in_front(layer: nn.Module, place: str, how: Hadamard) -> None:
    """Rotate a linear's inputs at run time, and its weight so that its outputs stay."""
    linear = layer.get_submodule(place)
    _write(linear.weight, how.rotate(_wide(linear.weight)))
    layer.set_submodule(place, TransformedLinear.over(linear, HADAMARD, record_of(how)).train(linear.training))
