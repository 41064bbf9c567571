"""How does a model draft for itself? The same packed weights, read with coarser activations, in the same cache.

QSpec (arXiv 2410.11305): gamma tokens are drafted with 4- or 8-bit activations, then all gamma + 1 positions are
scored with 16-bit ones, which overwrites every drafted slot of the cache. One copy of the weights, one cache; after
each round that cache holds what 16-bit decoding alone would have put there.

What drafts is a runner like any other, so it may stand under a `ModelDrafter`, or under a `Checker` in the middle of a
chain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from ...nn.switch import precision_switch
from ...precision import Bits
from ..device_runner import DeviceRunner
from ..fused_runner import FusedRunner
from ..runner import Runner

AnyRunner = TypeVar("AnyRunner", Runner, FusedRunner, DeviceRunner)


def at_lower_precision(runner: AnyRunner, bits: Bits) -> AnyRunner:
    """`runner`, not yet started, with every packed layer of its model called at `bits`."""
    if isinstance(runner, Runner):
        runner.forward = _switched(runner.forward, runner.model, bits)
    else:
        runner.bits = bits
    return runner


def _switched(forward: Callable, model: nn.Module, bits: Bits) -> Callable:
    switch = precision_switch(model)

    def switched(*args):
        with switch.at(bits):
            return forward(*args)

    return switched
