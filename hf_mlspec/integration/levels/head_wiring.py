"""Which engines serve a chain that ends in a head, and how do their hidden states reach it?"""

from __future__ import annotations

from torch import nn

from ...engines.choose import word_of
from ...engines.engine import Engine
from ...engines.head import HeadEngine
from ...engines.modules.mtp import MtpEngine
from ...engines.tap import Tap
from ...nn.mtp import MtpHead
from ...nn.state import say_once
from ..config import SpeculationConfig
from .resolve import Level


def engine_with_head(target: nn.Module, config: SpeculationConfig) -> str | None:
    """The engine to ask for where a chain has a head: that of the config, or "modules" where it would be "cuda".

    ValueError where the config names "cuda", whose graphs write no hidden states.
    """
    why = "the kernels of a GPU write no hidden states for a head"
    if config.engine == "cuda":
        raise ValueError(f"engine 'cuda' cannot serve a head: {why}; leave out engine=, or the head")
    if word_of(target, name=config.engine, prepare=config.prepare) != "cuda":
        return config.engine
    say_once(
        target, f"{type(target).__name__} runs module by module: {why}; without the head it runs in captured rounds"
    )
    return "modules"


def head_engine(level: Level, above: list[Engine], capacity: int) -> HeadEngine:
    """An engine over a head, not yet started; all engines above write to its tap. ValueError for one that cannot."""
    shape, target = level.model.shape, above[0]
    for engine in above:
        if not engine.can.tapped:
            raise ValueError(
                f"level {level.name} reads hidden states, and {type(engine.model).__name__} runs on engine "
                f"{engine.name!r} in a way that does not write them (it keeps a state for each row, or runs row by "
                "row): leave out the head"
            )
    tap = Tap(shape.taps, shape.target_hidden, target.dtype)
    for engine in above:
        engine.tap = tap
    kind = MtpEngine if isinstance(level.model, MtpHead) else HeadEngine
    return kind(level.model, tap, capacity)
