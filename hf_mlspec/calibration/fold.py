"""How does a scale of a layer's inputs disappear into what feeds it, so that the model computes what it did?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .families import Feed
from .freed import release_pages
from .turned_weights import ROWS


def shared(feed: Feed, values: Tensor, heads: int, kv_heads: int) -> Tensor:
    """values ``[in]``, one per input of the consumers, made alike where inputs come from one channel of the producer:
    heads that share a value head (their mean)."""
    if feed.kind != "values" or heads == kv_heads:
        return values
    split = values.view(kv_heads, heads // kv_heads, -1)
    return split.mean(1, keepdim=True).expand_as(split).reshape(-1)


@torch.no_grad()
def fold(block: nn.Module, feed: Feed, scales: Tensor, heads: int, kv_heads: int) -> None:
    """Divide what the producer gives by ``scales`` ``[in]`` (as `shared`) and multiply the columns of all consumers.

    Weights and biases keep their dtype and get new tensors: no other model that shares them changes.
    """
    producer = block.get_submodule(feed.producer)
    if feed.is_norm:
        one = 1 if feed.kind == "norm plus one" else 0
        _put(producer, "weight", (producer.weight.double() + one) / scales.double() - one)
    else:
        channels = scales
        if feed.kind == "values":
            channels = scales.view(kv_heads, heads // kv_heads, -1)[:, 0].reshape(-1)
        for name in ("weight", "bias"):
            tensor = getattr(producer, name)
            if tensor is not None:
                _put(producer, name, _divided(tensor.detach(), channels.double()))
    for name in feed.consumers:
        consumer = block.get_submodule(name)
        _put(consumer, "weight", _multiplied(consumer.weight.detach(), scales.double()))


def _divided(tensor: Tensor, channels: Tensor) -> Tensor:
    """The last ``len(channels)`` rows, each by one of ``channels`` float64; some rows at a time are in float64."""
    changed = tensor.clone()
    for rows, own in zip(changed[-len(channels) :].split(ROWS), channels.split(ROWS), strict=True):
        rows.copy_(rows.double() / own.view(-1, *[1] * (rows.ndim - 1)))
    return changed


def _multiplied(weight: Tensor, scales: Tensor) -> Tensor:
    """The columns ``[in]``, each by one of ``scales`` float64; some rows at a time are in float64."""
    changed = torch.empty_like(weight)
    for rows, into in zip(weight.split(ROWS), changed.split(ROWS), strict=True):
        into.copy_(rows.double() * scales)
    return changed


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad))
    release_pages([old])
