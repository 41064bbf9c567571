"""Which module holds experts in a format?"""

from __future__ import annotations

from .experts import PackedExperts
from .nested_experts import NestedExperts
from .plane_experts import PlaneExperts

_OWN: dict[str, type[PackedExperts]] = {kind.format: kind for kind in (NestedExperts, PlaneExperts)}


def experts_in(format: str) -> type[PackedExperts]:
    """The class of experts in a format, by its word; that of formats without one of their own is PackedExperts."""
    return _OWN.get(format, PackedExperts)
