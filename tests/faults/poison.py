"""How do the results of a model's k-th pass, or a weight from that pass on, become NaN?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_mlspec.engines.cpu.decoder import CpuDecoder


class Passes:
    """Counts passes; `at`: the one before which it is done."""

    def __init__(self, at: int, do: Callable[[], None]):
        self.at, self.do, self.count = at, do, 0

    def turn(self) -> bool:
        self.count += 1
        if self.count == self.at:
            self.do()
        return self.count == self.at


@contextmanager
def hidden(model: PreTrainedModel, at: int, *, whole: bool) -> Iterator[Passes]:
    """NaN in what the first layer of `model` gives in its pass number `at`, module by module: in the whole of it, or
    in one element of the last token."""

    def spoil(module: nn.Module, given: tuple, result: Tensor | tuple) -> Tensor | tuple:
        if not passes.turn():
            return result
        states = (result[0] if isinstance(result, tuple) else result).clone()
        if whole:
            states.fill_(torch.nan)
        else:
            states[-1, -1, 3] = torch.nan
        return (states, *result[1:]) if isinstance(result, tuple) else states

    passes = Passes(at, lambda: None)
    handle = model.model.layers[0].register_forward_hook(spoil)
    try:
        yield passes
    finally:
        handle.remove()


@contextmanager
def weight(model: PreTrainedModel, at: int, name: str) -> Iterator[Passes]:
    """NaN in one element of a weight that compiled decoders read in place, before their call number `at`, of whichever
    model; the element is what it was at the end."""
    found = model.get_parameter(name)
    place = (5, 3)[: found.ndim]
    before = found.data[place].clone()

    def spoil() -> None:
        found.data[place] = torch.nan

    passes = Passes(at, spoil)
    called = CpuDecoder.call

    def calls(self: CpuDecoder, *arguments: object, **options: object) -> object:
        passes.turn()
        return called(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDecoder, "call", calls)
        try:
            yield passes
        finally:
            found.data[place] = before
