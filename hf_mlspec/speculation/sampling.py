"""How do logits become scores, and scores tokens? The same code for every level.

A row that samples takes, at each position, the token of the largest score + Gumbel noise: a draw from the softmax of
the scores (Gumbel 1954). The noise is a pure function of seed, row, position and token (ops/choose.py), and every
level of a chain uses it: a draft is then a guess at what the target will choose with the same noise, and a check
accepts the tokens it would have chosen itself. So the target's tokens follow its own distribution exactly, and depend
only on its scores and the noise: not on the levels below, on how many tokens they draft, or on the number of rounds
("drafter-invariant" speculative decoding, Daliri, Musco and Suresh 2024, arXiv 2408.07978; the price is a somewhat
lower acceptance than with independent draws, at worst (1 - d) / (1 + d) for distributions d apart in total variation,
where those accept 1 - d).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..engines.engine import Guess, Rows
from ..engines.trees import END, Parents, children, depths, path

# (prefixes, scores [n, vocab], row numbers of the original batch) -> scores [n, vocab]
Process = Callable[[Rows, Tensor, list[int]], Tensor]


@dataclass(eq=False)
class Sampler:
    """Turns the logits of a level into scores and tokens.

    vocab_size: entries of the checker's vocabulary; shorter logits are padded with -inf, longer ones cut (models of
        one family differ by padding rows).
    seed:       of the noise, the same for all levels of a call; None: the largest score is taken.
    warp:       processors that look at the scores alone (temperature, top-k, top-p ...); any leading shape.
    process:    processors that also look at the tokens before a position, or None.
    prompt_lengths: tokens of each row's prompt; processors get the prefixes of equally many generated tokens together.
    ends:       end-of-sequence tokens: processors are not asked what follows one.
    row_ids:    numbers of the rows in the original batch, and of their noise; `select` keeps them in step.
    """

    vocab_size: int
    _: KW_ONLY
    seed: int | None = None
    warp: Callable[[Tensor], Tensor] | None = None
    process: Process | None = None
    prompt_lengths: list[int] = field(default_factory=list)
    ends: frozenset[int] = frozenset()
    row_ids: list[int] = field(default_factory=list, init=False)
    _joined: int = field(default=0, init=False)  # rows there ever were

    @property
    def do_sample(self) -> bool:
        """Whether a row is drawn from the probabilities."""
        return self.seed is not None

    @property
    def is_greedy(self) -> bool:
        """Whether the token taken is the argmax of the logits as they come: then a compiled step may take it."""
        return not self.do_sample and self.warp is None and self.process is None

    @property
    def reads_tokens(self) -> bool:
        """Whether scores depend on the tokens before a position."""
        return self.process is not None

    def start(self, batch: int) -> None:
        self.row_ids, self._joined = list(range(batch)), batch

    def select(self, keep: list[int]) -> None:
        self.row_ids = [self.row_ids[r] for r in keep]

    def join(self, other: Sampler) -> None:
        """The rows are those of another level of the chain, with the same noise."""
        self.row_ids, self._joined = list(other.row_ids), other._joined

    def admit(self, count: int) -> None:
        """Append rows; where processors look at tokens, `RowSampler` knows what a row that joins was asked for."""
        self.row_ids += [self._joined + i for i in range(count)]
        self._joined += count

    def replace(self, row: int) -> None:
        """Row `row` is another one from now on, with noise of its own; else all rows are treated alike here."""
        self.row_ids[row] = self._joined
        self._joined += 1

    def refuse(self, row: int, position: int, error: Exception) -> None:
        """Token number `position` of row `row` cannot be taken; here that ends the whole call."""
        raise error

    def fit(self, logits: Tensor) -> Tensor:
        """Float32 logits over the checker's vocabulary."""
        logits = logits.float()
        lacking = self.vocab_size - logits.shape[-1]
        if lacking > 0:
            return F.pad(logits, (0, lacking), value=float("-inf"))
        return logits[..., : self.vocab_size]

    def scores(
        self, logits: Tensor, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None
    ) -> Tensor:
        """Logits `[batch, k + 1, vocab]` -> processed float32 scores; position j follows row r and j guessed tokens.

        What lies beyond the length of a guess has no meaning, nor has a row not alive.
        """
        scores = self.fit(logits)
        if self.process is not None:
            nothing = [[]] * len(rows), [0] * len(rows)
            guesses, lengths = (guess.tokens.tolist(), guess.lengths) if guess else nothing
            asked = lengths if alive is None else [n if on else -1 for n, on in zip(lengths, alive, strict=True)]
            if guess is None or guess.parents is None:
                scores = self._process_by_length(scores, rows, guesses, asked)
            else:
                scores = self._process_trees(scores, rows, guesses, guess.parents, asked)
        return self.warp(scores) if self.warp is not None else scores

    def choose(
        self, scores: Tensor, firsts: list[int], lengths: list[int], parents: list[Parents] | None = None
    ) -> Tensor:
        """The tokens of processed scores `[batch, k + 1, vocab]`: int64 `[batch, k + 1]`, -1 where there is none.

        Position j of row r is for token number firsts[r] + j, of a tree with these parents for firsts[r] + the depth
        of node j - 1; positions beyond lengths[r] (-1: all) have no meaning.
        There is none where scores hold NaN and, of a row that samples, where all are -inf.
        """
        if self.seed is None:
            top, best = scores.max(dim=-1)
            return best.masked_fill(top.isnan(), -1)
        tokens, confidence = drawn(scores, self.seed, self.row_ids, firsts, parents)
        return tokens.masked_fill(confidence.isnan(), -1)

    def _process_by_length(self, scores: Tensor, rows: Rows, guesses: Rows, lengths: list[int]) -> Tensor:
        """Processors take equally long prefixes: group the positions of all rows by the number of generated tokens.

        They are asked about prefixes they would let happen, as in decoding token by token: nothing behind a guess they
        forbid or behind the end of a sequence, which no check can reach (a constraint may have no answer there).
        """
        groups: dict[int, list[tuple[int, int]]] = {}
        for r, row in enumerate(rows):
            generated = len(row) - self.prompt_lengths[self.row_ids[r]]
            if self.ends.isdisjoint(row[len(row) - generated :]):
                for j in range(lengths[r] + 1):
                    groups.setdefault(generated + j, []).append((r, j))
        scores, reach = scores.clone(), list(lengths)
        for generated in sorted(groups):
            places = [(r, j) for r, j in groups[generated] if j <= reach[r]]
            if not places:
                continue
            r_index, j_index = (list(index) for index in zip(*places, strict=True))
            prefixes = [rows[r] + guesses[r][:j] for r, j in places]
            processed = self.process(prefixes, scores[r_index, j_index], [self.row_ids[r] for r in r_index])
            scores[r_index, j_index] = processed
            behind = [i for i, (r, j) in enumerate(places) if j < reach[r]]
            if not behind:
                continue
            guess = [guesses[r][j] for r, j in (places[i] for i in behind)]
            for i, token, never in zip(behind, guess, _forbidden(processed, behind, guess), strict=True):
                if never or token in self.ends:
                    r, j = places[i]
                    reach[r] = min(reach[r], j)
        return scores

    def _process_trees(
        self, scores: Tensor, rows: Rows, guesses: Rows, parents: list[Parents], lengths: list[int]
    ) -> Tensor:
        """`_process_by_length` of positions that are nodes of trees: nothing behind a forbidden node is asked. A row
        is in a call of the processors once, as in decoding token by token."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for r, row in enumerate(rows):
            generated = len(row) - self.prompt_lengths[self.row_ids[r]]
            if lengths[r] >= 0 and self.ends.isdisjoint(row[len(row) - generated :]):
                for node, depth in enumerate([0, *depths(parents[r])], END):
                    groups.setdefault(generated + depth, []).append((r, node))
        scores, below = scores.clone(), [children(own) for own in parents]
        reached = {(r, END) for r in range(len(rows))}
        for generated in sorted(groups):
            places = [place for place in groups[generated] if place in reached]
            if not places:
                continue
            r_index, j_index = [r for r, _ in places], [node + 1 for _, node in places]
            prefixes = [rows[r] + [guesses[r][n] for n in path(parents[r], node)] for r, node in places]
            processed = scores[r_index, j_index]
            for some in _once_each(r_index):
                numbers = [self.row_ids[r_index[i]] for i in some]
                processed[some] = self.process([prefixes[i] for i in some], processed[some], numbers)
            scores[r_index, j_index] = processed
            behind = [(i, r, child) for i, (r, node) in enumerate(places) for child in below[r].get(node, ())]
            if not behind:
                continue
            guess = [guesses[r][child] for _, r, child in behind]
            forbidden = _forbidden(processed, [i for i, _, _ in behind], guess)
            for (_, r, child), token, never in zip(behind, guess, forbidden, strict=True):
                if not never and token not in self.ends:
                    reached.add((r, child))
        return scores

    def probabilities(self, scores: Tensor) -> Tensor:
        """Softmax over the vocabulary, float32."""
        return torch.softmax(scores, dim=-1)

    def draw(self, scores: Tensor, positions: list[int], alive: list[bool] | None = None) -> tuple[Tensor, Tensor]:
        """One guess per row from scores `[batch, vocab]`; positions: its number in each row.

        Returns tokens int64 `[batch]`, those that `choose` would take of these scores and 0 where there is none, and
        the confidence `[batch]`: the probability of each.
        """
        if self.seed is None:
            confidence, tokens = self.probabilities(scores).max(dim=-1)
            return tokens, confidence
        tokens, confidence = drawn(scores[:, None], self.seed, self.row_ids, positions)
        return tokens[:, 0].clamp(min=0), confidence[:, 0]


def drawn(
    scores: Tensor, seed: int, streams: list[int], firsts: list[int], parents: list[Parents] | None = None
) -> tuple[Tensor, Tensor]:
    """The tokens of scores float32 `[batch, n, vocab]` plus noise, int64 `[batch, n]`, and their probabilities.

    streams: the number of each row's noise; firsts: that of its first position, from which the others count on, or
    their depths in trees with these parents. NaN among the scores gives token -1;
    there, and where all are -inf, the probability is NaN.
    """
    batch, count, vocab = scores.shape
    places = torch.tensor([streams, firsts], dtype=torch.int32)[:, :, None].repeat(1, 1, count)
    places[1] += torch.arange(count, dtype=torch.int32) if parents is None else _offsets(parents, count)
    places = places.to(scores.device).flatten(1)
    key = torch.tensor([seed if seed < 1 << 63 else seed - (1 << 64)], device=scores.device)
    tokens, confidence = ops.choose_rows(scores.reshape(-1, vocab), 0.0, key, places[0], places[1])
    return tokens.long().view(batch, count), confidence.view(batch, count)


def _once_each(rows: list[int]) -> list[list[int]]:
    """The places of a list in groups in which no entry comes twice."""
    groups: list[list[int]] = []
    seen: dict[int, int] = {}
    for place, row in enumerate(rows):
        number = seen[row] = seen.get(row, -1) + 1
        groups += [[]] if number == len(groups) else []
        groups[number].append(place)
    return groups


def _offsets(parents: list[Parents], count: int) -> Tensor:
    """int32 `[batch, count]`: of the positions of every tree how many guesses are before them, 0 of padding."""
    lines = [[0, *depths(own)] for own in parents]
    return torch.tensor([line + [0] * (count - len(line)) for line in lines], dtype=torch.int32)


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """From torch's generator, so that torch.manual_seed repeats a call; or from another one."""
    return int(torch.randint(1 << 62, (1,), generator=generator))


def _forbidden(scores: Tensor, lines: list[int], guess: list[int]) -> list[bool]:
    """Which guesses, one for each of some lines of `[n, vocab]`, have a score of -inf; where all tokens of a line
    have, the first of them is taken."""
    never = scores[lines, guess].isneginf().tolist()
    if any(never):
        taken = scores[lines].argmax(dim=-1).tolist()
        never = [no and token != best for no, token, best in zip(never, guess, taken, strict=True)]
    return never
