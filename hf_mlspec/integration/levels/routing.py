"""Which router picks the planes of a draft? That of the config, read once per target."""

from __future__ import annotations

from torch import nn

from ...engines.built import fingerprint
from ...nn.state import ModelState
from ...routing.router import Router
from ..config import SpeculationConfig
from ..request import router_of
from ..routed import read_router


def draft_router(target: nn.Module, config: SpeculationConfig, state: ModelState) -> Router:
    """The router of the level "routed". ValueError without one, for a router of another model, and for a target that
    is routed itself: its check would read no more than the draft."""
    if config.router is None:
        raise ValueError(
            "level 'routed' reads the planes that a router picks: name its file, "
            "speculation_config=SpeculationConfig(router=FILE); `mlspec route train` writes one"
        )
    if router_of(target) is not None:
        raise ValueError(
            "level 'routed' is for a target that reads all planes, and this one's are picked by its own router: leave "
            "one of them out, as with hf_mlspec.route(model, None)"
        )
    given = config.router
    which = id(given) if isinstance(given, Router) else str(given)
    key, now = ("routed", which, config.router_every), fingerprint(target)
    kept = state.levels.get(key)
    if kept is None or kept[0] != now:
        kept = state.levels[key] = now, read_router(target, given).choosing(config.router_every)
    return kept[1]
