"""How does a chain's decoding become a trace? Every check is heard, and checks are nested as the levels are."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from ..checker import Checker, Verdict
from ..draft import Drafter, Rows
from ..drafters.checked import CheckedDrafter
from ..loop import Emit
from .trace import Round, TracedRow


class TraceRecorder:
    """Hears the checks of one call of generate; `rows()` are its prompts, in order.

    Decoding takes the same path as without it: checks inside a compiled call are told of when the call returns.
    """

    def __init__(self) -> None:
        # depth -> row of the batch as it is now -> rounds not yet claimed by a round of the level above
        self._open: defaultdict[int, defaultdict[int, list[Round]]] = defaultdict(lambda: defaultdict(list))
        self._rounds: list[list[Round]] = []
        self._new: list[int] = []
        self._prompts: list[int] = []

    def watch(self, target: Checker, drafter: Drafter | None, prompt_tokens: list[int], emit: Emit | None) -> Emit:
        """Listen to this chain, which starts with prompts of these lengths; it shall emit to what is returned."""
        self._prompts = prompt_tokens
        self._rounds, self._new = [[] for _ in prompt_tokens], [0] * len(prompt_tokens)
        for depth, checker in enumerate(checkers(target, drafter)):
            checker.on_check = partial(self._heard, depth)
            checker.rows_alone = "a trace tells of drafts that are rows: draft rows"

        def recorded(numbers: list[int], kept: Rows, verdict: Verdict) -> None:
            for r, (number, tokens) in enumerate(zip(numbers, kept, strict=True)):
                self._rounds[number] += self._open[0].pop(r, [])
                self._new[number] += len(tokens)
            if emit is not None:
                emit(numbers, kept, verdict)

        return recorded

    def rows(self) -> list[TracedRow]:
        """What was recorded of every prompt."""
        lines = zip(self._prompts, self._new, self._rounds, strict=True)
        return [TracedRow(prompt, new, tuple(rounds)) for prompt, new, rounds in lines]

    def _heard(self, depth: int, drafted: list[int], accepted: list[int], alive: list[bool]) -> None:
        """A check at `depth` (0: the target's): what was heard below it since the last one made its draft."""
        below = self._open.pop(depth + 1, {})
        for r, (d, a, on) in enumerate(zip(drafted, accepted, alive, strict=True)):
            if on:
                self._open[depth][r].append(Round(d, a, tuple(below.get(r, ()))))


def checkers(target: Checker, drafter: Drafter | None) -> list[Checker]:
    """Who checks, from the target down."""
    found = [target]
    while isinstance(drafter, CheckedDrafter):
        found.append(drafter.checker)
        drafter = drafter.inner
    return found
