"""Which rotary tables does a decoder need, and how far may they reach?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FIRST_POSITIONS = 1024
UNROTATED = "unrotated"  # the table of layers that rotate nothing
# How an embedding's columns hold the frequencies, by the word of `Description.rotation`: one behind the other and all
# of them again, each beside itself, or one behind the other.
COLUMNS = {
    "halves": "all twice",
    "pairs": "all twice",
    "pairs by columns": "each twice",
    "halves of single columns": "once",
}
_AT_ONCE = 8192  # positions: what a model's own embedding computes on the way is four times its result


@dataclass(frozen=True)
class Rotation:
    """Where a model's rotary tables come from: `rotary`, its embedding (None: nothing is rotated), of `kinds` of
    layers, UNROTATED among them where some rotate nothing. half: elements of a row. columns: how those of the
    embedding hold the frequencies: one of COLUMNS."""

    rotary: nn.Module | None
    kinds: list[str | None]
    half: int
    columns: str = "all twice"

    def tables(self, positions: int) -> list[tuple[Tensor, Tensor]]:
        """cos and sin float32 ``[positions, half]`` of every kind, where the embedding lies."""
        return rope_tables(self.rotary, self.kinds, positions, self.half, self.columns)


def rope_tables(
    rotary: nn.Module | None,
    kinds: list[str | None],
    positions: int,
    half: int | None = None,
    columns: str = "all twice",
) -> list[tuple[Tensor, Tensor]]:
    """cos and sin float32 ``[positions, rotary_dim / 2]`` of every kind, from a model's own rotary embedding, where
    that lies. Little more memory than they need is used on the way. half: columns of tables without rotation."""
    buffers = () if rotary is None else rotary.buffers()
    device = next((buffer.device for buffer in buffers), torch.device("cpu"))
    like = torch.zeros(1, 1, 1, device=device)  # float32: the tables are not rounded to the model's dtype
    tables = []
    for kind in kinds:
        table: tuple[Tensor, ...] = ()
        if kind == UNROTATED:
            tables.append((like.new_ones(positions, half), like.new_zeros(positions, half)))
            continue
        for begin in range(0, positions, _AT_ONCE):
            ids = torch.arange(begin, min(begin + _AT_ONCE, positions), device=device)[None]
            found = _turned(rotary, like, ids) if kind is None else rotary(like, ids, kind)
            own = found[0].shape[-1] // (1 if columns == "once" else 2)
            table = table or tuple(like.new_empty(positions, own) for _ in found)
            for whole, part in zip(table, found, strict=True):
                whole[begin : begin + _AT_ONCE] = part[0, :, ::2] if columns == "each twice" else part[0, :, :own]
        tables.append(table)
    if device.type == "cuda":  # calls on other streams will read them
        torch.cuda.current_stream(device).synchronize()
    return tables


def _turned(rotary: nn.Module, like: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin ``[1, positions, columns]``. Embeddings of models that see images may ask for a position on each of
    three axes (up to transformers 5.17, say), which in text are one."""
    try:
        found = rotary(like, ids)
    except IndexError:
        found = rotary(like, ids.expand(3, 1, -1))
    if isinstance(found, Tensor):  # complex: cosines and sines in one, each frequency once
        found = tuple(torch.cat([half, half], dim=-1) for half in (found.real, found.imag))
    return tuple(part[0] if part.dim() == 4 else part for part in found)


def text_config(model: nn.Module) -> Any:
    """The config of a model's text, which is the model's own where it reads nothing else."""
    return model.config.get_text_config(decoder=True)


def known_positions(config: Any) -> int | None:
    """Number of positions that a text model's config says it has, None if it sets no limit.

    YaRN's are its original ones times its factor, where a config still has the number from before it was extended.
    """
    most, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    if most and rope.get("rope_type") == "yarn":
        return max(most, int(rope["original_max_position_embeddings"] * (rope.get("factor") or 1)))
    return most


def rotary_border(model: nn.Module) -> int | None:
    """The length past which a rotary embedding changes its frequencies, None where it never does."""
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    borders = [
        one.get("original_max_position_embeddings") or config.max_position_embeddings
        for one in (rope, *(value for value in rope.values() if isinstance(value, dict)))
        if one.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(borders, default=None)


def require_learned(count: int, learned: int | None) -> None:
    """ValueError for positions past those that a model has learned embeddings of."""
    if learned is not None and count > learned:
        raise ValueError(
            f"this call reaches {count} positions, and the model has learned embeddings of {learned}: shorten the "
            "prompt, or choose a smaller max_new_tokens"
        )


def grown_positions(count: int, have: int, border: int | None, known: int | None) -> int:
    """How many positions rotary tables should have that must reach ``count``: twice as many as now, not past the
    border, and past those that the model has (``known``) only where they must."""
    if count <= have:
        return have
    wanted = max(count, FIRST_POSITIONS, 2 * have if known is None else min(2 * have, known))
    return wanted if border is None else min(wanted, border)
