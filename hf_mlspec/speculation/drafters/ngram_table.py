"""How often did each token follow each context, within a bound on memory?"""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict

import torch
from torch import Tensor

Context = tuple[int, ...]
# Calls of generate in several threads may count into one table. Not a part of it: tables are copied and pickled.
_changing = threading.Lock()


class Successors:
    """Counts of the tokens that followed one context, with the most frequent one kept at hand."""

    __slots__ = ("best", "counts", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.total = 0
        self.best: int | None = None  # None: has to be looked for

    def add(self, token: int, count: int = 1) -> None:
        now = self.counts[token] = self.counts.get(token, 0) + count
        self.total += count
        if self.best is not None:
            ahead = self.counts[self.best]
            if now > ahead or (now == ahead and token < self.best):
                self.best = token
        elif len(self.counts) == 1:
            self.best = token

    def remove(self, token: int) -> None:
        self.total -= 1
        self.counts[token] -= 1
        if not self.counts[token]:
            del self.counts[token]
        if token == self.best:
            self.best = None

    def most_frequent(self) -> tuple[int, float]:
        """The most frequent token (ties: the lowest id) and its share of all."""
        if self.best is None:
            self.best = min(self.counts, key=lambda token: (-self.counts[token], token))
        return self.best, self.counts[self.best] / self.total


class NGramTable:
    """Context -> successors, at most `max_entries` pairs of the two.

    Eviction: when a new pair exceeds the bound, the context that was counted longest ago goes, with all its
    successors, and so on until the bound holds; lookups do not refresh a context. A full table never pauses decoding:
    an eviction costs no more than the counting it undoes. `remove` undoes `add` unless the pair was evicted since.
    """

    def __init__(self, max_entries: int) -> None:
        if max_entries < 1:
            raise ValueError(f"an n-gram table needs room for at least 1 entry, not max_entries={max_entries}")
        self.max_entries = max_entries
        self.contexts: OrderedDict[Context, Successors] = OrderedDict()
        self.entries = 0

    def add(self, context: Context, token: int) -> None:
        """Count `token` once after `context`."""
        with _changing:
            self._add(context, token)

    def _add(self, context: Context, token: int) -> None:
        successors = self.contexts.get(context)
        if successors is None:
            successors = self.contexts[context] = Successors()
        else:
            self.contexts.move_to_end(context)
        self.entries += token not in successors.counts
        successors.add(token)
        while self.entries > self.max_entries:
            self.entries -= len(self.contexts.popitem(last=False)[1].counts)

    def remove(self, context: Context, token: int) -> None:
        """Take back one count; nothing where it was evicted."""
        with _changing:
            self._remove(context, token)

    def _remove(self, context: Context, token: int) -> None:
        successors = self.contexts.get(context)
        if successors is None or token not in successors.counts:
            return
        successors.remove(token)
        self.entries -= token not in successors.counts
        if not successors.counts:
            del self.contexts[context]

    def most(self, context: Context, count: int) -> list[tuple[int, float]]:
        """At most `count` successors and their shares, the most frequent first (ties: the lowest id); none for an
        unknown context."""
        with _changing:
            found = self.contexts.get(context)
            if found is None:
                return []
            if count == 1:
                return [found.most_frequent()]
            ranked = heapq.nsmallest(count, found.counts, key=lambda token: (-found.counts[token], token))
            return [(token, found.counts[token] / found.total) for token in ranked]

    def best(self, context: Context) -> tuple[int, float] | None:
        """The most frequent successor and its share, None for an unknown context."""
        with _changing:
            successors = self.contexts.get(context)
            return successors.most_frequent() if successors else None

    @property
    def largest_token(self) -> int:
        """The largest token id that follows any context, -1 in an empty table."""
        with _changing:
            return max((max(successors.counts) for successors in self.contexts.values()), default=-1)

    def to_tensors(self, width: int) -> dict[str, Tensor]:
        """contexts int64 [C, width] left-padded with -1, followers int64 [C], tokens int64 [E], counts int64 [E]."""
        padded = [[-1] * (width - len(context)) + list(context) for context in self.contexts]
        every = [successors.counts for successors in self.contexts.values()]
        return {"contexts": torch.tensor(padded, dtype=torch.long).view(len(padded), width),
                "followers": torch.tensor([len(counts) for counts in every], dtype=torch.long),
                "tokens": torch.tensor([token for counts in every for token in counts], dtype=torch.long),
                "counts": torch.tensor([count for counts in every for count in counts.values()], dtype=torch.long)}

    def load_tensors(self, tensors: dict[str, Tensor], width: int) -> None:
        """Fill an empty table from `to_tensors`; KeyError or ValueError where the tensors contradict each other."""
        contexts, followers = tensors["contexts"], tensors["followers"]
        tokens, counts = tensors["tokens"], tensors["counts"]
        _check(contexts, followers, tokens, counts, width)
        if len(tokens) > self.max_entries:
            raise ValueError(f"{len(tokens)} entries, more than its own bound max_entries={self.max_entries}")
        pairs = zip(tokens.tolist(), counts.tolist(), strict=True)
        for padded, number in zip(contexts.tolist(), followers.tolist(), strict=True):
            successors = self.contexts[tuple(token for token in padded if token >= 0)] = Successors()
            for _ in range(number):
                successors.add(*next(pairs))
        self.entries = sum(len(successors.counts) for successors in self.contexts.values())


def _check(contexts: Tensor, followers: Tensor, tokens: Tensor, counts: Tensor, width: int) -> None:
    for name, tensor in (("contexts", contexts), ("followers", followers), ("tokens", tokens), ("counts", counts)):
        if tensor.dtype != torch.int64:
            raise ValueError(f"tensor {name} is {tensor.dtype}, not torch.int64")
    if contexts.shape != (len(followers), width):
        raise ValueError(f"contexts have shape {tuple(contexts.shape)}, not ({len(followers)}, {width})")
    if not len(tokens) == len(counts) == int(followers.sum()):
        raise ValueError(f"{len(tokens)} tokens, {len(counts)} counts, but {int(followers.sum())} followers")
    if len(tokens) and min(int(followers.min()), int(counts.min())) < 1:
        raise ValueError("a count below 1")
    if len(tokens) and (int(tokens.min()) < 0 or int(contexts[:, -1].min()) < 0):
        raise ValueError("a negative token id")
