"""How does a mixture of experts draft for itself with fewer experts a token?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .replace import share

CHOSEN = "top_k"  # the attribute of a transformers router that says how many experts a token goes to
_CONFIG = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")


def fewer_experts(model: nn.Module, num_experts: int) -> nn.Module:
    """A draft of ``model`` whose routers send a token to its first ``num_experts`` experts; all tensors are shared.

    Weights of a token's experts are renormalized where the model does it. Layers that have fewer experts a token keep
    them. ValueError for a model without routers, or unless ``1 <= num_experts`` and some router has more.
    """
    most = max((getattr(router, CHOSEN) for _, router in routers(model)), default=0)
    if not most:
        raise ValueError(
            f"fewer_experts: {type(model).__name__} has no experts that a router chooses, it is no mixture of "
            "experts: use early_exit or direct_cast"
        )
    if type(num_experts) is not int or not 1 <= num_experts < most:
        raise ValueError(
            f"fewer_experts: num_experts is {num_experts!r}, the tokens of this {type(model).__name__} go to {most}: "
            f"choose 1 to {most - 1}" if most > 1 else
            f"fewer_experts: the tokens of this {type(model).__name__} go to one expert each: there are no fewer"
        )  # fmt: skip
    view = share(model)
    for _, router in routers(view):
        setattr(router, CHOSEN, min(num_experts, getattr(router, CHOSEN)))
    config = view.config.get_text_config(decoder=True)
    for name in _CONFIG:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, num_experts)
    return view


def routers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model that choose experts, by name."""
    for name, module in model.named_modules():
        if type(vars(module).get(CHOSEN)) is int:
            yield name, module
