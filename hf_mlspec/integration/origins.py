"""Which level drafted a token that the target took?"""

from __future__ import annotations

from ..speculation.chain import Chain
from ..speculation.checker import Verdict
from ..speculation.draft import Drafter
from ..speculation.drafters.checked import CheckedDrafter, proposer


class Origins:
    """Who wrote each place of the last round's drafts.

    A level with one below it hands up what it accepted of that level's guesses, and after each check a token of its
    own. drafter: the level below the target, None if there is none.
    """

    def __init__(self, chain: Chain) -> None:
        self._checks: list[tuple[list[int], list[bool]]] = []  # of the round: per row accepted, and whether checked
        self._chain, chain.on_built = chain, self.watch
        self.watch(chain.drafter)

    def watch(self, drafter: Drafter | None) -> None:
        """The level below the target has come."""
        self.drafter = drafter
        if isinstance(drafter, CheckedDrafter):
            drafter.checker.on_check = self._saw

    def of(self, row: int, count: int, verdict: Verdict) -> list[str | None]:
        """The levels of the `count` tokens that a row gained by the last round's verdict, None where no level did."""
        drafted_by, accepted = verdict.drafted_by, verdict.accepted[row]
        if self.drafter is None or drafted_by is None:
            return [None] * count
        names: list[str | None] = []
        if drafted_by == self.drafter.name and isinstance(self.drafter, CheckedDrafter):
            below = proposer(self.drafter.inner).name
            for kept, alive in self._checks:
                if alive[row]:
                    names += [below] * kept[row] + [self.drafter.name]
        names += [drafted_by] * (accepted - len(names))
        return (names[:accepted] + [None] * count)[:count]

    def forget(self) -> None:
        """The round is over."""
        self._checks.clear()

    def end(self) -> None:
        """Nobody asks any more: the levels, which may stay for other calls, hold no more what they checked."""
        if isinstance(self.drafter, CheckedDrafter):
            self.drafter.checker.on_check = None
        self._chain.on_built = None
        self.forget()

    def _saw(self, drafted: list[int], accepted: list[int], alive: list[bool]) -> None:
        self._checks.append((list(accepted), list(alive)))
