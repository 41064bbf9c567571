"""How does a trained head score tokens, over hidden states that the engines above it wrote, in a cache of its own?

Token i + 1 of a row stands beside the hidden states of token i: a pair. What a head knows of a row are the pairs whose
states its tap holds; it goes on alone from what it computed itself, and computes those pairs again once the level
above has checked them.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from ..nn.head import EagleHead
from ..nn.head_nodes import Column, HeadNodes, Places
from ..precision import OWN_BITS
from .engine import Capabilities, Guess, Rows
from .rows import CachedRows, DecoderCache, row_bytes, up_to_growth
from .tap import Tap
from .trees import END, Parents, path

_CHUNK = 1024  # pairs of a row in one pass: what a prompt needs between two layers stays small
_FIRST_POSITIONS = 2048


def columns_of(parents: list[Parents], asked: list[list[int]], ends: list[int]) -> list[Column]:
    """The i-th of the nodes that are asked of every row, and what is before it, where row r ends in slot ends[r]."""
    columns = []
    for place in range(max(map(len, asked))):
        column = Column(list(ends), Places(), Places())
        for r, (tree, own, end) in enumerate(zip(parents, asked, ends, strict=True)):
            if place < len(own):
                *before, node = path(tree, own[place])
                column.starts[r] = end + len(before)
                column.own.add(r, column.starts[r], node)
                for depth, earlier in enumerate(before):
                    column.before.add(r, end + depth, earlier)
        columns.append(column)
    return columns


class HeadEngine(CachedRows):
    """A head over its rows. See `Engine`.

    lengths: tokens of each row that stand in pairs of its cache, 0: none. tap: where its target's hidden states lie.
    """

    name = "head"
    can = Capabilities()

    def __init__(self, model: EagleHead, tap: Tap, capacity: int = 0):
        self.model, self.tap, self.capacity = model, tap, capacity
        self.follow, self.bits, self.cache_format = None, OWN_BITS, None
        self.device, self.dtype, self.vocab_size = model.device, model.dtype, model.shape.vocab
        self.max_positions: int | None = None
        self.cache: Any = None  # a DecoderCache, or what `_new_cache` makes
        self.lengths: list[int] = []
        self.forwards, self.seconds = 0, 0.0
        self._rope: tuple[Tensor, Tensor] | None = None
        self._nodes: HeadNodes | None = None  # of the trees behind the rows that were fed last
        self.can = Capabilities(trees=type(model) is EagleHead and self.device.type == "cpu")

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values, and of the hidden states that wait for it."""
        shape = self.model.shape
        row = row_bytes(shape.head_dim, self.dtype, self.cache_format)
        return (
            shape.num_layers * 2 * shape.kv_heads * row + len(shape.taps) * shape.target_hidden * self.dtype.itemsize
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of its keys and values and of the tap."""
        return 0 if self.cache is None else self.cache.nbytes + self.tap.nbytes

    def start(self, batch: int, device: torch.device) -> None:
        """An empty cache for `batch` rows, of which nothing is known."""
        self.tap.start(batch, self.capacity, self.device)
        self.cache = self._new_cache(batch)
        self.lengths, self._sure, self._base = [0] * batch, [0] * batch, [0] * batch
        self.forwards, self.seconds = 0, 0.0
        self._last: Tensor | None = None

    def select(self, keep: list[int]) -> None:
        """Go on with these rows only."""
        super().select(keep)
        self.tap.select(keep)
        self._sure, self._base = ([line[r] for r in keep] for line in (self._sure, self._base))

    def admit(self, count: int) -> None:
        """Append `count` rows of which nothing is known."""
        super().admit(count)
        self.tap.admit(count)
        self._sure, self._base = self._sure + [0] * count, self._base + [0] * count

    def forget(self, row: int) -> None:
        """Another row takes the place of this one."""
        super().forget(row)
        self.tap.forget(row)
        self._sure[row] = self._base[row] = 0

    def knows(self, row: int, tokens: int) -> bool:
        """Whether the hidden states of all but the last of so many tokens are there, or of the last ones of them."""
        return self.tap.end[row] >= tokens - 1 > self.tap.first[row]

    def feed(self, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None) -> Tensor:
        """Read the pairs that the cache lacks of every row that is alive: logits `[batch, 1, vocab]` behind its end.

        ValueError for a guess, which a head cannot check, and for rows whose hidden states are not known.
        """
        if guess is not None:
            raise ValueError(
                f"head {self.model.name} checks no drafts: it stands below all other levels"
            )
        begin = time.perf_counter()
        self._feed(rows, alive or [True] * len(rows))
        logits = self.model.logits(self._last)[:, None]
        self.seconds += time.perf_counter() - begin
        return logits

    def _feed(self, rows: Rows, alive: list[bool]) -> None:
        """Read what the cache lacks of the rows that are alive; `_last` is what their last pairs give."""
        starts = [
            self._first_pair(r, len(row)) if on else max(self.lengths[r] - 1, self._base[r])  # behind what it holds
            for r, (row, on) in enumerate(zip(rows, alive, strict=True))
        ]
        counts = [len(row) - 1 - start if on else 0 for row, start, on in zip(rows, starts, alive, strict=True)]
        slots = [start - base for start, base in zip(starts, self._base, strict=True)]
        self._reserve(max(slot + count for slot, count in zip(slots, counts, strict=True)) + 1)
        out = None
        for done in range(0, max(counts), _CHUNK):
            out = self._read(rows, starts, counts, done, out)
        self._last, self._nodes = out, None
        for r, on in enumerate(alive):
            if on:
                self._sure[r] = starts[r] + counts[r]
                self.lengths[r] = self._sure[r] + 1

    def step(self, tokens: Tensor, counts: list[int], first: list[int], kept: int) -> Tensor:
        """One more pair of every row whose count is 1: its token beside what the last pass gave. As `Engine.step`."""
        begin = time.perf_counter()
        self._go_on(tokens.to(self.device), counts)
        logits = self.model.logits(self._last)[:, None]
        self.seconds += time.perf_counter() - begin
        return logits

    def _go_on(self, tokens: Tensor, counts: list[int] | list[bool]) -> None:
        slots = [max(have - 1 - base, 0) for have, base in zip(self.lengths, self._base, strict=True)]
        self._reserve(max(slots) + 1)
        self._last = self._pass(tokens, self._last[:, None], slots)[:, 0]
        self.lengths = [have + int(count) for have, count in zip(self.lengths, counts, strict=True)]

    def grow(self, tokens: Rows, parents: list[Parents], asked: list[list[int]]) -> Tensor:
        """Read nodes asked[r] of the tree behind row r, all of one depth, each once: logits `[sum of asked, vocab]`
        behind them, row by row.

        tokens, parents: of whole trees. `feed` has read the rows, and earlier calls the nodes that these are behind.
        A node has the bits that it would have in a row of its own.
        """
        begin = time.perf_counter()
        if self._nodes is None:
            self._nodes = HeadNodes(self.cache.kv[:, :, : len(tokens)], self._last)
        nodes, ends = self._nodes, [max(n - 1 - base, 0) for n, base in zip(self.lengths, self._base, strict=True)]
        nodes.reserve(max(map(len, tokens)))
        columns = columns_of(parents, asked, ends)
        self._reserve(max(end + len(tree) for end, tree in zip(ends, tokens, strict=True)) + 1)
        fed, behind = torch.zeros(len(tokens), len(columns), dtype=torch.long), self._last[:, None]
        behind = behind.repeat(1, len(columns), 1)
        for place, column in enumerate(columns):
            for r, node in zip(column.own.rows, column.own.nodes, strict=True):
                fed[r, place] = tokens[r][node]
                if parents[r][node] != END:
                    behind[r, place] = nodes.hidden[r, parents[r][node]]
        found = self._pass(fed, behind, ends, nodes, columns)
        for r, own in enumerate(asked):
            nodes.hidden[r, own] = found[r, : len(own)]
        logits = self.model.logits(torch.cat([found[r, : len(own)] for r, own in enumerate(asked)]))
        self.seconds += time.perf_counter() - begin
        return logits

    def draft(self, rows: Rows, limits: list[int], threshold: float) -> Rows:
        """Up to limits[r] greedy tokens after row r, fewer behind one less probable than `threshold`; -1: NaN.

        Rows of limit 0 are inactive.
        """
        drafted: Rows = [[] for _ in rows]
        alive = [limit > 0 for limit in limits]
        begin = time.perf_counter()
        self._feed(rows, alive)
        while True:
            tokens, sure = self._best(threshold)
            for r, on in enumerate(alive):
                if on:
                    drafted[r].append(tokens[r])
                    alive[r] = sure[r] and tokens[r] >= 0 and len(drafted[r]) < limits[r]
            if not any(alive):
                break
            self._go_on(torch.tensor([[max(token, 0)] for token in tokens], device=self.device), alive)
        self.seconds += time.perf_counter() - begin
        return drafted

    def _best(self, threshold: float) -> tuple[list[int], list[bool]]:
        """Behind every row the likeliest token, -1 where logits hold NaN, and whether it is as probable as that."""
        logits = self.model.own_logits(self._last)
        top, best = logits.max(-1)
        tokens = (best if self.model.targets is None else self.model.targets[best]).masked_fill(top.isnan(), -1)
        if threshold <= 0:
            return tokens.tolist(), [True] * len(tokens)
        sure = (top - logits.logsumexp(-1)).exp() >= threshold
        return tokens.tolist(), sure.tolist()

    def trial(self) -> HeadEngine:
        """Another engine over the same head that knows hidden states, zeros, of whatever it is fed: to time it."""
        return self._like(_Trial)

    def _like(self, kind: type[HeadEngine]) -> HeadEngine:
        """An engine of this class over the same head, with a tap of its own."""
        shape = self.model.shape
        made = kind(self.model, Tap(shape.taps, shape.target_hidden, self.tap.dtype), self.capacity)
        made.cache_format = self.cache_format
        return made

    def _new_cache(self, batch: int) -> Any:
        return DecoderCache.new(self.model, batch, max(self.capacity, 1), self.cache_format)

    def _first_pair(self, row: int, tokens: int) -> int:
        """The first pair of a row to read: where hidden states are new, or pairs were not made of any; at least the
        last one, whose result is asked for."""
        if not self.knows(row, tokens):
            raise ValueError(
                f"hidden states of row {row} are known of {self.tap.end[row]} tokens, not of {tokens - 1}"
            )
        first = self.tap.first[row]
        done = min(self.lengths[row] - 1, self._sure[row], self.tap.read(row), tokens - 2)
        if first != self._base[row] or done < first:
            self._base[row], done = first, first
        return done

    def _read(self, rows: Rows, starts: list[int], counts: list[int], done: int, out: Tensor | None) -> Tensor:
        """Pairs `done` .. of what each row lacks; what its last pair gives, `[batch, hidden]`, as far as it is in."""
        width = min(max(counts) - done, _CHUNK)
        begins = [start + min(done, count) for start, count in zip(starts, counts, strict=True)]
        lines = [row[n + 1 : n + 1 + width] for row, n in zip(rows, begins, strict=True)]
        tokens = torch.tensor([line + [0] * (width - len(line)) for line in lines], device=self.device)
        places = torch.tensor(begins)[:, None] + torch.arange(width)
        places = places.clamp(max=self.tap.states.shape[1] - 1).to(self.device)
        states = self.tap.states[torch.arange(len(rows), device=self.device)[:, None], places]
        asked = torch.arange(width) < torch.tensor(counts)[:, None] - done
        states = states.masked_fill(~asked.to(self.device)[..., None, None], 0)  # nobody wrote the others
        slots = [max(n - base, 0) for n, base in zip(begins, self._base, strict=True)]
        self._reserve(max(slots) + width)
        found = self._pass(tokens, self.model.join(states), slots)
        ends = [count - done - 1 for count in counts]
        last = found[torch.arange(len(rows)), torch.tensor([min(max(end, 0), width - 1) for end in ends])]
        here = torch.tensor([0 <= end < width for end in ends], device=self.device)[:, None]
        return last if out is None else torch.where(here, last, out)

    def _pass(self, tokens: Tensor, hidden: Tensor, slots: list[int], *trees: object) -> Tensor:
        self.forwards += 1
        return self.model(tokens, hidden, self.cache.kv[:, :, : len(slots)], slots, self._rope, *trees)

    def _reserve(self, slots: int) -> None:
        self.cache.reserve(slots)
        have = 0 if self._rope is None else len(self._rope[0])
        if slots > have:
            positions = max(_FIRST_POSITIONS, up_to_growth(slots + have // 2))
            # Pair i stands at the position of its token, i + 1 (the speculators package trains heads so).
            self._rope = tuple(table[1:].contiguous() for table in self.model.rope(positions + 1))


class TimedRow:
    """Before an engine of a head: it times passes as `speculation.costs.measure` asks for them, of one row of which
    all is known, and a guess."""

    def feed(self, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None) -> Tensor:
        behind = guess.tokens.tolist() if guess is not None else [[] for _ in rows]
        rows = [row + more + [0] for row, more in zip(rows, behind, strict=True)]
        longest = max(map(len, rows))
        self.tap.reserve(len(rows), longest)
        held = self.lengths[0]
        self.tap.first, self.tap.end, self.tap.fresh = [0], [longest - 1], [held]
        self._sure, self._base, self.lengths = [held], [0], [held + 1]
        self._reserve(longest)
        return super().feed(rows)


class _Trial(TimedRow, HeadEngine):
    """See `TimedRow`."""
