"""Which drafted tokens does a check keep, and what does it put after them? One table for everything that decides it.

All tokens are of a world in which the next token is known: the checker says `t + 1` after `t` but for the exceptions
of `said`. So a case is where a row ends and what was drafted, and models, tables and ops can all be made to play it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hf_mlspec import ops

VOCAB = 128
UNSURE, NANS, TO_NANS = 110, 120, 121  # after which the checker is not sure, or its logits hold NaN; what leads there
SURE, LOW = 30.0, 3.745  # logits of the token that follows: its probability is 1 - 1e-11, or 0.25
NAN = -1  # in place of a token


class Row(NamedTuple):
    """A row that ends with `last`, and what is drafted behind it.

    accepted, tokens: what the check keeps. goes_on: whether a level drafts on for the one above. limit: tokens the row
    may gain. active: False for a row that takes no part.
    """

    last: int
    draft: tuple[int, ...]
    accepted: int
    tokens: tuple[int, ...]
    goes_on: bool = True
    limit: int = 12
    active: bool = True

    @property
    def drafted(self) -> tuple[int, ...]:
        """What the limit leaves of the draft: the check adds one more."""
        return self.draft[: max(self.limit - 1, 0)] if self.active else ()


class Case(NamedTuple):
    """Rows that are checked together; a row stops behind a token less probable than `threshold`."""

    rows: list[Row]
    threshold: float = 0.5


def _long(agreeing: int) -> Case:
    """77 guesses, of which so many agree: more than a warp has lanes."""
    draft = tuple(101 if place == agreeing else 6 + place for place in range(77))
    return Case([Row(5, draft, agreeing, tuple(range(6, 7 + agreeing)), limit=90)])


CASES: dict[str, Case] = {
    "all agree": Case([Row(5, (6, 7, 8), 3, (6, 7, 8, 9))]),
    "the last differs": Case([Row(5, (6, 7, 60), 2, (6, 7, 8))]),
    "one in the middle differs": Case([Row(5, (6, 60, 61), 1, (6, 7))]),
    "the first differs, the others fit": Case([Row(5, (60, 7, 8), 0, (6,))]),
    "one guess": Case([Row(5, (6,), 1, (6, 7))]),
    "one wrong guess": Case([Row(5, (60,), 0, (6,))]),
    "no guess": Case([Row(5, (), 0, (6,))]),
    "rows of their own": Case([
        Row(5, (6, 7), 2, (6, 7, 8)), Row(20, (50, 22), 0, (21,)), Row(30, (31, 51), 1, (31, 32)),
    ]),
    "drafts of many lengths": Case([
        Row(5, (6, 7, 8, 9), 4, (6, 7, 8, 9, 10)), Row(20, (21,), 1, (21, 22)), Row(30, (31, 52, 53), 1, (31, 32)),
    ]),
    "a row without a guess among others": Case([
        Row(5, (6, 7), 2, (6, 7, 8)), Row(20, (), 0, (21,)), Row(30, (50,), 0, (31,)),
    ]),
    "inactive rows": Case([
        Row(20, (21, 22), 0, (), False, 0, active=False), Row(5, (6, 60), 1, (6, 7)),
        Row(30, (), 0, (), False, 0, active=False),
    ]),
    "ends where it is full": Case([Row(5, (6, 7), 2, (6, 7, 8), False, limit=3)]),
    "a draft longer than the row may grow": Case([Row(5, (6, 7, 8, 9), 1, (6, 7), False, limit=2)]),
    "room for one token": Case([Row(5, (6, 7), 0, (6,), False, limit=1), Row(20, (21, 22), 2, (21, 22, 23))]),
    "stops before it is full": Case([Row(5, (6, 60, 8), 1, (6, 7), limit=4)]),
    "unsure of what it adds": Case([Row(UNSURE, (50,), 0, (111,), False), Row(5, (6,), 1, (6, 7))]),
    "unsure of what it keeps": Case([Row(109, (110, 111, 112), 3, (110, 111, 112, 113), False)]),
    "unsure behind a difference": Case([Row(107, (108, 60, 110, 62), 1, (108, 109))]),
    "unsure without a threshold": Case([Row(UNSURE, (111, 60), 1, (111, 112))], 0.0),
    "NaN where it ends": Case([Row(NANS, (50,), 0, (NAN,), False)]),
    "NaN behind what it keeps": Case([Row(TO_NANS, (NANS,), 1, (NANS, NAN), False)]),
    "NaN behind a difference": Case([Row(30, (60, NANS, 40), 0, (31,))]),
    "NaN in an inactive row": Case([Row(NANS, (50,), 0, (), False, 0, active=False), Row(5, (6,), 1, (6, 7))]),
    **{f"77 guesses, {agreeing} agree": _long(agreeing) for agreeing in (0, 1, 31, 32, 33, 64, 77)},
}  # fmt: skip


def said(last: int) -> int:
    """What the checker says after a token."""
    return {NANS: NAN, TO_NANS: NANS, 119: 90, VOCAB - 1: 0}.get(last, last + 1)


def logits(follows: dict[int, int], unsure: set[int]) -> Tensor:
    """Float32 `[last token, next token]` of a level that says follows[t] after t, 0 after others; NaN for NAN."""
    out = torch.zeros(VOCAB, VOCAB)
    for last in range(VOCAB):
        token = follows.get(last, 0)
        out[last, token] = LOW if last in unsure else SURE
        if token == NAN:
            out[last] = torch.nan
    return out


def checkers_logits() -> Tensor:
    """Those of `said`."""
    return logits({last: said(last) for last in range(VOCAB)}, {UNSURE})


def drafters_logits(rows: list[Row]) -> Tensor:
    """Of a level that drafts what these rows say: it is unsure of the last token of each."""
    follows, unsure = {}, set()
    for row in rows:
        line = [row.last, *row.drafted]
        follows |= dict(pairwise(line))
        unsure |= set(line[-2:-1])
    return logits(follows, unsure)


def fails(case: Case) -> bool:
    """Whether logits that hold NaN decide a token."""
    return any(NAN in row.tokens for row in case.rows)


def play_ops(case: Case, device: str = "cpu") -> None:
    """Have the ops of a captured round draft and check the rows of a case, and assert what they write down."""
    rows, level = case.rows, 3
    most = max(1, *(len(row.draft) for row in rows))
    prefix = [9, 8, 7][: 1 + len(rows) % 3]
    length = len(prefix) + 1

    def ints(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    base, active = ints([length] * len(rows)), ints([row.active for row in rows])
    ends, failed = base + ints([row.limit for row in rows]), ints([0] * len(rows))
    lengths, drafting, room = (torch.zeros_like(base) for _ in range(3))
    tokens = ints([[*prefix, row.last, *_stale(row.last, most + 2)] for row in rows])
    ops.round_open(base, active, ends, most, None, None, lengths, drafting, room)
    drafting *= ints([len(row.draft) > 0 for row in rows])
    for step in range(most):
        guess = [row.draft[step] if step < len(row.draft) else 0 for row in rows]
        sure = torch.tensor([float(step + 1 < len(row.draft)) for row in rows], device=device)
        ops.round_push(tokens, lengths, drafting, room, ints(guess), sure, 0.5, failed, level)
    assert (lengths - base).tolist() == [len(row.drafted) for row in rows]
    before = [line[length - 1 : length + most] for line in tokens.tolist()]  # what the checker is fed
    chosen = ints([said(token) for line in before for token in line])
    sure = torch.tensor([0.25 if token == UNSURE else 1.0 for line in before for token in line], device=device)
    record = torch.zeros(len(rows), most + 3, dtype=torch.int32, device=device)
    operands = tokens, base, lengths, active, ends, chosen, sure, case.threshold
    ops.round_settle(*operands, None, None, record, failed, level)
    for r, row in enumerate(rows):
        written = [max(token, 0) for token in row.tokens]
        head = [len(row.drafted), row.accepted] if row.active else [-1, -1]
        assert record[r].tolist() == head + written + [-1] * (most + 1 - len(written))
        assert tokens[r, length - 1 : length + len(written)].tolist() == [row.last, *written]
        assert (int(base[r]), bool(active[r])) == (length + len(written), row.goes_on)
        assert int(failed[r]) == level * (NAN in row.tokens)


def _stale(last: int, count: int) -> list[int]:
    """What the checker would say from here on: guesses of an earlier round, which fit and are none of this one."""
    line = [last]
    while len(line) <= count:
        line.append(max(said(line[-1]), 0))
    return line[1:]
