"""What do the ops of a captured round compute, in plain torch? See schema_round.py for what their tensors hold."""

from __future__ import annotations

import torch
from torch import Tensor

from . import operands_round

NOT_CHECKED = -1  # in a record: the row took no part


def round_open(
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
    """A row drafts up to base + most, or what the script says, and leaves one token for the check that follows."""
    operands_round.check_round_open(base, active, ends, most, script, cursor, lengths, drafting, room)
    count = torch.full_like(base, most)
    if script is not None:
        count = torch.minimum(count, _scripted(script, cursor)[:, 0])
    room.copy_(torch.minimum(base + count, ends - 1))
    lengths.copy_(base)
    drafting.copy_((active != 0) & (base < room))


def round_window(
    tokens: Tensor, base: Tensor, lengths: Tensor, active: Tensor, lead: int, judged: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a level is fed: the last `lead` settled tokens and the guesses behind them, and which logits it is asked
    for: those behind base, and behind each of judged - 1 guesses. pick: their flat indices; positions: the numbers of
    the tokens they are for."""
    operands_round.check_round_window(tokens, base, lengths, active, lead, judged)
    width, slots = lead - 1 + judged, tokens.shape[1]
    on = active != 0
    starts = (base - lead).clamp(min=0)
    counts = (lengths - starts).clamp(0, width) * on
    offsets = torch.arange(width, device=base.device, dtype=torch.int32)
    places = (starts[:, None] + offsets).clamp(max=slots - 1)
    ids = tokens.gather(1, places.long()).masked_fill(offsets >= counts[:, None], 0)
    asked = torch.arange(judged, device=base.device, dtype=torch.int32)
    column = (base - 1 - starts).clamp(min=0)[:, None] + asked
    rows = torch.arange(len(base), device=base.device)[:, None]
    pick = rows * width + column.clamp(max=width - 1)
    return ids, starts * on, counts, pick.flatten(), (base[:, None] + asked).flatten()


def round_push(
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
    """Active rows gain their chosen token; a row stops behind one less probable than the threshold, before `ends`, and
    where its logits held NaN. Fed next: that token."""
    operands_round.check_round_push(tokens, lengths, active, ends, chosen, confidence, threshold, failed, level)
    on = (active != 0) & (lengths < tokens.shape[1])
    _write(tokens, lengths, chosen, on)
    failed.masked_fill_(on & (chosen < 0), level)
    lengths += on
    active.copy_(on & (chosen >= 0) & ~(confidence < threshold) & (lengths < ends))
    return chosen.clamp(min=0)[:, None], (lengths - 1) * active, active.clone()


def round_settle(
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
    """Of the guesses in tokens[r, base:lengths] those before the first that differs from `chosen` are settled, and
    behind them the token the level itself chose; base grows by both. A row stops behind a settled token less probable
    than the threshold, at `ends`, and where the logits of its own token held NaN. What the script accepts is settled,
    right or wrong, nothing behind its last round. record: (drafted, accepted) of every row, then the settled tokens;
    -1 behind them, and where the row took no part."""
    operands = tokens, base, lengths, active, ends, chosen, confidence, threshold
    operands_round.check_round_settle(*operands, script, cursor, record, failed, level)
    own = chosen.view(len(base), -1)
    column = torch.arange(own.shape[1], device=base.device, dtype=torch.int32)
    on = (active != 0) & (base < tokens.shape[1])
    drafted = (lengths - base).clamp(0, len(column) - 1)
    guesses = tokens.gather(1, (base[:, None] + column).clamp(max=tokens.shape[1] - 1).long())
    accepted = ((guesses == own) & (column < drafted[:, None])).int().cumprod(1).sum(1).int()
    if script is not None:
        accepted = torch.minimum(_scripted(script, cursor)[:, 1], drafted)
        cursor += on
    mine = own.gather(1, accepted[:, None].long())[:, 0]
    counted = column <= accepted[:, None]
    settled = torch.where(column == accepted[:, None], mine[:, None].clamp(min=0), guesses)
    _record(record, on, drafted, accepted, settled.masked_fill(~counted, -1))
    _write(tokens, base + accepted, mine, on)
    failed.masked_fill_(on & (mine < 0), level)
    base += (accepted + 1) * on
    unsure = ((confidence.view_as(own) < threshold) & counted).any(1)
    active.copy_(on & (mine >= 0) & ~unsure & (base < ends))


def _scripted(script: Tensor, cursor: Tensor) -> Tensor:
    """The round of every row that cursor stands on, `[batch, 2]`; (0, 0) behind the last."""
    last = script.shape[1] - 1
    if last < 0:
        return script.new_zeros(len(script), 2)
    rows = torch.arange(len(script), device=script.device)
    return script[rows, cursor.clamp(0, last).long()].masked_fill((cursor > last)[:, None], 0).clamp(min=0)


def _write(tokens: Tensor, places: Tensor, chosen: Tensor, on: Tensor) -> None:
    """Put every row's chosen token into its place, 0 for one whose logits held NaN; rows not `on` stay."""
    index = places.clamp(max=tokens.shape[1] - 1)[:, None].long()
    tokens.scatter_(1, index, torch.where(on[:, None], chosen.clamp(min=0)[:, None], tokens.gather(1, index)))


def _record(record: Tensor, on: Tensor, drafted: Tensor, accepted: Tensor, settled: Tensor) -> None:
    line = torch.cat([drafted[:, None], accepted[:, None], settled], dim=1)
    record.copy_(torch.where(on[:, None], line, NOT_CHECKED)[:, : record.shape[1]])
