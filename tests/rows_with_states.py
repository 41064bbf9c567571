"""What do rows of recurrent layers give behind tokens, in an engine of any decoder?"""

from __future__ import annotations

from collections.abc import Callable

import torch

LENGTH = 48


def ids(rows: int = 1, length: int = LENGTH, seed: int = 3) -> list[list[int]]:
    """Random tokens."""
    return torch.randint(1, 199, (rows, length), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_behind(model, engine_over: Callable, row: list[int]) -> torch.Tensor:
    """Logits behind a row in an engine that knows nothing else."""
    return engine_over(model).feed([row])[0, 0]


def read_again(model, engine_over: Callable, back: int) -> None:
    """A row that was taken back behind its state, and goes on with other tokens, is as if it were new."""
    row, engine = ids()[0], engine_over(model)
    for end in range(1, 41):
        engine.feed([row[:end]])
    engine.lengths = [back]
    changed = row[:back] + ids(seed=9)[0][:8]
    assert torch.equal(engine.feed([changed])[0, 0], logits_behind(model, engine_over, changed))
