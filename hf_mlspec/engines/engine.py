"""What must every engine be able to do, and what may a caller expect of the one it was given?

An engine runs one model over the rows of one call: it feeds tokens, writes keys and values to a cache, and knows how
many slots of each row are valid. There are three: the model's own modules (modules/), one compiled call per step on
the CPU (cpu/), and kernels that only enqueue, on a GPU (cuda/). choose.py decides which one a model gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..formats import CacheFormat
from ..precision import Bits
from .lanes import KeptState, Lane
from .trees import Parents

Rows = list[list[int]]


class Guess(NamedTuple):
    """Tokens guessed behind every row, on the engine's device: int64 `[batch, k]`, lengths[r] of row r valid.

    parents: of every row's guesses where they are trees (trees.py); None: each is behind the one before it.
    """

    tokens: Tensor
    lengths: list[int]
    parents: list[Parents] | None = None

    def of_row(self, r: int) -> Guess:
        """The guesses of one row, no padding."""
        n = self.lengths[r]
        return Guess(self.tokens[r : r + 1, :n], [n], None if self.parents is None else [self.parents[r]])


@dataclass(frozen=True)
class Capabilities:
    """What callers may ask of an engine.

    by_module: it runs the model's modules, so the model's attention has to be switched while it runs
        (modules/attention.py). greedy_rounds: it has `score`, `draft` and `draft_checked`, whole greedy rounds in one
        call. capturable: whole rounds of a chain can be recorded as one CUDA graph. bit_exact: the bits of a token's
        logits depend only on the tokens before it (invariant 3), so cache slots can be reused for a row with the same
        beginning, unless it is stateful. draft_window: it can read a part of the cache only. stateful: what it keeps
        of a row is no lane of keys and values alone, so that no user's cache goes in or out. tapped:
        it writes hidden states to a `Tap`. trees: it scores guesses that are trees, and has `keep`; a head grows them.
    """

    by_module: bool = False
    greedy_rounds: bool = False
    capturable: bool = False
    bit_exact: bool = False
    draft_window: bool = False
    stateful: bool = False
    tapped: bool = False
    trees: bool = False


@dataclass
class Scores:
    """An engine's scores of the last kept positions of every row.

    best: per row the greedy successor of each position, -1 where the logits hold NaN. confidence: per row their
    probabilities, None unless asked for. logits: float32 `[sum of kept, vocab]`, rows concatenated, or None.
    """

    best: Rows
    confidence: list[list[float]] | None
    logits: Tensor | None


class Engine(Protocol):
    """A model over the rows of a call.

    name: "modules", "cpu" or "cuda". dtype: of its logits. vocab_size: entries of its logits. max_positions: tokens of
    a row that it can attend to, None where nothing bounds them. lengths: per row, the valid slots of the cache; a
    rollback lowers them and does nothing else (invariant 4).
    follow: the engine whose cache this one writes into, or None for a cache of its own (invariant 4). bits: weight and
    activation bits of its packed weights, OWN_BITS: those of the model's switch; set before it starts. draft_window:
    0, or how many of the last slots a token sees, besides the first ones of its row (ops.ragged_attention). cache:
    keys and values, None before `start`. cache_bytes: those it holds itself. cache_format: of a cache of its own, None
    for keys and values as the model computes them; set before it starts. kept_in: of the cache it reads, its own or
    its leader's. tap: where the hidden states of fed tokens go (engines/tap.py), with `can.tapped`; None: nowhere.
    forwards, seconds: forward passes so far and their time on the host.
    """

    name: str
    can: Capabilities
    model: nn.Module
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_positions: int | None
    lengths: list[int]
    follow: Engine | None
    bits: Bits
    draft_window: int
    cache: Any
    cache_bytes: int
    cache_format: CacheFormat | None
    kept_in: CacheFormat | None
    tap: Any
    forwards: int
    seconds: float

    def keep_in(self, kept: CacheFormat) -> None:
        """Have a cache of its own in this format, before it starts; ValueError for one that the engine cannot read."""

    def start(self, batch: int, device: torch.device) -> None:
        """An empty cache for `batch` rows; a follower takes its leader's, which must have started."""

    def select(self, keep: list[int]) -> None:
        """Go on with these rows only, in this order."""

    def admit(self, count: int) -> None:
        """Append `count` rows that hold nothing yet."""

    def forget(self, row: int) -> None:
        """Give the slots of `row` to a new sequence."""

    def shrink(self, slots: int) -> None:
        """Give memory back where rows of `slots` slots, at least what each holds, need half of what there is."""

    def feed(self, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None) -> Tensor:
        """Score what the cache lacks of every row, followed by its guess: logits `[batch, k + 1, vocab]`.

        alive: False for inactive rows. Position j follows row r and its first j guessed tokens (beyond the length of
        its guess, and of inactive rows: meaningless). The cache then holds all of it; of a tree, whose position j
        follows node j - 1, the row, and what `keep` keeps.
        """

    def step(self, tokens: Tensor, counts: list[int], first: list[int], kept: int) -> Tensor:
        """One forward pass over tokens `[batch, q]`, counts[r] of them valid; logits of `kept` from first[r] on."""

    # With `can.trees` only:

    def keep(self, paths: list[list[int]]) -> None:
        """Of the trees that were scored last, these nodes of each row stay in the cache: a path from its end on."""

    # With `can.bit_exact` only:

    def lane(self, tokens: int) -> Lane:
        """Memory for a row that is no row of the cache yet."""

    def read(self, lane: Lane, row: list[int], start: int) -> None:
        """Write keys and values of tokens `start` .. of a row into such memory, which holds those before them."""

    def hold(self, row: int, pieces: Iterable[Tensor], count: int, state: KeptState | None = None) -> None:
        """Copy keys and values of the first `count` tokens of a row, in pieces, into its slots of the cache, and the
        state behind them, where layers keep one."""

    # With `can.greedy_rounds` only:

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

        parents: of guesses that are trees, with `can.trees`; see `feed`."""

    def draft(self, rows: Rows, limits: list[int], threshold: float) -> Rows:
        """Up to limits[r] greedy tokens after row r, fewer behind one less probable than `threshold`."""

    def draft_checked(
        self,
        tiny: Engine,
        rows: Rows,
        limits: list[int],
        *,
        num_draft_tokens: int,
        tiny_threshold: float,
        threshold: float,
        above: Engine | None = None,
    ) -> tuple[Rows, list[int], int, Scores | None]:
        """Rounds of `tiny` drafting and this engine checking: the tokens committed for every row, (drafted, accepted)
        of every row and round, concatenated, the number of rounds, and what `above`, the engine of the next level
        up, scores of the rows and these tokens (None where there is none, or where logits were NaN)."""
