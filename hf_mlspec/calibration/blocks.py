"""Which blocks does a decoder consist of, and what does each get besides the hidden states?"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class _Seen(Exception):
    """The last block was called: the head need not run."""


@dataclass(frozen=True)
class Call:
    """What a block is called with behind the hidden states: masks, positions, rotary tables."""

    words: tuple[Any, ...]
    options: dict[str, Any]

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """hidden ``[1, tokens, hidden]`` -> the block's output."""
        out = block(hidden, *self.words, **self.options)
        return out[0] if isinstance(out, tuple) else out


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of the decoder's blocks, in order. ValueError where they are not at model.layers."""
    inner = getattr(model, "model", None)
    layers = getattr(inner, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ValueError(
            f"{type(model).__name__} has no blocks at model.layers, which calibration goes through one by one"
        )
    return [(f"model.layers.{index}", block) for index, block in enumerate(layers)]


@torch.no_grad()
def first_inputs(
    model: nn.Module, samples: list[Tensor], hidden: MutableSequence[Tensor]
) -> dict[int, list[Call]]:
    """Put the input of the first block for each sample, ``[1, tokens, hidden]`` in the model's dtype, into ``hidden``;
    -> for each length of a sample what every block is called with."""
    blocks = [block for _, block in blocks_of(model)]
    calls: dict[int, list[Call]] = {}
    seen: list[Call] = []

    def pass_on(index: int) -> Callable[..., Tensor]:
        def forward(x: Tensor, *words: Any, **options: Any) -> Tensor:
            if index == 0:
                hidden.append(x.detach())
            seen.append(Call(words, options))
            if index == len(blocks) - 1:
                raise _Seen
            return x

        return forward

    before = [vars(block).get("forward") for block in blocks]  # a hook of accelerate's stands there
    for index, block in enumerate(blocks):
        block.forward = pass_on(index)  # shadows the method of its class
    try:
        for ids in samples:
            seen = []
            try:
                model(input_ids=ids, use_cache=False)
            except _Seen:
                calls.setdefault(ids.shape[-1], seen)
    finally:
        for block, own in zip(blocks, before, strict=True):
            del block.forward
            if own is not None:
                block.forward = own
    return calls
