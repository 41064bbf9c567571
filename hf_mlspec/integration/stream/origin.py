"""Which level drafted a token that the target took?"""

from __future__ import annotations

from ...speculation.draft import Drafter
from ...speculation.drafters.checked import CheckedDrafter, proposer


class Origins:
    """Who wrote each place of the last round's drafts.

    A level with one below it hands up what it accepted of that level's guesses, and after each check a token of its
    own. drafter: the level below the target, None if there is none.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        self._checks: list[tuple[list[int], list[bool]]] = []  # of the round: per row accepted, and whether checked
        self.watch(drafter)

    def watch(self, drafter: Drafter | None) -> None:
        """The level below the target has come."""
        self.drafter = drafter
        if isinstance(drafter, CheckedDrafter):
            drafter.checker.on_check = self._saw

    def of(self, row: int, count: int, accepted: int, drafted_by: str | None) -> list[str | None]:
        """The levels of a row's `count` new tokens, of which so many as were accepted were drafted. drafted_by: as of
        `Rounds`."""
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

    def _saw(self, drafted: list[int], accepted: list[int], alive: list[bool]) -> None:
        self._checks.append((list(accepted), list(alive)))
