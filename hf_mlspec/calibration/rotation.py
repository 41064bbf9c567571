"""How is a model rotated so that its outputs stay and its activations lose their outliers?

QuaRot (arXiv 2404.00456), and SpinQuant (arXiv 2405.16406) where matrices are given: orthogonal matrices are folded
into weights, in float64. What cannot be folded, a Hadamard matrix in front of down_proj and one across heads in front
of o_proj, becomes a transform of these layers' inputs (nn/transforms.py), of which their weights take the way back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..engines.architecture.description import Description
from ..engines.architecture.known import KNOWN
from ..formats.hadamard import Hadamard, fitting_hadamard
from ..nn.castable import require_dense
from ..nn.linear import is_dense
from ..nn.replace import untie_head
from ..nn.transforms import TransformedLinear
from .freed import release_free
from .matrices import GivenRotation, given_rotation
from .methods import ROTATION
from .turned_weights import (
    Heads,
    Turns,
    drawn_signs,
    flip_products,
    fold_gain,
    fold_norms,
    put_in_front,
    rotate_residual,
    rotate_rows,
    rotate_values,
    signs_before,
)

_log = logging.getLogger(__name__)
_IN_PART = "_mlspec_rotated_in_part"  # on a model while it is rotated, and ever after where that was interrupted


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
    online: bool | str = True,
) -> Rotation:  # fmt: skip
    """Rotate a dense causal model in place; its outputs stay the same but for rounding in its dtype.

    residual: gains of norms into the linears behind them, then a Hadamard matrix with random signs into the embedding,
    the linears and the head; a tied head gets a weight of its own. heads: one on the values of each head, into v_proj
    and o_proj. Both may be given, as SpinQuant's (`read_rotations`): an orthogonal ``[hidden_size, hidden_size]`` R,
    by which rows x of the residual stream become x R, and for each layer one ``[head_dim, head_dim]``. online: in
    front of o_proj across heads, and of down_proj, with random signs in up_proj; "down": of down_proj alone, as
    SpinQuant has it, one less to compute at run time. seed: of the signs. Which matrix a
    width gets: `fitting_hadamard`. Each weight is rounded to its dtype once; one of a layer, or some rows, are held in
    float32 meanwhile.

    ValueError, before anything changes, naming the model or the size: an unknown class, layers that are packed or
    rotated already, odd widths, given matrices that do not fit, and with residual norms behind a block (Gemma 2 and
    3), which do not commute with it. Within a block, naming the weight, for one of float16 that grows beyond what
    float16 holds: load the model again.
    """
    plan, layers = rotate_ends(model, seed=seed, residual=residual, heads=heads, online=online)
    for _ in layers:
        pass
    return plan


@torch.no_grad()
def rotate_ends(
    model: nn.Module, *, seed: int = 0, residual: bool | Tensor = True, heads: bool | Sequence[Tensor] = True,
    online: bool | str = True,
) -> tuple[Rotation, Iterator[int]]:  # fmt: skip
    """`rotate`, of the embedding; -> what it does, and an iterator that rotates one block after another and gives
    their numbers, then the head. Until its end the model is rotated in part."""
    require_dense(model, "rotate")
    entry = _require_rotatable(model, residual is not False, "rotate")
    plan = _planned(model, entry, residual, heads, online, "rotate")
    signs = torch.Generator().manual_seed(seed)
    vars(model)[_IN_PART] = True
    stream = None if plan.residual is None else signs_before(plan.residual, model.config.hidden_size, signs)
    if plan.residual is not None:
        _rotate_embedding(model, entry, plan, stream)
    return plan, _rotated_layers(model, entry, plan, stream, signs)


def _rotated_layers(
    model: nn.Module, entry: Description, plan: Rotation, stream: Tensor | None, signs: torch.Generator
) -> Iterator[int]:
    for index in range(len(model.get_submodule(entry.layers))):
        with torch.no_grad():
            _rotate_layer(model, entry, plan, index, stream, signs)
        release_free()
        yield index
    if plan.residual is not None:
        with torch.no_grad():
            _rotate_head(model, entry, plan, stream)
    del vars(model)[_IN_PART]


def _rotate_layer(
    model: nn.Module, entry: Description, plan: Rotation, index: int, stream: Tensor | None, signs: torch.Generator
) -> None:
    layer, turns = model.get_submodule(entry.layers)[index], Turns()
    parts = {name: layer.get_submodule(place) for name, place in entry.linears.items()}
    names = {parameter: f"{entry.layers}.{index}.{name}" for name, parameter in layer.named_parameters()}
    if plan.residual is not None:
        fold_norms(turns, layer, entry, parts)
        rotate_residual(turns, parts, plan.residual, stream)
    if plan.value is not None:
        how = plan.value[index] if isinstance(plan.value, tuple) else plan.value
        rotate_values(turns, parts, Heads.of(model, parts), how, signs)
    if plan.across_heads is not None:
        put_in_front(turns, layer, entry.linears["o"], plan.across_heads)
    if plan.down is not None:
        flip_products(turns, parts, drawn_signs(parts["down"].weight.shape[1], signs))
        put_in_front(turns, layer, entry.linears["down"], plan.down)
    turns.apply(names)


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
    if entry.heads != "alike":
        raise ValueError(f"{action}: heads of {name} differ from layer to layer, which no rotation is folded into; "
                         "quantize it by rtn or gptq")
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
    model: nn.Module, entry: Description, residual: bool | Tensor, heads: bool | Sequence[Tensor],
    online: bool | str, action: str,
) -> Rotation:  # fmt: skip
    if not isinstance(online, bool) and online != "down":
        raise ValueError(f"{action}: online is {online!r}, choose True, False or 'down'")
    layer, head = model.get_submodule(entry.layers)[0], model.get_submodule(entry.head)
    parts = {name: layer.get_submodule(place) for name, place in entry.linears.items()}
    own = Heads.of(model, parts)
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
        across_heads=across if online is True and not across.is_nothing else None,
        down=_fitting(parts["down"].weight.shape[1], "intermediate_size", "online", action) if online else None,
        untied=stream is not None and tied,
    )


def stream_matrix(model: nn.Module, seed: int) -> Tensor:
    """The rotation of the residual stream by which `rotate` multiplies with this seed, float64 ``[hidden_size,
    hidden_size]``."""
    how = _fitting(model.config.hidden_size, "hidden_size", "residual", "rotate")
    return how.rotate(signs_before(how, model.config.hidden_size, torch.Generator().manual_seed(seed)).diag())


def _fitting(width: int, what: str, part: str, action: str) -> Hadamard:
    found = fitting_hadamard(width)
    if found.is_nothing:
        raise ValueError(f"{action}: {what} {width}, is odd: no Hadamard matrix divides it; {_without(part, action)}")
    return found


def _rotate_embedding(model: nn.Module, entry: Description, plan: Rotation, signs: Tensor) -> None:
    """The head is untied first, and goes on reading what the embedding was."""
    table, turns = model.get_submodule(entry.embedding), Turns()
    if plan.untied:
        separate_head(model)
        _log.warning("rotate: %s has its head tied to its embedding; the head gets a weight of its own, which holds "
                     "the gain of %s", type(model).__name__, entry.final_norm)  # fmt: skip
    rotate_rows(turns, [table.weight], plan.residual, signs)
    turns.apply({table.weight: f"{entry.embedding}.weight"})


def _rotate_head(model: nn.Module, entry: Description, plan: Rotation, signs: Tensor) -> None:
    """It takes the gain of the last norm, too."""
    head, turns = model.get_submodule(entry.head), Turns()
    fold_gain(turns, model.get_submodule(entry.final_norm), [head], entry)
    rotate_rows(turns, [head.weight], plan.residual, signs)
    turns.apply({head.weight: f"{entry.head}.weight"})


def separate_head(model: nn.Module) -> None:
    """A weight of its own for a head that shares the embedding's. One of 16 bits stays where it is until it, or the
    embedding, is turned, which is then elsewhere."""
    head = model.get_submodule(KNOWN[type(model).__name__].head)
    own = head.weight.detach() if head.weight.dtype.itemsize == 2 else head.weight.detach().clone()
    head.weight = nn.Parameter(own, requires_grad=head.weight.requires_grad)
    untie_head(model)
