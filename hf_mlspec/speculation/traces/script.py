"""How does a chain decode when a trace says what is drafted and what is accepted?

Levels run the forward passes they would run, at the recorded widths; only lengths and verdicts come from the script.
The tokens are whatever the models say, so weights may be random.
"""

from __future__ import annotations

import torch

from ..checker import Checker, Verdict
from ..draft import Draft, Drafter, Rows
from ..drafters.checked import CheckedDrafter
from ..stats import LevelStats
from .trace import Round

# A positive threshold that no greedy token is below: levels compute their confidence, and never stop for it.
NEVER_STOPS = 1e-30
_NOTHING = Round(0, 0)


class ScriptedChecker(Checker):
    """Runs the check of `checker`, then accepts as the script says.

    rounds: per row of the batch the rounds to come, the next one last; `follow` sets them. A row without any, as one
    that joined, drafts nothing.
    """

    def __init__(self, checker: Checker):
        super().__init__(checker.runner, checker.sampler, checker.name, keep_logits=checker.keep_logits)
        self.rounds: list[list[Round]] = []

    def follow(self, rounds: list[tuple[Round, ...]]) -> None:
        """The rounds to come of every row, in order."""
        self.rounds = [list(reversed(line)) for line in rounds]

    def upcoming(self) -> list[Round]:
        """The next round of every row; of one that has none left a round of nothing."""
        return [line[-1] if line else _NOTHING for line in self.rounds]

    def start(self, batch: int, device: torch.device) -> None:
        super().start(batch, device)
        self.rounds = [[] for _ in range(batch)]

    def select(self, keep: list[int]) -> None:
        super().select(keep)
        self.rounds = [self.rounds[r] for r in keep]

    def admit(self, count: int) -> None:
        super().admit(count)
        self.rounds += [[] for _ in range(count)]

    def replace(self, row: int) -> None:
        super().replace(row)
        self.rounds[row] = []

    def _accept(self, rows: Rows, draft: Draft, want_confidence: bool, alive: list[bool]) -> Verdict:
        """The token after the accepted ones is one that the checker would have put somewhere."""
        verdict = super()._accept(rows, draft, want_confidence, alive)
        guesses = draft.rows()
        for r, on in enumerate(alive):
            if on:
                round = self.rounds[r].pop() if self.rounds[r] else _NOTHING
                if len(guesses[r]) != round.drafted:
                    raise RuntimeError(
                        f"{self.name}: row {r} of the batch brings {len(guesses[r])} drafted tokens where the trace "
                        f"says {round.drafted}"
                    )
                verdict.accepted[r] = round.accepted
                verdict.tokens[r] = guesses[r][: round.accepted] + verdict.tokens[r][-1:]
                self.runner.lengths[r] = len(rows[r]) + round.accepted  # all of it was fed
        return verdict


class ScriptedDrafter:
    """The last level: drafts as many tokens as the script of its checker says, whatever the limits."""

    def __init__(self, drafter: Drafter, above: ScriptedChecker):
        self.drafter, self.above = drafter, above
        self.name = drafter.name
        for each in ("start", "rollback", "select", "admit", "replace"):
            setattr(self, each, getattr(drafter, each))

    @property
    def stats(self) -> LevelStats:
        """The drafter's own."""
        return self.drafter.stats

    @property
    def follows(self) -> bool:
        """Whether this level writes into its checker's cache."""
        return bool(getattr(self.drafter, "follows", False))

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        asked = [round.drafted for round in self.above.upcoming()]
        draft = self.drafter.propose(rows, asked)
        if draft.lengths == asked:
            return draft
        found = [tokens[:n] for tokens, n in zip(draft.rows(), asked, strict=True)]
        # A lookup finds nothing in random text: its place is filled with copies of the row's last token.
        filled = [
            tokens + [row[-1]] * (n - len(tokens)) for tokens, row, n in zip(found, rows, asked, strict=True)
        ]
        return Draft.from_lists(filled, draft.tokens.device)


class ScriptedLevel(CheckedDrafter):
    """A level with levels below it: its inner rounds are those of the round it drafts for, run one by one."""

    def __init__(self, level: CheckedDrafter, above: ScriptedChecker, checker: ScriptedChecker, inner: Drafter):
        super().__init__(
            checker,
            inner,
            num_draft_tokens=level.num_draft_tokens,
            threshold=level.threshold,
            max_positions=level.max_positions,
        )
        self.above = above

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        upcoming = self.above.upcoming()
        self.checker.follow([round.inner for round in upcoming])
        return super().propose(rows, [round.drafted for round in upcoming])

    def _runs_in_engine(self, rows: Rows, limits: list[int]) -> bool:
        return False  # one compiled call decides by itself what it accepts

    def _confident(self, verdict: Verdict) -> list[bool]:
        return [True] * len(super()._confident(verdict))


def scripted(drafter: Drafter, above: ScriptedChecker) -> list[Drafter]:
    """`drafter`, not yet started, and the levels below it, each under its scripted checker; outermost first."""
    if not isinstance(drafter, CheckedDrafter):
        return [ScriptedDrafter(drafter, above)]
    checker = ScriptedChecker(drafter.checker)
    below = scripted(drafter.inner, checker)
    return [ScriptedLevel(drafter, above, checker, below[0]), *below]
