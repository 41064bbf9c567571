"""What does a forward pass of every model of a chain cost here, and which plans follow? Measured thoroughly."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessorList

from ...engines.engine import Engine
from ...nn.state import state_of
from ...speculation.controller import Controller
from ...speculation.costs import TOKENS, PassCosts
from ...speculation.estimates import PairEstimate
from ...speculation.fixed_shapes import Captured, FixedController
from ...speculation.memory import Memory
from ...speculation.plans import TARGET, Situation
from ...speculation.rounds.plan import can_be_captured
from ..adaptive import captured_speed, controller_of
from ..config import SpeculationConfig
from ..levels.resolve import resolve
from ..levels.wiring import Wiring
from ..processing import Prompts
from .file import write
from .identity import machine_of, model_of
from .probe import keep, measured

SLOTS, ROOM = 256, 256  # tokens that a token of an example attends to, and that each of its rows may still gain
_CERTAIN = 1e9  # observations: the chances of an example are no estimates


@dataclass(frozen=True)
class Example:
    """What a controller chooses for `rows` rows where every drafted token is kept with the chance `acceptance`.

    plan: in words; lengths: per level. speedup: expected speed over "off".
    """

    rows: int
    acceptance: float
    plan: str
    lengths: tuple[int, ...]
    speedup: float


class Survey:
    """The models of one chain, as a call of generate runs them.

    names: of the levels, from the largest down. costs: of target and levels, None for lookups; empty before `measure`.
    chooses: whether calls of this chain choose their lengths; False where a level's generation_config names one.
    replayed: whether its rounds can be captured; costs, and examples, are then of passes inside such rounds, and costs
    of passes that are launched one by one, which streams need, are measured beside them. alone: whether only those of
    the target can; its costs inside such rounds are then measured beside the others, and examples compare with them.
    ValueError or TypeError for levels that cannot be, as in generate.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, levels: list, config: SpeculationConfig):
        state = state_of(model)
        found = resolve(model, levels, None, config, state)
        prompts = Prompts(torch.zeros(1, 1, dtype=torch.int64), None)
        options = {"processors": LogitsProcessorList(), "prompts": prompts, "capacity": 1, "keep_logits": False}
        wiring = Wiring(model, tokenizer, config, **options, state=state)
        self._chain = wiring.build(found)
        self._engines = [self._chain.target.runner, *self._chain.runners]
        target = self._chain.target
        self.replayed = can_be_captured(target, self._chain.drafter)
        self.alone = not self.replayed and can_be_captured(target, None)
        captures = Captured() if self.replayed else None
        self._controller = partial(controller_of, wiring, found, self._chain, "", captures)
        self.names = [level.name for level in found]
        self.chooses = wiring.chooses
        self.costs: list[PassCosts | None] = []
        self._config = config
        self._beside: list[PassCosts | None] = []  # of the other kind, for as many of the models as need them

    @property
    def machine(self) -> dict[str, str]:
        """Where the costs hold: a file of another machine is ignored."""
        return machine_of(self._chain.target.runner)

    @property
    def steps(self) -> int:
        """How often `measure` calls `step`, at most."""
        return len(TOKENS) * (sum(engine is not None for engine in self._engines) * (1 + self.replayed) + self.alone)

    def measure(self, *, budget: float, repeats: int, step: Callable[[], None] = lambda: None) -> bool:
        """Time every model for at most `budget` seconds each; -> whether the cache folder has all of it now."""
        how = {"budget": budget, "repeats": repeats, "tokens": TOKENS, "prepare": self._config.prepare, "step": step}
        self.costs, kept = self._measured(self._engines, how, self.replayed)
        if self.replayed or self.alone:
            engines = self._engines if self.replayed else self._engines[:1]
            self._beside, also = self._measured(engines, how, not self.replayed)
            kept &= also
        return kept

    @property
    def accepted(self) -> dict[str, float]:
        """Per level that drafted for the target in earlier calls, greedy ones: the share of its tokens that was kept,
        as far as it is remembered."""
        known = self._controller()
        pairs = {name: known.memory.pairs.get((at, TARGET)) for at, name in enumerate(self.names)}
        return {name: pair.mean for name, pair in pairs.items() if pair is not None and pair.known}

    def _measured(
        self, engines: list[Engine | None], how: dict[str, Any], replayed: bool
    ) -> tuple[list[PassCosts | None], bool]:
        """Costs of these models, and whether all are in the cache folder."""
        found, kept = [], True
        for engine in engines:
            found.append(None if engine is None else measured(engine, **how, replayed=replayed))
            kept &= engine is None or keep(engine, found[-1], self._engines[0], replayed)
        return found, kept

    def write(self, path: str | os.PathLike, target: str) -> None:
        """All costs in one file for `SpeculationConfig(profile=path)`; target: its name. OSError where it cannot be
        written."""
        kinds = [(self.replayed, self.costs), (not self.replayed, self._beside)]
        models = {
            model_of(engine, replayed): (name, costs)
            for replayed, found in kinds
            for engine, name, costs in zip(self._engines, [target, *self.names], found, strict=False)
            if engine is not None
        }
        write(Path(path), self.machine, models)

    def example(self, rows: int, acceptance: float) -> Example:
        """What would be chosen in the middle of a long text, of which the levels have read all."""
        known = self._controller()
        # A text of SLOTS tokens is no longer than a draft window: no level is there twice.
        levels = [replace(level, prior=acceptance, twin=None) for level in known.levels[: len(self.names)]]
        pairs = [(below, above) for below in range(len(levels)) for above in (TARGET, *range(below))]
        memory = Memory({pair: PairEstimate(acceptance, _CERTAIN) for pair in pairs})
        if self.replayed:
            controller = FixedController(known.target, levels, memory=memory, captures=known.captures)
        else:
            controller = Controller(known.target, levels, memory=memory)
        controller.start(rows)
        best = controller.best_of(Situation([ROOM] * rows, SLOTS, [[0] * rows for _ in levels]))
        plan, off, speed = best.plan, best.off_speed, best.forecast.speed
        if self.alone:
            off = captured_speed(self._chain.target.runner, self._config, rows, SLOTS)
        if speed < off:  # such a call leaves its levels out
            return Example(rows, acceptance, "off", (0,) * len(levels), 1.0)
        return Example(rows, acceptance, plan.told(self.names), plan.lengths, speed / off)
