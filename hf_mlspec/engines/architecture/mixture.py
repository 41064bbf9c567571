"""Which experts does a layer of a model have, and which of them does a token go to?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...nn.expert_modules import ExpertModule
from ...nn.experts import PackedExperts
from ...nn.packed import PackedLinear
from ...ops.compiled_decoder import Sigmoids
from .description import GATES, SCORES, Mixture


@dataclass(frozen=True)
class ExpertBlock:
    """The experts of one layer: `experts` holds them all, ``router`` is ``[count, hidden]``, router_bias ``[count]``.

    chosen: of a token. renormalize: whether its weights are divided by their sum. biases: ``[count, out]`` of each
    projection, {} where there are none. clamp: slope and limit where gate and up come in turns (`ops.gated_pairs`),
    None where gate comes before up. sigmoids: how they choose, None: softmax of logits. shared: gate, up and down of
    an expert that all tokens go to, {} where there is none; shared_router: ``[1, hidden]``, whose sigmoid weighs it,
    None: nothing does. weighs_inputs: weights multiply what experts read.
    """

    experts: nn.Module
    original: ExpertModule
    router: Tensor
    router_bias: Tensor | None
    chosen: int
    renormalize: bool
    biases: dict[str, Tensor]
    clamp: tuple[float, float] | None
    sigmoids: Sigmoids | None
    shared: dict[str, nn.Module]
    shared_router: Tensor | None
    weighs_inputs: bool = False

    @property
    def inner(self) -> int:
        """Elements of an expert between its projections."""
        return self.original.sizes["down_proj"][1]


class UnreadExperts(Exception):
    """Experts that no decoder reads; the message says why."""


def expert_block(entry: Mixture, layer: nn.Module, index: int) -> ExpertBlock | None:
    """The experts of layer ``index``; None where it has none.

    UnreadExperts where no decoder reads them. ValueError naming the layer, and the expert, for what no token can be
    sent through: more experts a token than there are, or weights of the router, or of the shared expert's gate, that
    are not finite.
    """
    router = _at(layer, entry.router)
    if router is None:
        return None
    experts = _at(layer, entry.experts)
    original = _original(entry, experts, index)
    weight, bias = router.weight.detach(), getattr(router, "bias", None)
    if tuple(weight.shape) != (original.num_experts, original.sizes["down_proj"][0]):
        raise UnreadExperts(
            f"the router of layer {index} has weights of shape {list(weight.shape)} for {original.num_experts} "
            f"experts of {original.sizes['down_proj'][0]} elements"
        )
    chosen = getattr(router, entry.chosen)
    _require_choice(chosen, original.num_experts, index)
    for part in (weight, *(() if bias is None else (bias.detach()[:, None],))):
        _require_finite(part, f"router of layer {index}", " in its row of expert {}")
    renormalize = entry.renormalize
    shared = {name: layer.get_submodule(place) for name, place in entry.shared.items()}
    return ExpertBlock(
        experts,
        original,
        weight,
        None if bias is None else bias.detach(),
        chosen,
        getattr(router, renormalize) if isinstance(renormalize, str) else renormalize,
        {key: getattr(experts, f"{key}_bias").detach() for key in original.sizes}
        if getattr(experts, "has_bias", False)
        else {},
        None if entry.gate == GATES[0] else (float(experts.alpha), float(experts.limit)),
        None if entry.scores == SCORES[0] else _sigmoids(entry, router, index),
        shared,
        _gate_of(layer.get_submodule(entry.shared_gate), index) if shared and entry.shared_gate else None,
        entry.weighs_inputs,
    )


def has_experts(entry: Mixture, layer: nn.Module) -> bool:
    """Whether a layer has experts in place of an MLP."""
    return _at(layer, entry.router) is not None


def routing_said(entry: Mixture, modules: list[nn.Module]) -> tuple:
    """What `expert_block` reads of routers and experts beside their parameters: numbers, and of a bias of the choice
    where it lies and how often it changed."""
    names = {name for name in (entry.chosen, entry.renormalize) if isinstance(name, str)}
    of_scores = {entry.groups, entry.chosen_groups, entry.scale} - {None}
    names |= set() if entry.scores == SCORES[0] else of_scores
    names |= set() if entry.gate == GATES[0] else {"alpha", "limit"}
    said = [tuple([own[name] for name in sorted(names) if name in own]) for own in map(vars, modules)]
    if entry.scores != SCORES[0] and entry.choice_bias is not None:
        biases = [own for module in modules if (own := module._buffers.get(entry.choice_bias)) is not None]
        said += [(bias.data_ptr(), 0 if bias.is_inference() else bias._version) for bias in biases]
    return tuple([own for own in said if own])


def _sigmoids(entry: Mixture, router: nn.Module, index: int) -> Sigmoids:
    """How the router of layer ``index`` chooses; ValueError for a bias that is not finite, and where the groups that a
    token looks at have too few experts for it."""
    weight = router.weight.detach()
    bias = weight.new_zeros(len(weight)) if entry.choice_bias is None else getattr(router, entry.choice_bias).detach()
    bias = bias.float().contiguous()
    _require_finite(bias[:, None], f"bias of the router's choice of layer {index}", " for expert {}")
    said = (1 if name is None else getattr(router, name) for name in (entry.groups, entry.chosen_groups, entry.scale))
    (groups, chosen_groups, scale), chosen = said, getattr(router, entry.chosen)
    if len(bias) % groups or not 1 <= chosen_groups <= groups or chosen > len(bias) // groups * chosen_groups:
        raise ValueError(
            f"layer {index} sends each token to {chosen} of {len(bias)} experts in {chosen_groups} of {groups} "
            "groups: n_group has to divide the experts, and topk_group of them to hold as many as a token goes to"
        )
    return Sigmoids(bias, groups, chosen_groups, float(scale))


def _require_choice(chosen: int, experts: int, index: int) -> None:
    if not 1 <= chosen <= experts:
        raise ValueError(
            f"layer {index} sends each token to {chosen} experts and has {experts}: choose 1 to "
            f"{experts} as the config's num_experts_per_tok"
        )


def _gate_of(linear: nn.Module, index: int) -> Tensor:
    """`_row_of` what weighs the shared expert of layer ``index``, whose values have to be finite."""
    row = _row_of(linear)
    _require_finite(row, f"gate of the shared expert of layer {index}")
    return row


def _row_of(linear: nn.Module) -> Tensor:
    """``[1, in]`` of a linear to one output, dense or packed, whose values the router takes in float32."""
    if not isinstance(linear, PackedLinear):
        return linear.weight.detach()
    if next(linear.parameters()).is_meta:
        return torch.empty(1, linear.in_features, device="meta")
    return linear.dequantized_plain(torch.float32)


def _original(entry: Mixture, experts: nn.Module | None, index: int) -> ExpertModule:
    """What a module of experts is; UnreadExperts for one that is not gated, or that has biases or is transposed where
    its entry does not say so."""
    if isinstance(experts, PackedExperts):
        found = experts.original
    elif entry.inputs_first:
        return _inputs_first(experts, index)
    else:
        why = ExpertModule.obstacle(experts) if experts is not None else "there are none"
        if why is not None:
            raise UnreadExperts(f"its experts of layer {index} are not read: {why}")
        found = ExpertModule.of(experts, f"experts of layer {index}")
    if entry.gate != GATES[0]:
        if not (experts.has_gate and hasattr(experts, "alpha") and hasattr(experts, "limit")):
            raise UnreadExperts(f"its experts of layer {index} have no gate with alpha and limit")
        return found
    if not experts.has_gate or experts.has_bias:
        raise UnreadExperts(f"its experts of layer {index} have no gate, or biases")
    if found.transposed and not isinstance(experts, PackedExperts):
        raise UnreadExperts(f"its experts of layer {index} are stored as [experts, in, out]")
    return found


def _inputs_first(experts: nn.Module | None, index: int) -> ExpertModule:
    """What a module is that holds gate_up_proj and down_proj as [experts, in, out], and no more."""
    held = {} if experts is None else experts._parameters
    shapes = [tuple(held[key].shape) if held.get(key) is not None else () for key in ("gate_up_proj", "down_proj")]
    if set(held) != {"gate_up_proj", "down_proj"} or [len(shape) for shape in shapes] != [3, 3]:
        raise UnreadExperts(f"its experts of layer {index} hold {', '.join(held) or 'nothing'}")
    (count, hidden, outputs), (others, inner, out) = shapes
    if (others, 2 * inner, out) != (count, outputs, hidden):
        raise UnreadExperts(f"its experts of layer {index} have weights of shapes {shapes}, which do not fit together")
    return ExpertModule(type(experts), count, True, {"gate_up_proj": (outputs, hidden), "down_proj": (hidden, inner)})


def _require_finite(rows: Tensor, name: str, where: str = "") -> None:
    """ValueError for NaN or Inf in the rows of ``name``; where: what the message says of the first one's number."""
    if rows.is_meta:
        return
    broken = (~torch.isfinite(rows)).any(dim=1).nonzero()
    if len(broken):
        raise ValueError(
            f"the {name} holds NaN or Inf{where.format(int(broken[0]))}: every token of that layer would be lost; "
            "restore the checkpoint"
        )


def _at(layer: nn.Module, place: str) -> nn.Module | None:
    try:
        return layer.get_submodule(place)
    except AttributeError:
        return None
