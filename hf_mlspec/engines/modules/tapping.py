"""How do the hidden states of a model that runs its own modules get to a head? By hooks at layers, for one pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...nn.replace import layer_list_name
from ..tap import Tap
from .attention import Plan


@contextmanager
def tapping(model: nn.Module, tap: Tap, plan: Plan, counts: list[int]) -> Iterator[None]:
    """Inside, a pass of this thread writes to `tap` what the layers of the tap read, of counts[r] tokens of row r."""
    layers = layers_of(model)
    slots = plan.slots.to(tap.states.device)
    tap.reserve(len(counts), plan.end)
    fed = torch.tensor([row for row, count in enumerate(counts) if count], device=tap.states.device)

    def write(place: int, hidden: Tensor) -> None:
        tap.states[fed[:, None], slots[fed], place] = hidden.to(tap.states)[fed]

    with _hooked(layers, tap, write):
        yield
    tap.wrote(plan.starts, counts)


@contextmanager
def tapping_row(model: nn.Module, tap: Tap, row: int, start: int, count: int) -> Iterator[None]:
    """The same for a pass of `count` tokens of one row alone, from position `start` on."""
    tap.reserve(len(tap.first), start + count)

    def write(place: int, hidden: Tensor) -> None:
        tap.states[row, start : start + count, place] = hidden[0, -count:].to(tap.states)

    counts = [count if r == row else 0 for r in range(len(tap.first))]
    starts = [start] * len(counts)
    tap.cut(starts, counts)  # a state went back: what lies behind is another row's future
    with _hooked(layers_of(model), tap, write):
        yield
    tap.wrote(starts, counts)


@contextmanager
def _hooked(layers: nn.ModuleList, tap: Tap, write: Callable[[int, Tensor], None]) -> Iterator[None]:
    hooks = [_hook(layers, number, place, write) for place, number in enumerate(tap.layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder layers; ValueError for a model without a list of them."""
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    return model.get_submodule(layer_list_name(model, total, "hidden states"))


def _hook(layers: nn.ModuleList, number: int, place: int, write: Callable[[int, Tensor], None]):
    mine = threading.get_ident()  # other threads may be running the same model

    def before(module: nn.Module, inputs: tuple, named: dict) -> None:
        if threading.get_ident() == mine:
            write(place, inputs[0] if inputs else named["hidden_states"])

    def behind(module: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
        if threading.get_ident() == mine:
            write(place, output[0] if isinstance(output, tuple) else output)

    if number < len(layers):
        return layers[number].register_forward_pre_hook(before, with_kwargs=True)
    return layers[-1].register_forward_hook(behind)
