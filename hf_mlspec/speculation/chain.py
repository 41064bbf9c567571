"""What is a chain made of: a target, and the levels below it, each with what it needs?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..engines.engine import Engine
from ..engines.head import HeadEngine
from ..engines.rows import held_bytes
from .checker import Checker
from .controller import Controller
from .deferred import Deferred
from .draft import Drafter, Rows
from .drafters.checked import CheckedDrafter
from .drafters.head import HeadDrafter, HeadTree
from .drafters.model import ModelDrafter
from .drafters.model_tree import ModelTree
from .loop import Emit, Loop, Stop
from .openings import Openings
from .rounds.host import HostRounds
from .rounds.steering import Steering
from .sampling import Sampler
from .search import Choice
from .shelf import Shelving
from .stats import LevelStats, SpeculationStats

if TYPE_CHECKING:
    from .rounds.planning import Planning


@dataclass
class Part:
    """What one level of a chain is made of, the target or one below it.

    engine, sampler: of a level with a model; the sampler is made when the chain is. drafter: instead, a lookup that is
    ready. num_draft_tokens: the most it drafts before the level above checks. tree: of a level with a model that
    drafts trees, the most tokens behind a token, by depth. across: makes of its drafter one in the
    vocabulary of the level above, None where both speak the same.
    """

    name: str
    engine: Engine | None = None
    sampler: Callable[[], Sampler] | None = None
    drafter: Drafter | None = None
    num_draft_tokens: int = 0
    tree: list[int] | None = None
    threshold: float = 0.0
    max_positions: int | None = None
    across: Callable[[Drafter], Drafter] | None = None


@dataclass
class Chain:
    """A target and the levels below it, ready to decode.

    levels: the outermost drafter of each level, from the target down. runners: their engines, None for lookups.
    models: those whose attention has to be switched while target and levels run. samplers: of the target and of every
    level with a model. joined: per level whether it speaks the vocabulary of the level above. controller: makes what
    chooses the lengths of drafts, for captured rounds if it is given their graphs; None: they are always the most
    there may be. seen: slots that a draft window leaves in view where the controller may choose one, 0: it may not.
    openings: what calls begin with in rounds of the host, None: they choose.
    steering: that controller at work, in the rounds of the host that were made last; planning: in the captured ones.
    waiting: levels of which nothing can be said before a captured round of theirs is worth its time. shelving: whether
    a call leaves out levels that cannot be captured, where lengths are chosen and the target alone can. deferred: the
    levels, where they are built when a plan first uses them; until then the chain has none. on_built: told of the
    first of them then. watched: counts that are looked at while the call runs; those of deferred levels come into
    them. left_off: what was expected of a call that does without them to its end.
    """

    target: Checker
    drafter: Drafter | None = None
    num_draft_tokens: int = 0
    levels: list[Drafter] = field(default_factory=list)
    runners: list[Engine | None] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)
    samplers: list[Sampler] = field(default_factory=list)
    joined: list[bool] = field(default_factory=list)
    controller: Callable[..., Controller] | None = None
    steering: Steering | None = field(default=None, init=False)
    planning: Planning | None = field(default=None, init=False)
    seen: int = field(default=0, init=False)
    openings: Openings | None = field(default=None, init=False)
    waiting: set[int] = field(default_factory=set, init=False)
    shelving: Shelving | None = field(default=None, init=False)
    deferred: Deferred | None = field(default=None, init=False)
    on_built: Callable[[Drafter], None] | None = field(default=None, init=False)
    watched: SpeculationStats | None = field(default=None, init=False)
    left_off: Choice | None = field(default=None, init=False)

    @classmethod
    def of(cls, target: Part, parts: list[Part], *, keep_logits: bool) -> Chain:
        """The chain of these levels, from the one below the target down."""
        chain = cls(Checker(target.engine, target.sampler(), target.name, keep_logits=keep_logits))
        chain.samplers.append(chain.target.sampler)
        chain.add(parts)
        return chain

    def add(self, parts: list[Part]) -> None:
        """Put these levels, from the one below the target down, below a target that has none."""
        for part in reversed(parts):
            sampler = part.sampler and part.sampler()
            self.samplers += [sampler] if sampler else []
            self.drafter = _drafter(part, sampler, self.drafter, self.num_draft_tokens)
            self.num_draft_tokens = part.num_draft_tokens
            self.levels.insert(0, self.drafter)
            self.runners.insert(0, part.engine)
            self.joined.insert(0, part.across is None)
        engines = [engine for engine in (self.target.runner, *self.runners) if engine is not None]
        self.models = [engine.model for engine in engines if engine.can.by_module]

    @property
    def names(self) -> list[str]:
        """Of the levels, those that are deferred too."""
        return [level.name for level in self.levels] if self.deferred is None else self.deferred.names

    @property
    def counts(self) -> list[LevelStats]:
        """What the levels count; those that are deferred have done nothing."""
        if self.levels or self.deferred is None:
            return [level.stats for level in self.levels]
        return [LevelStats(name) for name in self.deferred.names]

    def leave_out_levels(self) -> None:
        """The target goes on alone; what the levels counted and hold of earlier calls goes."""
        self.drafter, self.controller, self.shelving.left_out = None, None, True
        for level in self.levels:
            level.stats.reset()

    def host_rounds(self, device: torch.device) -> HostRounds:
        """Rounds of this chain on the host, drafts on `device`."""
        if self.controller is not None:
            given = self.controller, self.levels, self.runners, self.target.runner
            self.steering = Steering(*given, self.seen, self.openings, self.deferred)
        options = {"num_draft_tokens": self.num_draft_tokens, "device": device}
        return HostRounds(self.target, self.drafter, **options, steering=self.steering)

    def decode(
        self,
        rows: Rows,
        budgets: list[int],
        *,
        device: torch.device,
        stop: Stop | None,
        emit: Emit | None,
        ends: frozenset[int],
    ) -> SpeculationStats:
        """Start anew and extend every row to its end, in rounds of the host; see `Loop`."""
        self.target.start(len(rows), device)
        loop = Loop(self.host_rounds(device), stop=stop, emit=emit, ends=ends)
        return self.finish(loop.decode(rows, budgets))

    def finish(self, stats: SpeculationStats) -> SpeculationStats:
        """Put what the levels counted, and the memory of every cache, into the counts of the loop."""
        self.learn()
        stats.levels = [replace(count) for count in self.counts]  # kept drafters count anew next time
        self.count_memory(stats)
        return stats

    def learn(self) -> None:
        """Let the memory of calls know of every round, those of a call that breaks off, too."""
        for chooses in (self.steering, self.planning):
            if chooses is not None:
                chooses.end()

    def count_memory(self, stats: SpeculationStats) -> None:
        """Put the memory of every cache into these counts."""
        stats.target_cache_bytes, *held = held_bytes([self.target.runner, *self.runners])
        for level, count in zip(stats.levels, held or [0] * len(stats.levels), strict=True):
            level.cache_bytes = count


def _drafter(part: Part, sampler: Sampler | None, inner: Drafter | None, num_draft_tokens: int) -> Drafter:
    """The drafter of a level over that of the level below it, which drafts so many tokens before a check."""
    if part.drafter is not None:
        return part.drafter
    limits = {"threshold": part.threshold, "max_positions": part.max_positions}
    is_head = isinstance(part.engine, HeadEngine)
    if part.tree is not None:
        kind = HeadTree if is_head else ModelTree
        made = kind(part.engine, sampler, part.name, widths=part.tree, **limits)
    elif inner is None:
        kind = HeadDrafter if is_head else ModelDrafter
        made = kind(part.engine, sampler, part.name, **limits)
    else:
        checker = Checker(part.engine, sampler, part.name, keep_logits=False)
        made = CheckedDrafter(checker, inner, num_draft_tokens=num_draft_tokens, **limits)
    return made if part.across is None else part.across(made)
