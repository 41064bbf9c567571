"""Which operators keep the books of a captured round: what is fed, what was guessed, and what of it is kept?

A round of draft and check runs at fixed shapes, without the host, so its lengths live on the device. int32 ``tokens``
``[batch, slots]`` holds every row's settled tokens and behind them the guesses. A level that judges has settled the
first ``base`` ``[batch]`` of them; what drafts for it has written up to ``lengths`` ``[batch]``. ``active``
``[batch]`` is 1 for rows that take part; nothing of the others is fed, written or counted. ``ends`` ``[batch]``: the
length a row may not pass. ``failed`` ``[batch]`` becomes the number of the level whose logits held NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import operands_round

# As in schema.py. All tensors are int32 but pick (int64) and confidence (float32).
SCHEMAS: dict[str, str] = {
    # -> lengths, drafting (what `active` is for the level that drafts), room (what `ends` is for it), all [batch].
    "round_open": (
        "(Tensor base, Tensor active, Tensor ends, int most, Tensor? script, Tensor? cursor, Tensor(a!) lengths,"
        " Tensor(b!) drafting, Tensor(c!) room) -> ()"
    ),
    # -> ids [batch, lead - 1 + judged], starts, counts [batch], pick int64 and positions [batch * judged].
    "round_window": (
        "(Tensor tokens, Tensor base, Tensor lengths, Tensor active, int lead, int judged)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    # chosen, confidence [batch] -> ids [batch, 1], starts, counts [batch] of the step that follows.
    "round_push": (
        "(Tensor(a!) tokens, Tensor(b!) lengths, Tensor(c!) active, Tensor ends, Tensor chosen, Tensor confidence,"
        " float threshold, Tensor(d!) failed, int level) -> (Tensor, Tensor, Tensor)"
    ),
    # chosen, confidence [batch * judged]; script [batch, rounds, 2]; cursor [batch]; record [batch, 2 or 2 + judged].
    "round_settle": (
        "(Tensor(a!) tokens, Tensor(b!) base, Tensor lengths, Tensor(c!) active, Tensor ends, Tensor chosen,"
        " Tensor confidence, float threshold, Tensor? script, Tensor(d!)? cursor, Tensor(e!) record,"
        " Tensor(f!) failed, int level) -> ()"
    ),
}


def fake_round_open(
    base: Tensor,
    active: Tensor,
    ends: Tensor,
    most: int,
    script: Tensor | None,
    cursor: Tensor | None,
    lengths: Tensor,
    drafting: Tensor,
    room: Tensor,
) -> None:
    operands_round.check_round_open(base, active, ends, most, script, cursor, lengths, drafting, room)


def fake_round_window(
    tokens: Tensor, base: Tensor, lengths: Tensor, active: Tensor, lead: int, judged: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands_round.check_round_window(tokens, base, lengths, active, lead, judged)
    batch = len(base)
    return (
        tokens.new_empty((batch, lead - 1 + judged)),
        tokens.new_empty(batch),
        tokens.new_empty(batch),
        tokens.new_empty(batch * judged, dtype=torch.int64),
        tokens.new_empty(batch * judged),
    )


def fake_round_push(
    tokens: Tensor,
    lengths: Tensor,
    active: Tensor,
    ends: Tensor,
    chosen: Tensor,
    confidence: Tensor,
    threshold: float,
    failed: Tensor,
    level: int,
) -> tuple[Tensor, Tensor, Tensor]:
    operands_round.check_round_push(tokens, lengths, active, ends, chosen, confidence, threshold, failed, level)
    return tokens.new_empty((len(lengths), 1)), tokens.new_empty(len(lengths)), tokens.new_empty(len(lengths))


def fake_round_settle(
    tokens: Tensor,
    base: Tensor,
    lengths: Tensor,
    active: Tensor,
    ends: Tensor,
    chosen: Tensor,
    confidence: Tensor,
    threshold: float,
    script: Tensor | None,
    cursor: Tensor | None,
    record: Tensor,
    failed: Tensor,
    level: int,
) -> None:
    operands_round.check_round_settle(
        tokens, base, lengths, active, ends, chosen, confidence, threshold, script, cursor, record, failed, level
    )
