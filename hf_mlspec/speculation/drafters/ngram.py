"""What usually follows the last few tokens, in everything seen so far?

A back-off n-gram model (Katz 1987, without discounting: only the most frequent successor and its share are used) that
grows while decoding, or is trained beforehand.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ...checkpoints.whole_file import written_whole
from ...engines.trees import width_at
from ..draft import Draft, Rows
from ..stats import LevelStats
from .agreement import agreed_length
from .ngram_table import NGramTable

_FORMAT = "hf_mlspec.ngram.1"


class NGramFileError(ValueError):
    """A saved n-gram table cannot be read."""


class NGram:
    """Level "ngram": drafts the most frequent successor of the longest known context, token after token.

    order:       longest n-gram counted; contexts hold 1 .. order - 1 tokens. At least 2.
    threshold:   a draft stops before a token whose share among its context's successors is below this:
                 a guess that is not made (invariant 6).
    max_entries: bound on the (context, successor) pairs kept, 0.2 to 0.5 KB each; beyond it the context that was
                 counted longest ago is forgotten with all its successors (see NGramTable).

    The table survives `start`: one instance may serve many calls of generate, each through a fork. Rejected tokens are
    removed from the counts. All rows of a batch share the table.
    """

    def __init__(self, order: int = 4, *, threshold: float = 0.4, max_entries: int = 200_000,
                 name: str = "ngram") -> None:
        if order < 2:
            raise ValueError(f"NGram counts contexts of order - 1 tokens: order must be at least 2, not {order}")
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"NGram's threshold is a share between 0 and 1, not {threshold}")
        self.order, self.threshold, self.name = order, threshold, name
        self.table = NGramTable(max_entries)
        self.stats = LevelStats(name)
        self.start(0, torch.device("cpu"))

    @classmethod
    def from_text(cls, text: str | Iterable[str], tokenizer: Any, order: int = 4, *, threshold: float = 0.4,
                  max_entries: int = 200_000, name: str = "ngram") -> NGram:
        """Count a text, or each text of an iterable on its own, in the tokens of `tokenizer` without special ones."""
        if callable(text) or not callable(tokenizer):
            raise TypeError(f"NGram.from_text takes a text, then its tokenizer: got {type(text).__name__}, then "
                            f"{type(tokenizer).__name__}")
        ngram = cls(order, threshold=threshold, max_entries=max_entries, name=name)
        for part in [text] if isinstance(text, str) else text:
            ngram.learn(tokenizer(part, add_special_tokens=False)["input_ids"])
        return ngram

    def fork(self) -> NGram:
        """Another drafter over the same table, with rows, counts and a threshold of its own, for one call of generate.

        Forks may run in several threads at the same time.
        """
        other = copy.copy(self)
        other.stats = LevelStats(self.name)
        other.start(0, self._device)
        return other

    def learn(self, tokens: list[int]) -> None:
        """Count a sequence that belongs to no row."""
        for i in range(1, len(tokens)):
            self._count(tokens, i)

    @property
    def largest_token(self) -> int:
        """The largest token id in the table, -1 where it is empty: a draft never holds a larger one."""
        return self.table.largest_token

    def start(self, batch: int, device: torch.device) -> None:
        """Forget the rows, but not the table; `batch` rows follow, draft tensors are on `device`."""
        self.stats.reset()
        self._device = device
        self._rows: Rows = [[] for _ in range(batch)]

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        """Count the new tokens of every row, then draft: deterministic, ties by lowest id."""
        began = perf_counter()
        for known, row in zip(self._rows, rows, strict=True):
            self._follow(known, row)
        draft = Draft.from_lists([self._continuation(row, limit) for row, limit in zip(rows, limits, strict=True)],
                                 self._device)
        self.stats.rounds += 1
        self.stats.seconds += perf_counter() - began
        return draft

    def branches(self, rows: Rows, limits: list[int], widths: list[int]) -> list[Rows]:
        """As `Lookup.branches` (lookup_tree.py): the j-th successor of a context, from 1 on, from a share of
        threshold / j on."""
        for known, row in zip(self._rows, rows, strict=True):
            self._follow(known, row)
        return [self._branches(row, limit, widths) for row, limit in zip(rows, limits, strict=True)]

    def rollback(self, lengths: list[int]) -> None:
        """Remove from the counts what row r holds beyond its first `lengths[r]` tokens."""
        for known, length in zip(self._rows, lengths, strict=True):
            self._truncate(known, length)

    def select(self, keep: list[int]) -> None:
        """Continue with the rows of these indices only, in this order; the counts of the others stay."""
        self._rows = [self._rows[r] for r in keep]

    def admit(self, count: int) -> None:
        """Append `count` new rows."""
        self._rows += [[] for _ in range(count)]

    def replace(self, row: int) -> None:
        """Another row takes the place of row `row`; the counts of the one that ended stay."""
        self._rows[row] = []

    def _follow(self, known: list[int], row: list[int]) -> None:
        self._truncate(known, agreed_length(known, row))
        for token in row[len(known):]:
            known.append(token)
            self._count(known, len(known) - 1)

    def _truncate(self, known: list[int], length: int) -> None:
        while len(known) > length:
            for context in self._contexts(known, len(known) - 1):
                self.table.remove(context, known[-1])
            known.pop()

    def _contexts(self, tokens: list[int], i: int) -> list[tuple[int, ...]]:
        """The contexts of token i, longest first."""
        return [tuple(tokens[i - n:i]) for n in range(min(self.order - 1, i), 0, -1)]

    def _count(self, tokens: list[int], i: int) -> None:
        for context in self._contexts(tokens, i):
            self.table.add(context, tokens[i])

    def _continuation(self, row: list[int], limit: int) -> list[int]:
        tail = row[-(self.order - 1):]
        drafted: list[int] = []
        while len(drafted) < limit:
            found = next(filter(None, map(self.table.best, self._contexts(tail, len(tail)))), None)
            if found is None or found[1] < self.threshold:
                break
            drafted.append(found[0])
            tail = [*tail, found[0]][-(self.order - 1):]
        return drafted

    def _branches(self, row: list[int], limit: int, widths: list[int]) -> Rows:
        """Continuations, the likeliest first at every place; all with the first tokens before the next ones."""
        whole: Rows = []
        waiting: Rows = [[]]
        while waiting:
            drafted = waiting.pop()
            tail = [*row[-(self.order - 1):], *drafted][-(self.order - 1):]
            depth = len(drafted)
            found = self._successors(tail, width_at(widths, depth)) if depth < limit else []
            waiting += [[*drafted, token] for token in reversed(found)]
            if not found and drafted:
                whole.append(drafted)
        return whole

    def _successors(self, tail: list[int], count: int) -> list[int]:
        """At most `count` tokens behind the last ones of a row: those of the longest known context, then of others."""
        found: dict[int, float] = {}
        for context in self._contexts(tail, len(tail)):
            for token, share in self.table.most(context, count):
                if len(found) < count:
                    found.setdefault(token, share)
        ranked = enumerate(found.items(), 1)
        return [token for place, (token, share) in ranked if share >= self.threshold / place]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as safetensors, under a temporary name first: a reader finds the old file or all of the new.

        contexts int64 [C, order - 1] (left-padded with -1), followers int64 [C] successors per context,
        tokens int64 [E] and counts int64 [E]; contexts from the one counted longest ago to the latest.
        """
        meta = {"format": _FORMAT, "ngram": json.dumps({"order": self.order, "threshold": self.threshold,
                                                       "max_entries": self.table.max_entries, "name": self.name})}
        with written_whole(path) as temporary:
            temporary.write_bytes(save(self.table.to_tensors(self.order - 1), meta))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NGram:
        """Read what `save` wrote. Raises NGramFileError for anything else, FileNotFoundError where no file is."""
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata() or {}
                if meta.get("format") != _FORMAT:
                    raise NGramFileError(f"{path} is a safetensors file of format {meta.get('format')!r}, "
                                         f"not {_FORMAT!r}: write it with NGram.from_text(...).save(path)")
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
            ngram = cls(**json.loads(meta["ngram"]))
            ngram.table.load_tensors(tensors, ngram.order - 1)
        except NGramFileError:
            raise
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise NGramFileError(f"{path} holds no readable n-gram table ({error}): write it again with "
                                 "NGram.from_text(...).save(path)") from error
        return ngram
