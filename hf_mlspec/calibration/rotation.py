"""How is a model rotated so that its outputs stay and its activations lose their outliers?

QuaRot (arXiv 2404.00456), and SpinQuant (arXiv 2405.16406) where matrices are given: orthogonal matrices are folded
into weights, in float64. What cannot be folded, a Hadamard matrix in front of down_proj and one across heads in front
of o_proj, becomes a transform of these layers' inputs (nn/transforms.py), of which their weights take the way back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
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
from .freed import release_free
from .matrices import GivenRotation, given_rotation
from .methods import ROTATION

ROWS = 512  # of a weight, or columns, in float64 at once
_LARGEST = torch.finfo(torch.float16).max
_log = logging.getLogger(__name__)
_IN_PART = "_mlspec_rotated_in_part"  # on a model while it is rotated, and ever after where that was interrupted
READERS = {"attention": ("q", "k", "v", "qkv"), "mlp": ("gate", "up", "gate_up")}  # of what each norm writes


@dataclass(frozen=True)
class Rotation:
    """What `rotate` did to a model. None: nothing of the kind.

    residual: folded into everything that reads or writes the residual stream. value: folded, on each head's values,
    one for all layers or one for each. across_heads, down: of the inputs of o_proj and down_proj at run time. untied:
    whether the head was given a weight of its own.
    """

    residual: Hadamard | GivenRotation | None = None
    value: Hadamard | tuple[GivenRotation, ...] | None = None
    across_heads: Hadamard | None = None
    down: Hadamard | None = None
    untied: bool = False


def turned_inputs(
    model: nn.Module, *, residual: bool | Tensor = True, heads: bool | Sequence[Tensor] = True
) -> list[str]:
    """Paths of the linears whose inputs `rotate` is going to transform, of a dense model, whose weights need not be in
    memory yet. residual, heads: as there. ValueError as it raises, of a method: with a remedy that does without its
    options."""
    entry = _require_rotatable(model, True, ROTATION)
    plan = _planned(model, entry, residual, heads, True, ROTATION)
    places = [entry.linears[name] for name, how in (("o", plan.across_heads), ("down", plan.down)) if how is not None]
    return [f"{entry.layers}.{index}.{place}" for index in range(len(model.get_submodule(entry.layers)))
            for place in places]  # fmt: skip


@torch.no_grad()
def rotate(
    model: nn.Module, *, seed: int = 0, residual: bool | Tensor = True, heads: bool | Sequence[Tensor] = True,
    online: bool = True,
) -> Rotation:  # fmt: skip
    """Rotate a dense causal model in place; its outputs stay the same but for rounding in its dtype.

    residual: gains of norms into the linears behind them, then a Hadamard matrix with random signs into the embedding,
    the linears and the head; a tied head gets a weight of its own. heads: one on the values of each head, into v_proj
    and o_proj. Both may be given, as SpinQuant's (`read_rotations`): an orthogonal ``[hidden_size, hidden_size]`` R,
    by which rows x of the residual stream become x R, and for each layer one ``[head_dim, head_dim]``. online: in
    front of o_proj across heads, and of down_proj, with random signs in up_proj. seed: of the signs. Which matrix a
    width gets: `fitting_hadamard`. Each weight is rounded to its dtype once; a layer, the head or the embedding is
    held in float32 meanwhile.

    ValueError, before anything changes, naming the model or the size: an unknown class, layers that are packed or
    rotated already, odd widths, given matrices that do not fit, and with residual norms behind a block (Gemma 2 and
    3), which do not commute with it. Within a block, naming the weight, for one of float16 that grows beyond what
    float16 holds: load the model again.
    """
    require_dense(model, "rotate")
    entry = _require_rotatable(model, residual is not False, "rotate")
    plan = _planned(model, entry, residual, heads, online, "rotate")
    signs = torch.Generator().manual_seed(seed)
    vars(model)[_IN_PART] = True
    stream = None if plan.residual is None else _signs_before(plan.residual, model.config.hidden_size, signs)
    if plan.residual is not None:
        _rotate_ends(model, entry, plan, stream)
    for index, layer in enumerate(model.get_submodule(entry.layers)):
        release_free()
        with _in_float32({f"{entry.layers}.{index}": layer}):
            _rotate_layer(model, entry, plan, index, stream, signs)
    del vars(model)[_IN_PART]
    return plan


def _rotate_layer(
    model: nn.Module, entry: Description, plan: Rotation, index: int, stream: Tensor | None, signs: torch.Generator
) -> None:
    layer = model.get_submodule(entry.layers)[index]
    parts = {name: layer.get_submodule(place) for name, place in entry.linears.items()}
    if plan.residual is not None:
        _fold_norms(layer, entry, parts)
        _rotate_residual(parts, plan.residual, stream)
    if plan.value is not None:
        how = plan.value[index] if isinstance(plan.value, tuple) else plan.value
        _rotate_values(parts, _Heads.of(model, parts), how, signs)
    if plan.across_heads is not None:
        _put_in_front(layer, entry.linears["o"], plan.across_heads)
    if plan.down is not None:
        _flip_products(parts, _signs(parts["down"].weight.shape[1], signs))
        _put_in_front(layer, entry.linears["down"], plan.down)


@dataclass(frozen=True)
class _Heads:
    queries: int
    keys: int
    dim: int

    @classmethod
    def of(cls, model: nn.Module, parts: Mapping[str, nn.Module]) -> _Heads:
        queries = model.config.num_attention_heads
        return cls(queries, model.config.num_key_value_heads, parts["o"].weight.shape[1] // queries)


def _without(part: str, action: str) -> str:
    """How to leave out a part: an option of `rotate` that a method does not have."""
    if action == ROTATION:
        return f"call hf_mlspec.calibration.rotation.rotate(model, {part}=False), then quantize by rtn or gptq"
    return f"leave it out, rotate(model, {part}=False)"


def _require_rotatable(model: nn.Module, residual: bool, action: str) -> Description:
    name = type(model).__name__
    entry = KNOWN.get(name)
    if entry is None:
        raise ValueError(f"{action}: {name} is unknown, choose one of {', '.join(KNOWN)}")
    if any(isinstance(module, TransformedLinear) for module in model.modules()):
        raise ValueError(f"{action}: this {name} is rotated already: start from the original model")
    if vars(model).get(_IN_PART):
        raise ValueError(f"{action}: this {name} was rotated in part, by a call that did not end: load it again")
    if entry.has_layer_norms or entry.mlp == "plain" or entry.head_norms == "per rotated head":
        odd = "takes the mean off what it norms, has no gates in its MLP or norms rotated heads"
        raise ValueError(f"{action}: {name} {odd}, which no rotation is folded into; quantize it by rtn or gptq")
    behind = [entry.norms[norm] for norm in ("attention_out", "mlp_out") if norm in entry.norms]
    if residual and behind:
        raise ValueError(
            f"{action}: {name} has norms behind its blocks ({', '.join(behind)}), whose gains stand between what is "
            f"written and the residual stream: a rotation of it cannot be folded; {_without('residual', action)}: the "
            "heads and the online Hadamard matrices stay"
        )
    _require_changeable(model, action)
    seen: set[int] = set()
    for layer in model.get_submodule(entry.layers):
        for place in entry.linears.values():
            if id(layer.get_submodule(place).weight) in seen:
                raise ValueError(f"{action}: {place} of this {name} shares its weight with another layer")
            seen.add(id(layer.get_submodule(place).weight))
            if not is_dense(linear := layer.get_submodule(place)):
                raise ValueError(f"{action}: {place} of this {name} is a {type(linear).__name__}, expected nn.Linear")
    return entry


def _require_changeable(model: nn.Module, action: str) -> None:
    fixed = [name for name, parameter in model.named_parameters() if parameter.is_inference()]
    if fixed and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{action}: {len(fixed)} weights were made under torch.inference_mode, the first is {fixed[0]}, and "
            "cannot be changed behind it: load the model outside of it, or call this inside, too"
        )


def _planned(
    model: nn.Module, entry: Description, residual: bool | Tensor, heads: bool | Sequence[Tensor], online: bool,
    action: str,
) -> Rotation:  # fmt: skip
    layer, head = model.get_submodule(entry.layers)[0], model.get_submodule(entry.head)
    parts = {name: layer.get_submodule(place) for name, place in entry.linears.items()}
    own = _Heads.of(model, parts)
    tied = head.weight.data_ptr() == model.get_submodule(entry.embedding).weight.data_ptr()
    across = fitting_hadamard(own.queries, own.dim)
    width, layers = model.config.hidden_size, len(model.get_submodule(entry.layers))
    if not isinstance(residual, bool):
        stream = given_rotation(residual, width, "residual")
    else:
        stream = _fitting(width, "hidden_size", "residual", action) if residual else None
    if isinstance(heads, bool):
        value = _fitting(own.dim, "the size of a head,", "heads", action) if heads else None
    elif not isinstance(heads, Sequence):
        raise TypeError(f"rotate: heads is a {type(heads).__name__}, expected True, False or a matrix for each layer")
    elif len(heads) != layers:
        raise ValueError(f"rotate: heads holds {len(heads)} matrices, the model has {layers} layers")
    else:
        value = tuple(given_rotation(one, own.dim, f"heads[{index}]") for index, one in enumerate(heads))
    return Rotation(
        residual=stream,
        value=value,
        across_heads=across if online and not across.is_nothing else None,
        down=_fitting(parts["down"].weight.shape[1], "intermediate_size", "online", action) if online else None,
        untied=stream is not None and tied,
    )


def stream_matrix(model: nn.Module, seed: int) -> Tensor:
    """The rotation of the residual stream by which `rotate` multiplies with this seed, float64 ``[hidden_size,
    hidden_size]``."""
    how = _fitting(model.config.hidden_size, "hidden_size", "residual", "rotate")
    return how.rotate(_signs_before(how, model.config.hidden_size, torch.Generator().manual_seed(seed)).diag())


def _fitting(width: int, what: str, part: str, action: str) -> Hadamard:
    found = fitting_hadamard(width)
    if found.is_nothing:
        raise ValueError(f"{action}: {what} {width}, is odd: no Hadamard matrix divides it; {_without(part, action)}")
    return found


def _signs(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (count,), generator=generator, dtype=torch.float64) * 2 - 1


def _signs_before(how: Hadamard | GivenRotation, count: int, generator: torch.Generator) -> Tensor:
    """What is multiplied before a rotation: before a given one nothing, and what is drawn behind it stays the same."""
    signs = _signs(count, generator)
    return signs if isinstance(how, Hadamard) else torch.ones_like(signs)


def _write(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value.to(parameter.dtype))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().double()


@contextmanager
def _in_float32(parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """Parameters of 16 bits have 32 while it lasts. parts: modules by name. ValueError naming a weight that float16
    does not hold any more; the model is then rotated in part."""
    named = {parameter: f"{part}.{name}" for part, one in parts.items() for name, parameter in one.named_parameters()}
    own = {parameter: parameter.dtype for parameter in named}
    try:
        for parameter, dtype in own.items():
            parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
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


def _rotate_ends(model: nn.Module, entry: Description, plan: Rotation, signs: Tensor) -> None:
    """Embedding and head; the head, untied first, takes the gain of the last norm."""
    head, table = model.get_submodule(entry.head), model.get_submodule(entry.embedding)
    if plan.untied:
        separate_head(model)
        _log.warning("rotate: %s has its head tied to its embedding; the head gets a weight of its own, which holds "
                     "the gain of %s", type(model).__name__, entry.final_norm)  # fmt: skip
    with _in_float32({entry.final_norm: (norm := model.get_submodule(entry.final_norm)), entry.head: head}):
        _fold_gain(norm, [head], entry)
        _rotate_rows([head.weight], plan.residual, signs)
    with _in_float32({entry.embedding: table}):
        _rotate_rows([table.weight], plan.residual, signs)


def separate_head(model: nn.Module) -> None:
    """A weight of its own for a head that shares the embedding's."""
    head = model.get_submodule(KNOWN[type(model).__name__].head)
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    untie_head(model)


