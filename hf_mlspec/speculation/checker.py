"""What does a level accept of a draft, and what does it add? An engine scores, a sampler reads, acceptance decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from ..engines.engine import Engine
from ..engines.trees import END
from .acceptance import accept_greedy, accept_row, accept_tree
from .draft import Draft, Rows
from .sampling import Sampler

# (per row: tokens drafted, tokens accepted, whether it was checked at all)
OnCheck = Callable[[list[int], list[int], list[bool]], None]


@dataclass
class Verdict:
    """What a check decided.

    tokens:   per row the accepted drafted tokens and the one the checker put after them (so at least one; none where
        the row was inactive).
    accepted: per row how many of them were drafted.
    logits, scores: float32 `[batch, k + 1, vocab]` before and after the logits processors; None after a greedy
        check inside the engine that was not asked for them.
    confidence: per row the checker's probabilities of the tokens, where a check inside the engine was asked for them.
    drafted_by: name of the level whose draft it was, set by the loop; None where no level drafted.
    """

    tokens: Rows
    accepted: list[int]
    logits: Tensor | None
    scores: Tensor | None
    confidence: list[list[float]] | None = None
    drafted_by: str | None = None


@dataclass(eq=False)
class Checker:
    """A level that can check drafts: the target of `decode`, and the upper half of every `CheckedDrafter`.

    keep_logits: verdicts carry logits and scores even if the check does not need them.
    on_check: called for every check, also those inside the engine; None: no callback. rows_alone: why it is to check
    no trees, None where it may.
    """

    runner: Engine
    sampler: Sampler
    name: str
    _: KW_ONLY
    keep_logits: bool = True
    on_check: OnCheck | None = field(default=None, init=False)
    rows_alone: str | None = field(default=None, init=False)

    @property
    def in_engine(self) -> bool:
        """Whether the engine itself takes the very tokens this level takes."""
        return runner_is_greedy(self.runner, self.sampler)

    @property
    def settles_in_engine(self) -> bool:
        """Whether a check takes those tokens, and no logits leave the engine."""
        return self.in_engine and not self.keep_logits

    def start(self, batch: int, device: torch.device) -> None:
        self.runner.start(batch, device)
        self.sampler.start(batch)

    def select(self, keep: list[int]) -> None:
        self.runner.select(keep)
        self.sampler.select(keep)

    def admit(self, count: int) -> None:
        """Append `count` rows that nothing is known of yet."""
        self.runner.admit(count)
        self.sampler.admit(count)

    def replace(self, row: int) -> None:
        """Row `row` ended; another one takes its place."""
        self.runner.forget(row)
        self.sampler.replace(row)

    def check(
        self, rows: Rows, draft: Draft, want_confidence: bool = False, alive: list[bool] | None = None
    ) -> Verdict:
        """Score every row with its draft in one forward pass and accept; the cache keeps what is valid.

        alive: False for inactive rows: nothing of theirs is fed or accepted. Raises FloatingPointError if the logits
        behind an accepted token hold NaN, unless the sampler knows how to end a single row; ValueError for a tree that
        the engine does not score, or that is not to be checked.
        """
        alive = alive or [True] * len(rows)
        if draft.branches and (self.rows_alone or not self.runner.can.trees):
            remedy = "which goes through rows alone: leave out tree, or draft rows"
            why = self.rows_alone or f"{why_no_trees(self.runner)}, {remedy}"
            raise ValueError(f"{self.name} is to check a tree and {why}")
        verdict = self._accept(rows, draft, want_confidence, alive)
        if self.on_check is not None:
            self.on_check(draft.deepest, verdict.accepted, alive)
        return verdict

    def _accept(self, rows: Rows, draft: Draft, want_confidence: bool, alive: list[bool]) -> Verdict:
        if self.settles_in_engine:
            return self._check_in_engine(rows, draft, want_confidence, alive)
        if draft.branches:
            return self._accept_trees(rows, draft, alive)
        guess = draft.guess()
        logits = self.runner.feed(rows, guess, alive)
        scores = self.sampler.scores(logits, rows, guess, alive)
        asked = [n if on else -1 for n, on in zip(draft.lengths, alive, strict=True)]
        best = self.sampler.choose(scores, [len(row) for row in rows], asked)
        accepted = accept_greedy(draft.tokens, torch.tensor(draft.lengths, device=best.device), best)
        # The one host synchronisation of the check.
        values = torch.cat([accepted[:, None], best], dim=1).tolist()
        accepted = [line[0] for line in values]
        tokens = [line[1 : 2 + a] if on else [] for line, a, on in zip(values, accepted, alive, strict=True)]
        self._refuse_nan(rows, tokens, logits.dtype, self.sampler.do_sample and self.sampler.reads_tokens)
        roll_back(self.runner, [len(row) + a for row, a in zip(rows, accepted, strict=True)])
        return Verdict(tokens, accepted, logits, scores)

    def _check_in_engine(self, rows: Rows, draft: Draft, want_confidence: bool, alive: list[bool]) -> Verdict:
        """Greedy without processors: the engine hands up its argmax, and no logits leave it."""
        guesses = draft.rows()
        if draft.branches:
            return self._check_trees_in_engine(rows, draft, want_confidence, alive)
        scores = draft.scores or self.runner.score(rows, guesses, want_confidence=want_confidence, alive=alive)
        accepted = [accept_row(guess, best) for guess, best in zip(guesses, scores.best, strict=True)]
        tokens = [best[: a + 1] for best, a in zip(scores.best, accepted, strict=True)]
        self._refuse_nan(rows, tokens, self.runner.dtype)
        roll_back(self.runner, [len(row) + a for row, a in zip(rows, accepted, strict=True)])
        return Verdict(tokens, accepted, None, None, scores.confidence)

    def _accept_trees(self, rows: Rows, draft: Draft, alive: list[bool]) -> Verdict:
        """`_accept` of trees: logits and scores of the verdict are those along the nodes that are kept."""
        guess, ends = draft.guess(), [len(row) for row in rows]
        logits = self.runner.feed(rows, guess, alive)
        scores = self.sampler.scores(logits, rows, guess, alive)
        asked = [n if on else -1 for n, on in zip(draft.lengths, alive, strict=True)]
        best = self.sampler.choose(scores, ends, asked, draft.parents).tolist()
        paths, tokens = self._kept(draft, best, alive)
        self._refuse_nan(rows, tokens, logits.dtype, self.sampler.do_sample and self.sampler.reads_tokens)
        self._keep(rows, paths)
        width = max(map(len, paths)) + 1
        places = torch.tensor([[0, *(n + 1 for n in p), *[0] * (width - 1 - len(p))] for p in paths])
        rest = torch.arange(len(rows))[:, None].to(logits.device), places.to(logits.device)
        return Verdict(tokens, [len(p) for p in paths], logits[rest], scores[rest])

    def _check_trees_in_engine(
        self, rows: Rows, draft: Draft, want_confidence: bool, alive: list[bool]
    ) -> Verdict:
        how = {"want_confidence": want_confidence, "alive": alive, "parents": draft.parents}
        scores = self.runner.score(rows, draft.rows(), **how)
        paths, tokens = self._kept(draft, scores.best, alive)
        self._refuse_nan(rows, tokens, self.runner.dtype)
        self._keep(rows, paths)
        confidence = scores.confidence
        if confidence is not None:
            lines = zip(confidence, paths, alive, strict=True)
            confidence = [[line[n + 1] for n in (END, *p)] if on else [] for line, p, on in lines]
        return Verdict(tokens, [len(p) for p in paths], None, None, confidence)

    def _kept(self, draft: Draft, best: Rows, alive: list[bool]) -> tuple[list[list[int]], Rows]:
        """The nodes of every row's tree that are kept, and its tokens in the verdict."""
        paths, tokens = [], []
        for guesses, parents, own, on in zip(draft.rows(), draft.parents, best, alive, strict=True):
            paths.append(accept_tree(guesses, parents, own) if on else [])
            tokens.append([own[0], *(own[node + 1] for node in paths[-1])] if on else [])
        return paths, tokens

    def _keep(self, rows: Rows, paths: list[list[int]]) -> None:
        """The cache keeps what is valid, in consecutive slots."""
        self.runner.keep(paths)
        roll_back(self.runner, [len(row) + len(p) for row, p in zip(rows, paths, strict=True)])

    def _refuse_nan(self, rows: Rows, tokens: Rows, dtype: torch.dtype, processed: bool = False) -> None:
        for r, line in enumerate(tokens):
            if -1 in line:
                self.sampler.refuse(r, len(rows[r]) + line.index(-1), nan_error(self.name, dtype, processed))


