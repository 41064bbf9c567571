"""How probable does a model find each token of given rows? In chunks, and what rows have in common is fed once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engines.choose import engine_of
from ..engines.engine import Engine, Guess
from ..engines.modules.attention import ragged_attention_on
from ..engines.rows import require_memory
from ..nn.state import say_once
from ..nn.switch import precision_switch
from ..precision import Bits
from ..speculation.checker import nan_error, roll_back
from ..speculation.drafters.agreement import common_prefix
from .request import check_length, check_model, max_positions, router_of, vocab_size

_FED = 1024  # tokens that one call feeds, over all rows: larger matrix products gain nothing
_LOGITS = 2**25  # entries of the logits of one call: 128 MiB in float32, and as much again for their logarithms
_LEAST_SCORED = 32  # positions of a row that one call scores even where a large vocabulary then takes more than that


@dataclass(frozen=True)
class TokenScores:
    """A model's scores of the scored tokens of one row.

    logprobs: float32 `[n]`, the natural logarithm of the probability of each token given all before it, temperature 1.
    greedy: bool `[n]`, whether the token is the one that greedy decoding would choose.
    """

    logprobs: Tensor
    greedy: Tensor

    @property
    def total(self) -> float:
        """Logarithm of the probability of all scored tokens, summed in float64."""
        return float(self.logprobs.double().sum())


def token_logprobs(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], *, num_scored: Sequence[int] | None = None, **options: Any
) -> list[TokenScores]:
    """Log-probabilities of tokens given those before them, one TokenScores per row; options as `score_rows`."""
    found = dict(score_rows(model, rows, num_scored=num_scored, **options))
    return [found[index] for index in range(len(rows))]


def score_rows(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    *,
    num_scored: Sequence[int] | None = None,
    precision: str | None = None,
    batch_size: int = 8,
    prepare: bool = True,
) -> Iterator[tuple[int, TokenScores]]:
    """Yield (index of a row, its TokenScores) as rows finish, in an order that computes common prefixes once.

    rows: token ids. num_scored: how many tokens at the end of each row are scored; None: all but the first, which has
    nothing before it. precision: the bits of a packed model, a word that `precision_switch(model).at` takes;
    None: as it is set. batch_size: rows in the cache at a time. prepare: as in SpeculationConfig.

    Compiled, the scores depend only on the row, bit for bit, and not on other rows, the batch size or the threads
    (invariant 3). Module by module this holds up to the rounding of the model's dtype. Raises ValueError at once
    for a row that cannot be scored, FloatingPointError for logits that are NaN.
    """
    check_model(model, "the model")
    rows = [list(row) for row in rows]
    counts = [len(row) - 1 for row in rows] if num_scored is None else list(num_scored)
    _check(model, rows, counts, batch_size)
    bits = None if precision is None else precision_switch(model).bits_of(precision)
    tasks = [_Task(index, row, n) for index, (row, n) in enumerate(zip(rows, counts, strict=True))]
    return _Scoring(model, tasks, bits, batch_size, prepare).finished() if tasks else iter(())


@dataclass
class _Task:
    """A row whose last `scored` tokens are scored; `parts`: what is known so far."""

    index: int
    row: list[int]
    scored: int
    parts: list[TokenScores] = field(default_factory=list)

    @property
    def before(self) -> int:
        """Tokens before the first whose logits are wanted: they may come out of the cache."""
        return len(self.row) - self.scored - 1

    @property
    def finished(self) -> bool:
        return sum(len(part.logprobs) for part in self.parts) == self.scored

    def scores(self) -> TokenScores:
        return TokenScores(
            torch.cat([part.logprobs for part in self.parts]), torch.cat([part.greedy for part in self.parts])
        )


class _Scoring:
    """Slots of a cache; each goes through a stretch of the sorted rows, and keeps what the next row begins with."""

    def __init__(self, model: PreTrainedModel, tasks: list[_Task], bits: Bits | None, slots: int, prepare: bool):
        self.model, self.bits, self.prepare = model, bits, prepare
        if router_of(model) is not None:
            say_once(model, f"{type(model).__name__} is routed, and a score reads all planes: a router chooses from a "
                            "prompt, and a text that is scored has none")  # fmt: skip
        self.queues = _deal(sorted(tasks, key=lambda task: task.row), slots)
        self.capacity = max(len(task.row) for task in tasks)

    def finished(self) -> Iterator[tuple[int, TokenScores]]:
        """The loop: every call feeds a chunk of the row that each slot is at."""
        with self._computing(None):
            runner = engine_of(
                self.model, prepare=self.prepare, capacity=self.capacity, num_positions=max_positions(self.model)
            )
            require_memory([runner], len(self.queues), self.model.device)
            runner.start(len(self.queues), self.model.device)
        while self.queues:
            with self._computing(runner):
                self._feed(runner)
                done = [self._advance(runner, slot) for slot, queue in enumerate(self.queues) if queue[0].finished]
                self._leave(runner)
            yield from ((task.index, task.scores()) for task in done)

    def _feed(self, runner: Engine) -> None:
        """One call: the next tokens of every row, and the scores of those whose turn it is."""
        size = vocab_size(self.model)
        most_fed = max(1, _FED // len(self.queues))
        most_scored = max(_LEAST_SCORED, _LOGITS // (size * len(self.queues)))
        rows, guesses, wanted = [], [], []
        for queue, fed in zip(self.queues, runner.lengths, strict=True):
            row, first = queue[0].row, max(queue[0].before, fed)
            end = min(len(row) - 1, fed + most_fed, first + most_scored)
            cut = first + 1 if first < end else end  # where nothing is wanted yet, one position is scored all the same
            rows.append(row[:cut])
            guesses.append(row[cut:end])
            wanted.append(row[first + 1 : end + 1] if first < end else [])
        kept = [len(guess) + 1 for guess in guesses]
        logits, best = _logits(runner, rows, guesses)
        for queue, tokens, own, greedy in zip(self.queues, wanted, logits.split(kept), best.split(kept), strict=True):
            if tokens:
                queue[0].parts.append(_scores(own, greedy, tokens, self.model.dtype))

    def _advance(self, runner: Engine, slot: int) -> _Task:
        """The slot's row is finished: its cache keeps what the next one begins with."""
        queue = self.queues[slot]
        task = queue.popleft()
        if queue:
            keep = list(runner.lengths)
            keep[slot] = min(common_prefix(task.row, queue[0].row), queue[0].before)
            roll_back(runner, keep)
        return task

    def _leave(self, runner: Engine) -> None:
        """Slots without another row are given up."""
        going = [slot for slot, queue in enumerate(self.queues) if queue]
        if 0 < len(going) < len(self.queues):
            runner.select(going)
        self.queues = [self.queues[slot] for slot in going]

    def _computing(self, runner: Engine | None) -> ExitStack:
        """No gradients, the activation bits that were asked for, and attention over ragged rows."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        if self.bits is not None:
            stack.enter_context(precision_switch(self.model).at(self.bits))
        if runner is not None and runner.can.by_module:
            stack.enter_context(ragged_attention_on([self.model]))
        return stack


def _check(model: PreTrainedModel, rows: list[list[int]], counts: list[int], batch_size: int) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}, it must be a positive number of rows")
    if len(counts) != len(rows):
        raise ValueError(f"num_scored has {len(counts)} entries for {len(rows)} rows: give one number per row")
    size = vocab_size(model)
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        try:
            if not 1 <= count < len(row):
                raise ValueError(
                    f"{count} of its {len(row)} tokens are to be scored: at least one, and the first has nothing "
                    "before it"
                )
            if not all(isinstance(token, int) and 0 <= token < size for token in row):
                odd = next(token for token in row if not (isinstance(token, int) and 0 <= token < size))
                raise ValueError(f"token {odd!r} is no integer from 0 to {size - 1}, the model's vocabulary")
            check_length(model, len(row) - 1, 0)
        except ValueError as error:
            raise ValueError(f"row {index} of {len(rows)}: {error}") from error


def _deal(tasks: list[_Task], slots: int) -> list[deque[_Task]]:
    """Stretches of neighbours of about the same number of tokens to feed, one for every slot, none empty."""
    costs = [len(tasks[0].row)]
    for before, task in pairwise(tasks):
        costs.append(len(task.row) - min(common_prefix(before.row, task.row), task.before))
    queues: list[deque[_Task]] = [deque() for _ in range(slots)]
    total, dealt = sum(costs), 0
    for task, cost in zip(tasks, costs, strict=True):
        queues[dealt * slots // total].append(task)
        dealt += cost
    return [queue for queue in queues if queue]


def _logits(runner: Engine, rows: list[list[int]], guesses: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Feed rows and guesses: float32 `[sum of kept, vocab]`, rows concatenated, and int64 `[sum of kept]`, the
    greedy token of each position."""
    if runner.can.greedy_rounds:
        scores = runner.score(rows, guesses, want_logits=True)
        return scores.logits, torch.tensor([token for line in scores.best for token in line])
    width = max(map(len, guesses))
    filled = [guess + [0] * (width - len(guess)) for guess in guesses]
    draft = torch.tensor(filled, device=runner.device, dtype=torch.long).view(len(rows), width)
    logits = runner.feed(rows, Guess(draft, [len(guess) for guess in guesses]))
    flat = torch.cat([lane[: len(guess) + 1] for lane, guess in zip(logits, guesses, strict=True)]).float()
    return flat, flat.argmax(dim=-1)


def _scores(logits: Tensor, greedy: Tensor, tokens: list[int], dtype: torch.dtype) -> TokenScores:
    """logits float32 `[n, vocab]`, greedy int64 `[n]`, and the n tokens that follow."""
    said = torch.tensor(tokens, device=logits.device)
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, said[:, None])[:, 0].cpu()
    if logprobs.isnan().any():
        raise nan_error("the model", dtype)
    return TokenScores(logprobs, (greedy == said).cpu())
