"""Which ops do the bookkeeping of a captured round: what is fed, drafted and accepted?

A round of draft and check runs at fixed shapes, without the host, so its lengths live on the device. int32 ``tokens``
``[batch, slots]`` holds every row's committed tokens and then the drafted ones. A level that checks has committed the
first ``base`` ``[batch]`` of them; what drafts for it has written up to ``lengths`` ``[batch]``. ``active``
``[batch]`` is 1 for rows that take part; nothing of the others is fed, written or counted. ``ends`` ``[batch]``: the
length a row may not pass. ``failed`` ``[batch]`` becomes the number of the level whose logits held NaN.
All tensors are int32 but pick (int64) and confidence (float32). Lengths are on the device, so checks do not look at
them: each op keeps within tokens and record whatever they say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .operator import Operands, operator

NOT_CHECKED = -1  # in a record: the row took no part


def _check_open(given: Operands) -> None:
    batch = _count(given, "base")
    _check_rows(given, batch, "active", "ends", "lengths", "drafting", "room")
    _check_least(given, "most")
    _check_script(given, batch)


@operator(_check_open, lambda given: None, writes=("lengths", "drafting", "room"), composed_on_cpu=True)
def round_open(
    base: Tensor, active: Tensor, ends: Tensor, most: int, script: Tensor | None, cursor: Tensor | None,
    lengths: Tensor, drafting: Tensor, room: Tensor,
) -> None:  # fmt: skip
    """A row drafts up to base + most, or what the script says, and leaves one token for the check that follows:
    lengths, drafting (what `active` is for the level that drafts), room (what `ends` is for it), all ``[batch]``."""
    count = torch.full_like(base, most)
    if script is not None:
        count = torch.minimum(count, _scripted(script, cursor)[:, 0])
    room.copy_(torch.minimum(base + count, ends - 1))
    lengths.copy_(base)
    drafting.copy_((active != 0) & (base < room))


def _check_window(given: Operands) -> None:
    batch = _count(given, "base")
    _check_tokens(given, batch)
    _check_rows(given, batch, "lengths", "active")
    _check_least(given, "lead")
    _check_least(given, "judged")


def _fake_window(given: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, batch, judged = given.tokens, len(given.base), given.judged
    return (
        tokens.new_empty((batch, given.lead - 1 + judged)),
        tokens.new_empty(batch),
        tokens.new_empty(batch),
        tokens.new_empty(batch * judged, dtype=torch.int64),
        tokens.new_empty(batch * judged),
    )


@operator(_check_window, _fake_window, composed_on_cpu=True)
def round_window(
    tokens: Tensor, base: Tensor, lengths: Tensor, active: Tensor, lead: int, judged: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> ids ``[batch, lead - 1 + judged]``, starts, counts ``[batch]``, pick and positions ``[batch * judged]``.

    What a level is fed: the last `lead` settled tokens and the guesses behind them, and which logits it is asked for:
    those behind base, and behind each of judged - 1 guesses. pick: their flat indices; positions: the numbers of the
    tokens they are for.
    """
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


def _check_push(given: Operands) -> None:
    batch = _count(given, "lengths")
    _check_tokens(given, batch)
    _check_rows(given, batch, "active", "ends", "chosen", "failed")
    _check_confidence(given, batch)
    _check_least(given, "level")


def _fake_push(given: Operands) -> tuple[Tensor, Tensor, Tensor]:
    batch = len(given.lengths)
    return tuple(given.tokens.new_empty(shape) for shape in ((batch, 1), batch, batch))


