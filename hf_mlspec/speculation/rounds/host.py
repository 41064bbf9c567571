"""How does a round run on the host, for levels of any kind? The drafter proposes, the target checks, all roll back."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import torch

from ..checker import Checker, Verdict
from ..draft import Draft, Drafter, Rows
from ..stats import LevelStats, SpeculationStats


@dataclass(eq=False)
class HostRounds:
    """Rounds of a chain whose verdicts the host reads one by one. See `Rounds`.

    num_draft_tokens: the most a draft may hold. device: where drafts go.
    """

    target: Checker
    drafter: Drafter | None
    _: KW_ONLY
    num_draft_tokens: int
    device: torch.device
    drafted: list[int] = field(default_factory=list, init=False)
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
        self._waits = bool(getattr(self.drafter, "follows", False))
        if self.drafter:
            self.drafter.start(len(rows), self.device)
        self.target.runner.lengths = [cached] * len(rows)
        self._ready, self._ends = [not self._waits] * len(rows), list(ends)

    def refusal(self, end: int) -> str:
        """Any row can join: levels of fewer positions leave it to the others."""
        return ""

    def admit(self, rows: Rows, ends: list[int], numbers: list[int]) -> None:
        """The next round prefills these rows while the others are checked."""
        for level in self._levels():
            level.admit(len(rows))
        self._ready += [not self._waits] * len(rows)
        self._ends += ends

    def replace(self, r: int, row: list[int], end: int, number: int, common: int) -> None:
        """What both rows begin with stays in the cache of a compiled target: it would write the same bits again
        (invariant 3)."""
        runner = self.target.runner
        common = min(runner.lengths[r], common) if runner.can.bit_exact else 0
        for level in self._levels():
            level.replace(r)
        runner.lengths[r] = common
        self._ready[r], self._ends[r] = not self._waits, end

    def select(self, keep: list[int]) -> None:
        for level in self._levels():
            level.select(keep)
        self._ready, self._ends = ([line[r] for r in keep] for line in (self._ready, self._ends))

    def run(self, rows: Rows, stats: SpeculationStats) -> Verdict:
        """One pass of the target over all rows, behind what the drafter proposed."""
        proposes = self.drafter is not None and any(self._ready)
        if hasattr(self.drafter, "scored_by"):  # asked every round: rows that join may have rules of their own
            self.drafter.scored_by = self.target.runner if self.target.settles_in_engine else None
        draft = self.drafter.propose(rows, self._limits(rows)) if proposes else self._no_draft(rows)
        verdict = self.target.check(rows, draft)
        self.drafted = draft.lengths
        stats.count_pass(len(rows))
        if proposes:
            self.drafter.stats.settle(draft.lengths, verdict.accepted)
            self.drafter.rollback([len(row) + a for row, a in zip(rows, verdict.accepted, strict=True)])
        self._ready = [True] * len(rows)
        return verdict

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

    def _levels(self) -> list[Checker | Drafter]:
        """From the target down: who follows a cache is told after its owner."""
        return [self.target] if self.drafter is None else [self.target, self.drafter]

    def _limits(self, rows: Rows) -> list[int]:
        """Tokens worth drafting: a check adds one more."""
        most = self.num_draft_tokens
        lines = zip(rows, self._ends, self._ready, strict=True)
        return [min(most, end - len(row) - 1) if ready else 0 for row, end, ready in lines]

    def _no_draft(self, rows: Rows) -> Draft:
        return Draft.from_lists([[] for _ in rows], self.device)
