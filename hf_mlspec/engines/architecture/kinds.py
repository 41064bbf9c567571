"""What kind is a layer: what does it see, and which rotary table does it read? By its config alone."""

from __future__ import annotations

from typing import Any

from .description import WITHOUT_WINDOW, Description
from .rotary import UNROTATED
from .scales import named


def kind_of(config: Any, index: int) -> str | None:
    """What `layer_types` of a config calls a layer, None where it says nothing."""
    kinds = getattr(config, "layer_types", None)
    return kinds[index] if kinds else None


def window_of(entry: Description, config: Any, index: int) -> int:
    """Tokens that a layer sees, 0: all."""
    if entry.windows in ("none", "chunks by layer type"):
        return 0
    window = getattr(config, "sliding_window", None) or 0
    everywhere = entry.windows == "every layer"
    return window if everywhere or kind_of(config, index) in (None, "sliding_attention") else 0


def span_of(entry: Description, config: Any, index: int) -> int:
    """How long the stretches of a row are of which a token of a layer sees its own alone; 0: it sees all."""
    chunked = entry.windows == "chunks by layer type" and kind_of(config, index) == "chunked_attention"
    return (getattr(config, "attention_chunk_size", None) or 0) if chunked else 0


def rope_kinds(entry: Description, config: Any) -> list[str | None]:
    """A rotary table per kind of layer, or one for all; UNROTATED, the last, for layers that rotate nothing."""
    kinds = {rope_kind(entry, config, i) for i in range(config.num_hidden_layers)}
    return sorted(kinds, key=lambda kind: (kind == UNROTATED, kind or ""))


def rope_kind(entry: Description, config: Any, index: int) -> str | None:
    """Which rotary table a layer reads."""
    how = entry.layers_without_rotary
    if entry.positions in ("learned", "none") or (entry.rotates and named(config, entry, "rotates") != "rope"):
        return UNROTATED
    if how == WITHOUT_WINDOW:
        unrotated = getattr(config, "sliding_window", None) is not None and window_of(entry, config, index) == 0
    else:
        unrotated = how is not None and not named(config, entry, "layers_without_rotary")[index]
    if unrotated:
        return UNROTATED
    return kind_of(config, index) if entry.positions == "rotary by layer type" else None
