"""What does a chain of known probabilities write, exactly? Levels that are tables instead of models."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from hf_mlspec.engines.engine import Capabilities, Guess
from hf_mlspec.speculation.checker import Checker, Verdict
from hf_mlspec.speculation.draft import Draft, Drafter, Rows
from hf_mlspec.speculation.drafters.checked import CheckedDrafter
from hf_mlspec.speculation.drafters.model import ModelDrafter
from hf_mlspec.speculation.loop import decode
from hf_mlspec.speculation.sampling import Sampler
from hf_mlspec.speculation.stats import LevelStats

VOCAB = 4
SEED = 11  # of the noise that all levels share
CPU = torch.device("cpu")


def table(seed: int, *, sharpness: float = 1.0) -> Tensor:
    """Probabilities float32 `[last token, next token]`, a distribution of its own per seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(sharpness * torch.randn(VOCAB, VOCAB, generator=generator), dim=-1)


class TableRunner:
    """Stands in for an engine: the logits after a token are a row of a table; caches hold nothing but lengths."""

    name, can, follow = "modules", Capabilities(by_module=True, trees=True), None

    def __init__(self, probs: Tensor):
        self.logits, self.model = probs.log(), self
        self.device, self.lengths, self.forwards, self.seconds = CPU, [], 0, 0.0
        self.cache: dict | None = None

    def start(self, batch: int, device: torch.device) -> None:
        self.lengths, self.cache = [0] * batch, {}

    def select(self, keep: list[int]) -> None:
        self.lengths = [self.lengths[r] for r in keep]

    def admit(self, count: int) -> None:
        self.lengths += [0] * count

    def forget(self, row: int) -> None:
        self.lengths[row] = 0

    def feed(self, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None) -> Tensor:
        last = torch.tensor([row[-1] for row in rows])[:, None]
        lengths = guess.lengths if guess else [0] * len(rows)
        fed = zip(rows, lengths, self.lengths, alive or [True] * len(rows), strict=True)
        self.lengths = [len(row) + n if on else have for row, n, have, on in fed]
        return self.step(torch.cat([last, guess.tokens], dim=1) if guess else last)

    def keep(self, paths: list[list[int]]) -> None: ...

    def step(self, tokens: Tensor, *shape) -> Tensor:
        self.forwards += 1
        return self.logits[tokens]


class PointMasses:
    """A drafter that guesses without drawing: always `successor[last token]`."""

    def __init__(self, successor: list[int]):
        self.successor = successor
        self.name, self.stats = "point masses", LevelStats("point masses")

    def start(self, batch: int, device: torch.device) -> None: ...
    def rollback(self, lengths: list[int]) -> None: ...
    def select(self, keep: list[int]) -> None: ...
    def admit(self, count: int) -> None: ...
    def replace(self, row: int) -> None: ...

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        guesses = []
        for row, limit in zip(rows, limits, strict=True):
            guess = [row[-1]]
            for _ in range(limit):
                guess.append(self.successor[guess[-1]])
            guesses.append(guess[1:])
        return Draft.from_lists(guesses)


def checker(probs: Tensor, seed: int = SEED) -> Checker:
    return Checker(TableRunner(probs), Sampler(VOCAB, seed=seed), "table")


def drafter(probs: Tensor, threshold: float = 0.0, seed: int = SEED) -> ModelDrafter:
    return ModelDrafter(TableRunner(probs), Sampler(VOCAB, seed=seed), "table", threshold=threshold)


def chain(middle: list[Tensor], last: Drafter, *, threshold: float = 0.0, num_draft_tokens: int = 3) -> Drafter:
    """`last`, checked by the tables of `middle` from the innermost to the outermost."""
    for probs in middle:
        last = CheckedDrafter(checker(probs), last, num_draft_tokens=num_draft_tokens, threshold=threshold)
    return last


def write(target: Tensor | Checker, below: Drafter | None, *, rows: int, tokens: int) -> Tensor:
    """`rows` independent sequences of `tokens` tokens after token 0: int64 `[rows, tokens]`."""
    written = [[0] for _ in range(rows)]

    def keep_all(number: int, row: list[int], settled: list[int]) -> tuple[int, bool]:
        return len(settled), False

    def emit(numbers: list[int], kept: Rows, verdict: Verdict) -> None: ...

    top = target if isinstance(target, Checker) else checker(target)
    top.start(rows, CPU)
    gc.disable()  # hundreds of thousands of lists live at once, all of them wanted
    try:
        decode(
            top,
            below,
            written,
            [tokens] * rows,
            num_draft_tokens=4,
            stop=keep_all,
            emit=emit,
            device=CPU,
        )
    finally:
        gc.enable()
    return torch.tensor(written)[:, 1:]


def exact(target: Tensor, tokens: int) -> Tensor:
    """Probability of every sequence after token 0, by enumeration: float64 `[vocab ** tokens]`."""
    probs = target.double()
    sequences = torch.cartesian_prod(*[torch.arange(VOCAB)] * tokens).view(-1, tokens)
    previous = torch.cat([torch.zeros(len(sequences), 1, dtype=torch.long), sequences[:, :-1]], dim=1)
    return probs[previous, sequences].prod(dim=1)


def counts(written: Tensor) -> Tensor:
    """How often each sequence was written: int64 `[vocab ** tokens]`, in the order of `exact`."""
    places = VOCAB ** torch.arange(written.shape[1] - 1, -1, -1)
    return torch.bincount((written * places).sum(dim=1), minlength=VOCAB ** written.shape[1])
