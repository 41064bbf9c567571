"""Has this row said the same thing before, and what came next?

Prompt lookup decoding (Saxena 2023, after Yang et al. 2023, "Inference with Reference"): text that repeats its prompt
(edits, summaries, code) is drafted by copying, without a model.
"""

from __future__ import annotations

from time import perf_counter

import torch

from ..draft import Draft, Rows
from ..stats import LevelStats
from .agreement import agreed_length

OCCURRENCES = 32  # that are looked at for a tree; more rarely add a branch


class SuffixIndex:
    """Where each n-gram of one row ended last. Forgetting tokens undoes exactly what learning them did.

    `earlier[i][n - 1]` is where the n-gram that ends at token i ended before (an exclusive end; 0: never). It answers
    the lookup of the row's own suffix and is the undo log of `last` in one.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        self.last: dict[tuple[int, ...], int] = {}
        self.earlier: list[list[int]] = []

    def append(self, token: int) -> None:
        """Learn one token: max_ngram dictionary writes."""
        self.tokens.append(token)
        end = len(self.tokens)
        before = []
        for n in range(1, min(self.max_ngram, end) + 1):
            gram = tuple(self.tokens[end - n:end])
            before.append(self.last.get(gram, 0))
            self.last[gram] = end
        self.earlier.append(before)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        while len(self.tokens) > length:
            end = len(self.tokens)
            for n, position in enumerate(self.earlier.pop(), 1):
                gram = tuple(self.tokens[end - n:end])
                if position:
                    self.last[gram] = position
                else:
                    del self.last[gram]
            self.tokens.pop()

    def update(self, row: list[int]) -> None:
        """Learn what is new in `row`, after forgetting what it no longer says."""
        self.truncate(agreed_length(self.tokens, row))
        for token in row[len(self.tokens):]:
            self.append(token)

    def continuation(self, min_ngram: int, limit: int) -> list[int]:
        """At most `limit` tokens that followed the most recent earlier occurrence of the longest suffix with one."""
        before = self.earlier[-1] if self.earlier else []
        for position in reversed(before[min_ngram - 1:]):
            if position:
                return self.tokens[position:position + limit]
        return []


    def continuations(self, min_ngram: int, limit: int, most: int) -> list[list[int]]:
        """What followed at most `most` earlier occurrences of suffixes, the longest suffix's first, then the most
        recent: the first is `continuation`."""
        before, found = self.earlier[-1] if self.earlier else [], {}
        for n in range(len(before), min_ngram - 1, -1):
            position = before[n - 1]
            while position and len(found) < most:
                found.setdefault(position, self.tokens[position:position + limit])
                earlier = self.earlier[position - 1]
                position = earlier[n - 1] if n <= len(earlier) else 0
        return list(found.values())


class PromptLookup:
    """Level "prompt_lookup": copies what followed an earlier occurrence of the row's last n-gram.

    max_ngram, min_ngram: longest and shortest suffix looked for, in tokens. The longest match wins, then the most
    recent; the copy ends at the row's end. Time per call is proportional to the tokens that are new since the last
    one, memory to max_ngram times the row. Raises ValueError unless 1 <= min_ngram <= max_ngram.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, name: str = "prompt_lookup") -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"PromptLookup needs 1 <= min_ngram <= max_ngram, not min_ngram={min_ngram} and "
                             f"max_ngram={max_ngram}")
        self.max_ngram, self.min_ngram, self.name = max_ngram, min_ngram, name
        self.stats = LevelStats(name)
        self.start(0, torch.device("cpu"))

    def fork(self) -> PromptLookup:
        """Another lookup with the same settings, and rows and counts of its own, for one call of generate."""
        return PromptLookup(self.max_ngram, self.min_ngram, self.name)

    def start(self, batch: int, device: torch.device) -> None:
        """Forget all earlier rows; `batch` rows follow, draft tensors are on `device`."""
        self.stats.reset()
        self._device = device
        self._indices = [SuffixIndex(self.max_ngram) for _ in range(batch)]

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        """Drafts of 0 to `limits[r]` tokens."""
        began = perf_counter()
        found = []
        for index, row, limit in zip(self._indices, rows, limits, strict=True):
            index.update(row)
            found.append(index.continuation(self.min_ngram, limit))
        draft = Draft.from_lists(found, self._device)
        self.stats.rounds += 1
        self.stats.seconds += perf_counter() - began
        return draft

    def branches(self, rows: Rows, limits: list[int], widths: list[int]) -> list[Rows]:
        """As `Lookup.branches` (lookup_tree.py): of other places the most recent ones."""
        most, found = OCCURRENCES if widths else 1, []
        for index, row, limit in zip(self._indices, rows, limits, strict=True):
            index.update(row)
            found.append(index.continuations(self.min_ngram, limit, most))
        return found

    def rollback(self, lengths: list[int]) -> None:
        """Forget what row r holds beyond its first `lengths[r]` tokens."""
        for index, length in zip(self._indices, lengths, strict=True):
            index.truncate(length)

    def select(self, keep: list[int]) -> None:
        """Continue with the rows of these indices only, in this order."""
        self._indices = [self._indices[r] for r in keep]

    def admit(self, count: int) -> None:
        """Append `count` new rows."""
        self._indices += [SuffixIndex(self.max_ngram) for _ in range(count)]

    def replace(self, row: int) -> None:
        """Another row takes the place of row `row`."""
        self._indices[row] = SuffixIndex(self.max_ngram)
