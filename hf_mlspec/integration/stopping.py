"""Where does a row end that gains several tokens at once, and what do stopping criteria see of the batch?"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from ..speculation.draft import Rows
from .processing import Prompts, calls_like

_OF_ROW = (MaxTimeCriteria, StopStringCriteria)  # what they say of a row depends on nothing else of the batch


class Stopping:
    """Scans every settled token: an end-of-sequence token or a stop string may sit inside an accepted block.

    Time limits and stop strings are asked about a row as soon as it has a token more. All other criteria, the user's
    own, are asked as in stock generate: once for each number of new tokens, with all rows of the batch in its order
    and equally long (`Prompts.filled`), as soon as every row that has not ended has so many. Another row may be
    further by then; it ends where stock generate would end it, and what it gained behind that is dropped (`cut`).
    """

    def __init__(self, criteria: StoppingCriteriaList, prompts: Prompts):
        ends = [c.eos_token_id for c in criteria if calls_like(c, (EosTokenCriteria,))]
        self.eos = {token for ids in ends for token in ids.flatten().tolist()}
        self._of_row = [c for c in criteria if calls_like(c, _OF_ROW)]
        self._of_batch = [c for c in criteria if not calls_like(c, (*_OF_ROW, EosTokenCriteria, MaxLengthCriteria))]
        self.prompts = prompts
        self._new: Rows = [[] for _ in prompts.rows]  # what counts of each row, as far as it was scanned
        self._ends: list[int | None] = [None] * len(prompts.rows)  # new tokens after which each row ended
        self._asked = 0  # new tokens up to which the criteria of the batch were asked

    def __call__(self, number: int, row: list[int], tokens: list[int]) -> tuple[int, bool]:
        """(settled tokens that count, whether the row is finished)."""
        count, finished = self._scan(number, row, tokens)
        new, had = self._new[number], len(row) - self.prompts.lengths[number]
        new += tokens[:count]
        if finished and self._ends[number] is None:
            self._ends[number] = had + count
        if self._of_batch:
            self._ask_about_all()
        end = self._ends[number]
        return (count, False) if end is None else (min(count, max(end - had, 0)), True)

    def ended(self, number: int) -> bool:
        """Whether a token or a criterion ended this row; one that reached its greatest length is not known here."""
        return self._ends[number] is not None

    def cut(self, rows: Rows) -> int:
        """Drop what the rows of the batch gained behind their ends; how many tokens that were."""
        dropped = 0
        for row, start, end in zip(rows, self.prompts.lengths, self._ends, strict=True):
            if end is not None:
                dropped += len(row) - len(row[: start + end])
                del row[start + end :]
        return dropped

    def _scan(self, number: int, row: list[int], tokens: list[int]) -> tuple[int, bool]:
        for count, token in enumerate(tokens, 1):
            if token in self.eos or (self._of_row and self._met(number, row + tokens[:count])):
                return count, True
        return len(tokens), False

    def _met(self, number: int, row: list[int]) -> bool:
        ids = torch.tensor([self.prompts.whole(number, row)], device=self.prompts.input_ids.device)
        return any(bool(criterion(ids, None).any()) for criterion in self._of_row)

    def _ask_about_all(self) -> None:
        """Ask about every number of new tokens that is complete."""
        while True:
            step = self._asked + 1
            going = [end is None or end >= step for end in self._ends]
            if not any(going) or any(on and len(new) < step for on, new in zip(going, self._new, strict=True)):
                return
            for number, met in enumerate(self._verdicts(step)):
                if met and going[number]:
                    self._ends[number] = step
            self._asked = step

    def _verdicts(self, step: int) -> list[bool]:
        prompts = self.prompts
        lines = zip(prompts.rows, self._new, self._ends, strict=True)
        shown = {number: row + new[:end] for number, (row, new, end) in enumerate(lines)}
        ids = torch.tensor(prompts.filled(step, shown), device=prompts.input_ids.device)
        met = torch.zeros(len(ids), dtype=torch.bool)
        for criterion in self._of_batch:
            met |= _verdict(criterion, ids)
        return met.tolist()


def _verdict(criterion, ids: Tensor) -> Tensor:
    """What a criterion says of each row, bool `[batch]`, or `[1]` where it says one thing of all."""
    verdict = torch.as_tensor(criterion(ids, None)).bool().cpu()
    if verdict.numel() not in (1, len(ids)):
        raise ValueError(
            f"{type(criterion).__name__} answered with shape {list(verdict.shape)} for {len(ids)} rows: a stopping "
            "criterion returns one bool, or a bool tensor [batch]"
        )
    return verdict.flatten()