def _fold_norms(layer: nn.Module, entry: Description, parts: Mapping[str, nn.Module]) -> None:
    for norm, names in READERS.items():
        _fold_gain(layer.get_submodule(entry.norms[norm]), [parts[name] for name in names if name in parts], entry)


def _fold_gain(norm: nn.Module, readers: list[nn.Module], entry: Description) -> None:
    """The gain of a norm into the linears that read it."""
    plus = 1.0 if entry.norm == "rms plus one" else 0.0
    gain = _wide(norm.weight) + plus
    for linear in readers:
        for some in linear.weight.split(ROWS):
            _write(some, _wide(some) * gain.to(some.device))
    norm.weight.fill_(1.0 - plus)


def _rotate_residual(parts: Mapping[str, nn.Module], how: Hadamard | GivenRotation, signs: Tensor) -> None:
    """What reads the residual stream and what writes to it, of a layer."""
    _rotate_rows([parts[name].weight for names in READERS.values() for name in names if name in parts], how, signs)
    for writer in (parts["o"], parts["down"]):
        own = signs.to(writer.weight.device)
        for some in writer.weight.split(ROWS, 1):
            _write(some, how.rotate(_wide(some).T * own).T)
        if writer.bias is not None:
            _write(writer.bias, how.rotate(_wide(writer.bias) * own))