def roll_back(runner: Engine, lengths: list[int]) -> None:
    """No more than `lengths[r]` slots of row r are valid; nothing is copied (invariant 4)."""
    runner.lengths = [min(have, valid) for have, valid in zip(runner.lengths, lengths, strict=True)]


def catch_up(runner: Engine) -> None:
    """A follower's valid slots are its leader's: what the leader checked, it also wrote."""
    if runner.follow is not None:
        runner.lengths = list(runner.follow.lengths)


def why_no_trees(runner: Engine) -> str:
    """What a level does whose engine scores rows alone."""
    if not runner.can.stateful:
        return f"runs on engine {runner.name!r}"
    return "keeps a state" if getattr(runner, "keeps_state", True) else "runs row by row"


def runner_is_greedy(runner: Engine, sampler: Sampler) -> bool:
    """Whether the greedy tokens that the engine itself takes are those the sampler would take."""
    return runner.can.greedy_rounds and sampler.is_greedy and runner.vocab_size <= sampler.vocab_size


def _other_dtypes(dtype: torch.dtype) -> str:
    """Those with more range or more bits than a dtype whose arithmetic may have overflowed."""
    return {torch.float16: "bfloat16 or float32", torch.bfloat16: "float32"}.get(dtype, "float64")


def nan_error(name: str, dtype: torch.dtype, processed: bool = False) -> FloatingPointError:
    """What NaN logits of a level mean; processed: of a row that is sampled, as processors left it."""
    masked = ", or a logits processor left no token" if processed else ""
    return FloatingPointError(
        f"the logits of {name} are NaN: its weights hold NaN or Inf, or its arithmetic overflows in {dtype}{masked}; "
        f"check the checkpoint, or load it in {_other_dtypes(dtype)}"
    )