@operator(_check_push, _fake_push, writes=("tokens", "lengths", "active", "failed"), composed_on_cpu=True)
def round_push(
    tokens: Tensor, lengths: Tensor, active: Tensor, ends: Tensor, chosen: Tensor, confidence: Tensor,
    threshold: float, failed: Tensor, level: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """chosen, confidence ``[batch]`` -> ids ``[batch, 1]``, starts, counts ``[batch]`` of the step that follows.

    Active rows gain their chosen token; a row stops behind one less probable than the threshold, before `ends`, and
    where its logits held NaN. Fed next: that token.
    """
    on = (active != 0) & (lengths < tokens.shape[1])
    _write(tokens, lengths, chosen, on)
    failed.masked_fill_(on & (chosen < 0), level)
    lengths += on
    active.copy_(on & (chosen >= 0) & ~(confidence < threshold) & (lengths < ends))
    return chosen.clamp(min=0)[:, None], (lengths - 1) * active, active.clone()


def _check_lookup(given: Operands) -> None:
    batch = _count(given, "lengths")
    _check_tokens(given, batch)
    _check_rows(given, batch, "active", "ends")
    _check_least(given, "min_ngram")
    if given.max_ngram < given.min_ngram:
        raise ValueError(f"{given.op}: max_ngram is {given.max_ngram}, less than min_ngram, {given.min_ngram}")


@operator(_check_lookup, lambda given: None, writes=("tokens", "lengths"), composed_on_cpu=True)
def round_lookup(
    tokens: Tensor, lengths: Tensor, active: Tensor, ends: Tensor, min_ngram: int, max_ngram: int
) -> None:
    """Active rows gain the tokens that followed the last place before their end where as many as possible of their
    last max_ngram tokens stand, at least min_ngram of them: up to `ends`, and none from beyond their own end."""
    slots, ends_at = tokens.shape[1], torch.arange(tokens.shape[1], device=tokens.device)
    matches, matched = ends_at < lengths[:, None], torch.zeros_like(tokens)
    for n in range(1, min(max_ngram, slots) + 1):
        own = tokens.gather(1, (lengths - n).clamp(0, slots - 1)[:, None].long())
        before = torch.nn.functional.pad(tokens, (n, 0))[:, :slots]  # of an n-gram that ends here the first token
        matches = matches & (ends_at >= n) & (before == own)
        matched += matches
    key, from_ = (matched.long() * slots + ends_at).masked_fill(matched < min_ngram, -1).max(1)
    count = torch.minimum(ends.clamp(max=slots) - lengths, lengths - from_).clamp(min=0)
    count = count.masked_fill((active == 0) | (key < 0), 0).int()
    column = ends_at - lengths[:, None]
    copied = tokens.gather(1, (from_[:, None] + column).clamp(0, slots - 1))
    tokens.copy_(torch.where((column >= 0) & (column < count[:, None]), copied, tokens))
    lengths += count


def _check_settle(given: Operands) -> None:
    batch = _count(given, "base")
    _check_tokens(given, batch)
    _check_rows(given, batch, "lengths", "active", "ends", "failed")
    count = _count(given, "chosen")
    if not count or count % batch:
        raise ValueError(f"{given.op}: chosen has {count} entries for {batch} rows, expected as many for each")
    _check_confidence(given, count)
    given.require_dtype("record", torch.int32)
    record, judged = given.record, count // batch
    if record.ndim != 2 or len(record) != batch or record.shape[1] not in (2, 2 + judged) or record.stride(1) != 1:
        raise ValueError(
            f"{given.op}: record has shape {list(record.shape)} and strides {list(record.stride())}, expected "
            f"[{batch}, 2] or [{batch}, {2 + judged}], dense in its rows"
        )
    _check_script(given, batch)
    _check_least(given, "level")


@operator(_check_settle, lambda given: None, writes=("tokens", "base", "active", "cursor", "record", "failed"),
          composed_on_cpu=True)  # fmt: skip
def round_settle(
    tokens: Tensor, base: Tensor, lengths: Tensor, active: Tensor, ends: Tensor, chosen: Tensor, confidence: Tensor,
    threshold: float, script: Tensor | None, cursor: Tensor | None, record: Tensor, failed: Tensor, level: int,
) -> None:  # fmt: skip
    """chosen, confidence ``[batch * judged]``; script ``[batch, rounds, 2]``; cursor ``[batch]``; record ``[batch,
    2]`` or ``[batch, 2 + judged]``.

    Of the guesses in tokens[r, base:lengths] those before the first that differs from `chosen` are settled, and
    behind them the token the level itself chose; base grows by both. A row stops behind a settled token less probable
    than the threshold, at `ends`, and where the logits of its own token held NaN. What the script accepts is settled,
    right or wrong, nothing behind its last round. record: (drafted, accepted) of every row, then the settled tokens;
    -1 behind them, and where the row took no part.
    """
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


def _count(given: Operands, name: str) -> int:
    """Entries of an int32 vector."""
    given.require_dtype(name, torch.int32)
    tensor = vars(given)[name]
    if tensor.ndim != 1 or not tensor.is_contiguous() or not len(tensor):
        raise ValueError(
            f"{given.op}: {name} has shape {list(tensor.shape)}, expected a dense vector of at least one row"
        )
    return len(tensor)


def _check_rows(given: Operands, batch: int, *names: str) -> None:
    for name in names:
        _count(given, name)
        given.require_shape(name, (batch,))


def _check_tokens(given: Operands, batch: int) -> None:
    given.require_dtype("tokens", torch.int32)
    tokens = given.tokens
    if tokens.ndim != 2 or len(tokens) != batch or not tokens.shape[1] or tokens.stride(1) != 1:
        raise ValueError(
            f"{given.op}: tokens has shape {list(tokens.shape)} and strides {list(tokens.stride())}, expected "
            f"[{batch}, slots], dense in its rows"
        )


def _check_confidence(given: Operands, count: int) -> None:
    given.require_dtype("confidence", torch.float32)
    given.require_shape("confidence", (count,))
    if not given.confidence.is_contiguous():
        raise ValueError(
            f"{given.op}: confidence has strides {list(given.confidence.stride())}, expected a dense vector"
        )
    if not 0 <= given.threshold < 1:
        raise ValueError(f"{given.op}: threshold is {given.threshold}, it is a probability in [0, 1)")


def _check_script(given: Operands, batch: int) -> None:
    script = given.script
    if (script is None) != (given.cursor is None):
        told, lacking = ("cursor", "script") if script is None else ("script", "cursor")
        raise ValueError(f"{given.op}: {told} was given without {lacking}: give both or none")
    if script is None:
        return
    given.require_dtype("script", torch.int32)
    if script.ndim != 3 or script.shape[0] != batch or script.shape[2] != 2 or not script.is_contiguous():
        raise ValueError(
            f"{given.op}: script has shape {list(script.shape)}, expected [{batch}, rounds, 2], contiguous"
        )
    _check_rows(given, batch, "cursor")


def _check_least(given: Operands, name: str) -> None:
    if (value := vars(given)[name]) < 1:
        raise ValueError(f"{given.op}: {name} is {value}, it must be at least 1")
