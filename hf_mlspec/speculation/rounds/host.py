"""How does a round run on the host, for levels of any kind? The drafter proposes, the target checks, all roll back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

import torch

from ..checker import Checker, Verdict
from ..deferred import Built
from ..draft import Draft, Drafter, Rows
from ..drafters.checked import proposer
from ..stats import LevelStats, SpeculationStats
from .beginning import Beginnings, engines_below, put
from .steering import Steering


@dataclass(eq=False)
class HostRounds:
    """Rounds of a chain whose verdicts the host reads one by one. See `Rounds`.

    num_draft_tokens: the most a draft may hold. device: where drafts go. steering: chooses how much every level
    drafts, round by round; None: always as much as may be. on_failure: told of the error of a level, after which the
    target goes on alone; None: it is the caller's, unless the level drafted before by the choice of `steering`.
    """

    target: Checker
    drafter: Drafter | None
    _: KW_ONLY
    num_draft_tokens: int
    device: torch.device
    steering: Steering | None = None
    drafted: list[int] = field(default_factory=list, init=False)
    begun: Beginnings = field(default_factory=dict, init=False)
    on_failure: Callable[[Exception], None] | None = field(default=None, init=False)
    drafted_by: str | None = field(default=None, init=False)
    _ready: list[bool] = field(default_factory=list, init=False)
    _ends: list[int] = field(default_factory=list, init=False)

    @property
    def places(self) -> range:
        """Rows lie in their order."""
        return range(len(self._ready))

    def start(self, rows: Rows, ends: list[int], numbers: list[int], cached: int) -> None:
        """As `Rounds.start`; a target that the caller did not start, to fill its cache, is started here."""
        if self.target.runner.cache is None:
            self.target.start(len(rows), self.device)
        # A level that writes into the target's cache needs the prompt there first; others draft before the prefill.
        deferred = self.steering and self.steering.deferred
        self._waits = deferred.follows if deferred else bool(getattr(self.drafter, "follows", False))
        if deferred:
            self.steering.on_built = self._come
        with self._of_levels():
            if self.drafter:
                self.drafter.start(len(rows), self.device)
        self.target.runner.lengths = [cached] * len(rows)
        self._ready, self._ends = [not self._waits] * len(rows), list(ends)
        if self.steering is not None:
            self.steering.start(len(rows))
        self._give(range(len(rows)), numbers)

    def _come(self, built: Built) -> None:
        """Levels that were deferred draft from the coming round on."""
        self.drafter = built.drafter
        self.drafter.start(len(self._ready), self.device)
        for sampler in built.samplers:
            sampler.join(self.target.sampler)

    def refusal(self, end: int) -> str:
        """Any row can join: levels of fewer positions leave it to the others."""
        return ""

    def admit(self, rows: Rows, ends: list[int], numbers: list[int]) -> None:
        """The next round prefills these rows while the others are checked."""
        self.target.admit(len(rows))
        with self._of_levels():
            for level in self._levels():
                level.admit(len(rows))
        self._ready += [not self._waits] * len(rows)
        self._ends += ends
        self._give(range(len(self._ends) - len(rows), len(self._ends)), numbers)

    def replace(self, places: list[int], rows: Rows, ends: list[int], numbers: list[int], common: list[int]) -> None:
        """What both rows begin with stays in the cache of a compiled target: it would write the same bits again
        (invariant 3)."""
        runner = self.target.runner
        for r, end, same in zip(places, ends, common, strict=True):
            kept = min(runner.lengths[r], same) if runner.can.bit_exact else 0
            self.target.replace(r)
            with self._of_levels():
                for level in self._levels():
                    level.replace(r)
            runner.lengths[r] = kept
            self._ready[r], self._ends[r] = not self._waits, end
        self._give(places, numbers)

    def _give(self, rows: Sequence[int], numbers: list[int]) -> None:
        """What was read of rows that join goes into the caches of target and levels."""
        for r, number in zip(rows, numbers, strict=True):
            if number not in self.begun:
                continue
            target = self.target.runner
            if target in self.begun[number].counts:
                target.lengths[r] = put(self.begun, target, number, r, target.lengths[r])
            with self._of_levels():
                self._give_levels(r, number)

    def _give_levels(self, r: int, number: int) -> None:
        for engine in engines_below(self.drafter):
            if engine in self.begun[number].counts:
                engine.lengths[r] = put(self.begun, engine, number, r, engine.lengths[r])
                if self.steering is not None:
                    self.steering.holds(engine, r, engine.lengths[r])

    def select(self, keep: list[int]) -> None:
        self.target.select(keep)
        with self._of_levels():
            for level in self._levels():
                level.select(keep)
        self._ready, self._ends = ([line[r] for r in keep] for line in (self._ready, self._ends))

    def run(self, rows: Rows, stats: SpeculationStats) -> Verdict:
        """One pass of the target over all rows, behind what the drafter proposed."""
        begin = time.perf_counter()
        limits = [0] * len(rows)
        with self._of_levels():  # whose passes may be timed here
            limits = self._limits(rows)
        if hasattr(self.drafter, "scored_by"):  # asked every round: rows that join may have rules of their own
            self.drafter.scored_by = self.target.runner if self.target.settles_in_engine else None
        draft = self._proposed(rows, limits)
        verdict = self.target.check(rows, draft or Draft.nothing(len(rows), self.device))
        self.drafted = draft.deepest if draft else [0] * len(rows)
        self.drafted_by = None if self.drafter is None else proposer(self.drafter).name
        stats.count_pass(len(rows))
        if draft:
            proposer(self.drafter).stats.settle(draft.lengths, verdict.accepted)
            with self._of_levels():
                self.drafter.rollback([len(row) + a for row, a in zip(rows, verdict.accepted, strict=True)])
        self._ready = [True] * len(rows)
        with self._of_levels():
            if self.steering is not None:
                self.steering.observe(stats, limits, self.drafted, verdict.accepted, time.perf_counter() - begin)
        return verdict

    def _proposed(self, rows: Rows, limits: list[int]) -> Draft | None:
        """What the levels propose; None where they are not asked, or failed."""
        if self.drafter is None or not any(self._ready) or (self.steering is not None and not any(limits)):
            return None
        with self._of_levels():
            try:
                return self.drafter.propose(rows, limits)
            except Exception as error:  # whatever a level raises, the target can go on
                if self.on_failure is not None or self.steering is None:
                    raise
                self.steering.fail(error)
        return None

    @contextmanager
    def _of_levels(self) -> Iterator[None]:
        """What levels do here; the target goes on without them where `on_failure` wants to hear of their error."""
        try:
            yield
        except Exception as error:  # whatever a level raises
            if self.on_failure is None:
                raise
            self.drafter = self.steering = None
            self.on_failure(error)

    def commit(self, rows: Rows, gained: list[int], going: list[int], stats: SpeculationStats) -> None:
        """Nothing: caches were rolled back to what the target accepted, and what is dropped of it ends a row."""

    def account(self, stats: SpeculationStats) -> None:
        """Up to the first pass all of it is the prefill."""
        stats.target_seconds = self.target.runner.seconds
        drafting = self.drafter.stats.seconds if self.drafter else 0.0
        stats.settled(stats.seconds, stats.target_seconds, drafting)
        if stats.target_passes == 1:
            self._end_prefill()

    def _end_prefill(self) -> None:
        """What the levels spent so far is no part of decoding."""
        level = self.drafter
        while isinstance(stats := getattr(level, "stats", None), LevelStats):
            stats.prefill_seconds = stats.seconds
            level = getattr(level, "inner", None)

    def _levels(self) -> list[Drafter | Steering]:
        """Who is told of rows after the target, whose cache they may follow; then what steers them."""
        drafter = None if self.steering is not None and self.steering.failed else self.drafter
        return [one for one in (drafter, self.steering) if one is not None]

    def _limits(self, rows: Rows) -> list[int]:
        """Tokens worth drafting: a check adds one more."""
        lines = zip(rows, self._ends, self._ready, strict=True)
        rooms = [end - len(row) - 1 if ready else 0 for row, end, ready in lines]
        if self.steering is not None:
            return self.steering.limits(rows, rooms)
        return [min(self.num_draft_tokens, room) for room in rooms]