def _rotate_rows(weights: list[nn.Parameter], how: Hadamard | GivenRotation, signs: Tensor) -> None:
    for weight in weights:
        for some in weight.split(ROWS):
            _write(some, how.rotate(_wide(some) * signs.to(some.device)))


def _rotate_values(
    parts: Mapping[str, nn.Module], own: _Heads, how: Hadamard | GivenRotation, generator: torch.Generator
) -> None:
    """What each head mixes, with signs per key head before a Hadamard matrix; o_proj's columns take the way back."""
    first = 0 if "v" in parts else (own.queries + own.keys) * own.dim
    values, out = parts["v" if "v" in parts else "qkv"], parts["o"].weight
    signs = _signs_before(how, own.keys * own.dim, generator).view(own.keys, own.dim).to(out.device)
    for parameter in (values.weight, values.bias):
        if parameter is not None:
            some = max(1, ROWS // own.dim)
            for rows, sign in zip(parameter[first:].split(some * own.dim), signs.split(some), strict=True):
                heads = _wide(rows).view(len(sign), own.dim, -1).transpose(1, 2)
                _write(rows, how.rotate(heads * sign[:, None]).transpose(1, 2).reshape(rows.shape))
    signs = signs.repeat_interleave(own.queries // own.keys, 0)
    for some in out.split(ROWS):
        _write(some, how.rotate(_wide(some).view(len(some), own.queries, own.dim) * signs).flatten(1))


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
    _rotate_rows([linear.weight], how, torch.ones(linear.in_features, dtype=torch.float64))
    layer.set_submodule(place, TransformedLinear.over(linear, HADAMARD, record_of(how)).train(linear.training))
