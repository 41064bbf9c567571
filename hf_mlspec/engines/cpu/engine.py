"""How does a model score tokens in one compiled call on the CPU, and draft and check greedily without leaving it?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..engine import Capabilities, Guess, Rows, Scores
from ..lanes import Lane
from ..trees import Parents
from .rows import CpuRows
from .trees import FedTree, scored_trees

PIECE = 2048  # tokens: compiled code cannot be interrupted, so a prompt of more is handed to it piece by piece


class CpuEngine(CpuRows):
    """A CPU decoder over its rows. See `Engine`."""

    name = "cpu"
    can = Capabilities(greedy_rounds=True, bit_exact=True, draft_window=True, tapped=True, trees=True)
    device = torch.device("cpu")

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._trees: list[FedTree] = []
        if self.decoder.num_recurrent:
            self.can = replace(CpuEngine.can, stateful=True, trees=False)

    def feed(self, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None) -> Tensor:
        """`Engine.feed`: logits `[batch, k + 1, vocab]`, zeros where nothing was fed."""
        alive = alive or [True] * len(rows)
        width = guess.tokens.shape[1] if guess else 0
        guesses: Rows = [[] for _ in rows]
        if width:
            guesses = [line[:n] for line, n in zip(guess.tokens.tolist(), guess.lengths, strict=True)]
        parents = guess.parents if guess else None
        logits = self.score(rows, guesses, want_logits=True, alive=alive, parents=parents).logits
        return _padded(logits, [len(g) + 1 if on else 0 for g, on in zip(guesses, alive, strict=True)], width + 1)

    def step(self, tokens: Tensor, counts: list[int], first: list[int], kept: int) -> Tensor:
        """Feed tokens `[batch, q]` behind what the cache holds; logits of the last `kept`, as `Engine.step`.

        A row whose count is 0 is inactive.
        """
        width = tokens.shape[1]
        self._reserve(max(self.lengths) + width)
        if not set(counts) <= {0, width} or {f + kept for f in first} != {width}:
            raise ValueError(f"a step of the CPU decoder takes whole rows: {counts} of {width} tokens, {kept} kept")
        flat = [token for line, count in zip(tokens.tolist(), counts, strict=True) for token in line[:count]]
        asked = [kept if count else 0 for count in counts]
        begin = time.perf_counter()
        _, _, logits = self._scored(flat, counts, self.lengths, asked, False, True)
        self._count(1, time.perf_counter() - begin)
        self.lengths = [have + count for have, count in zip(self.lengths, counts, strict=True)]
        return _padded(logits, asked, kept)

    def score(
        self,
        rows: Rows,
        guesses: Rows,
        *,
        want_confidence: bool = False,
        want_logits: bool = False,
        alive: list[bool] | None = None,
        parents: list[Parents] | None = None,
    ) -> Scores:
        """Feed what the cache lacks of every row, and its guess; score the row's end and every guessed token.

        alive: False for inactive rows: nothing of theirs is fed, kept or said. parents: of trees, of which the cache
        holds what `keep` keeps.
        """
        alive = alive or [True] * len(rows)
        if parents is not None:
            wanted = want_confidence, want_logits
            best, confidence, logits, self._trees = scored_trees(self, rows, guesses, parents, alive, *wanted)
            return Scores(best, confidence if want_confidence else None, logits if want_logits else None)
        self._read_ahead(rows, alive)
        starts = self._starts(rows)
        fed = [r[n:] + g if on else [] for r, n, g, on in zip(rows, starts, guesses, alive, strict=True)]
        kept = [len(guess) + 1 if on else 0 for guess, on in zip(guesses, alive, strict=True)]
        tokens, counts = _flat(fed)
        self._reserve(max(start + count for start, count in zip(starts, counts, strict=True)))
        begin = time.perf_counter()
        best, confidence, logits = self._scored(tokens, counts, starts, kept, want_confidence, want_logits)
        self._count(1, time.perf_counter() - begin)
        self.lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        return Scores(
            _split(best.tolist(), kept),
            _split(confidence.tolist(), kept) if want_confidence else None,
            logits if want_logits else None,
        )

    def keep(self, paths: list[list[int]]) -> None:
        """`Engine.keep`."""
        for r, (tree, kept) in enumerate(zip(self._trees, paths, strict=True)):
            if kept:
                tree.keep(self.cache.kv, r, kept)
                if self.tap is not None:
                    self.tap.keep(r, tree.slots_of(kept), tree.end)
                self.lengths[r] = tree.end + len(kept)

    def draft(self, rows: Rows, limits: list[int], threshold: float) -> Rows:
        """Up to limits[r] greedy tokens after row r, fewer behind one less probable than `threshold`.

        Rows of limit 0 are inactive.
        """
        self._read_ahead(rows, limits)
        starts = self._starts(rows)
        tokens, counts = _flat(_busy(rows, starts, limits))
        self._reserve(max(len(row) + limit for row, limit in zip(rows, limits, strict=True) if limit))
        begin = time.perf_counter()
        how = *self._view, *self._states(starts, max(limits))
        drafted, forwards, _ = self.decoder.call(
            "draft", self.cache.kv, tokens, counts, starts, limits, threshold, *how
        )
        self._count(forwards, time.perf_counter() - begin)
        self.lengths = [
            len(row) + len(new) - 1 if new else have
            for row, new, have in zip(rows, drafted, self.lengths, strict=True)
        ]
        return drafted

    def draft_checked(
        self,
        tiny: CpuEngine,
        rows: Rows,
        limits: list[int],
        *,
        num_draft_tokens: int,
        tiny_threshold: float,
        threshold: float,
        above: CpuEngine | None = None,
    ) -> tuple[Rows, list[int], int, Scores | None]:
        """Rounds of `tiny` drafting and this engine checking, in one call (ML-SpecQD, section 3).

        Returns the committed tokens of every row, (drafted, accepted) of every row and round, concatenated, the
        number of rounds, and what `above` scores of the rows and these tokens.
        """
        self._read_ahead(rows, limits)
        tiny._read_ahead(rows, limits)
        own, small = self._starts(rows), tiny._starts(rows)
        bases = [min(pair) for pair in zip(own, small, strict=True)]
        tokens, counts = _flat(_busy(rows, bases, limits))
        end = max(len(row) + limit for row, limit in zip(rows, limits, strict=True) if limit)
        self._reserve(end)
        tiny._reserve(end)
        begin = time.perf_counter()
        caches = self.cache.kv, own, tiny.decoder.handle, tiny.cache.kv, small
        states = *self._states(own, max(limits)), *tiny._states(small, max(limits))
        options = num_draft_tokens, tiny_threshold, threshold, *self._view, *tiny._view, *states
        settled, checks, self.lengths, tiny.lengths, (rounds, forwards, tiny_forwards), (_, tiny_seconds) = (
            self.decoder.call("draft_checked", *caches, tokens, counts, bases, limits, *options, beside=tiny.decoder)
        )
        tiny._count(tiny_forwards, tiny_seconds)
        self._count(forwards, time.perf_counter() - begin - tiny_seconds)
        failed = any(-1 in row for row in settled)
        return settled, checks, rounds, None if above is None or failed else above.score(rows, settled)

    def read(self, lane: Lane, row: list[int], start: int) -> None:
        """`Engine.read`."""
        if len(row) > self.decoder.positions:
            self.decoder.reserve_positions(len(row))
        begin, count = time.perf_counter(), len(row) - start
        states = ([], []) if lane.states is None else (lane.states.tensors, [0])
        self.decoder.call("score", lane.kv, row[start:], [count], [start], [1], False, False, *self._view, *states)
        self._count(1, time.perf_counter() - begin)

    def _read_ahead(self, rows: Rows, alive: Sequence[int]) -> None:
        """Feed whole pieces of what the cache lacks of the rows that are alive (not 0), but for their last tokens."""
        if sum(map(len, rows)) - sum(self.lengths) <= PIECE:
            return
        self._reserve(max((len(row) for row, on in zip(rows, alive, strict=True) if on), default=0))
        while True:
            starts, counts = self._starts(rows), []
            for row, start, on in zip(rows, starts, alive, strict=True):
                counts.append(min(len(row) - 1 - start, PIECE - sum(counts)) if on else 0)
            if sum(counts) < PIECE:
                return
            tokens, _ = _flat([row[n : n + count] for row, n, count in zip(rows, starts, counts, strict=True)])
            asked = [int(count > 0) for count in counts]  # rows of which nothing is asked are not fed
            begin = time.perf_counter()
            self._scored(tokens, counts, starts, asked, False, False)
            self._count(1, time.perf_counter() - begin)
            self.lengths = [
                start + count if count else have
                for start, count, have in zip(starts, counts, self.lengths, strict=True)
            ]

    def _scored(
        self, tokens: list[int], counts: list[int], starts: list[int], kept: list[int], *wanted: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One call of the compiled decoder; the hidden states of what it feeds go to the tap."""
        how = *wanted, *self._view, *self._states(starts, max(kept))
        call = self.cache.kv, tokens, counts, starts, kept, *how
        if self.tap is None:
            return self.decoder.call("score", *call)
        fed = [count if own else 0 for count, own in zip(counts, kept, strict=True)]
        self.tap.reserve(len(fed), max(start + count for start, count in zip(starts, counts, strict=True)))
        try:
            found = self.decoder.call("score_tapped", *call, self.tap.layers, self.tap.states)
        except BaseException:
            self.tap.cut(starts, fed)
            raise
        self.tap.wrote(starts, fed)
        return found

    @property
    def _view(self) -> tuple[int, int, int]:
        """What every call reads of weights and cache."""
        return (*self.bits, self.draft_window)

    def _count(self, forwards: int, seconds: float) -> None:
        self.forwards += forwards
        self.seconds += seconds


def _flat(rows: Rows) -> tuple[list[int], list[int]]:
    return [token for row in rows for token in row], [len(row) for row in rows]


def _busy(rows: Rows, starts: list[int], limits: list[int]) -> Rows:
    """What has to be fed of the rows that may gain a token."""
    return [row[start:] if limit else [] for row, start, limit in zip(rows, starts, limits, strict=True)]


def _padded(logits: Tensor, counts: list[int], width: int) -> Tensor:
    """Concatenated logits of rows `[sum of counts, vocab]` -> `[batch, width, vocab]`, zeros in between."""
    if all(count == width for count in counts):
        return logits.view(len(counts), width, -1)
    out = logits.new_zeros(len(counts), width, logits.shape[-1])
    for lane, own in zip(out, logits.split(counts), strict=True):
        lane[: len(own)] = own
    return out


def _split(values: list, counts: list[int]) -> list[list]:
    out, first = [], 0
    for count in counts:
        out.append(values[first : first + count])
        first += count
    return out
