"""Which operands may the ops of a captured round have? As operands.py.

Lengths are on the device, so they are not looked at: each op keeps within tokens and record whatever they say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .operands import check_dtype, check_shape, on_one_device


@on_one_device
def check_round_open(
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
    op, batch = "round_open", _batch("round_open", "base", base)
    _check_rows(op, batch, active=active, ends=ends, lengths=lengths, drafting=drafting, room=room)
    _check_least(op, "most", most, 1)
    _check_script(op, batch, script, cursor)


@on_one_device
def check_round_window(
    tokens: Tensor, base: Tensor, lengths: Tensor, active: Tensor, lead: int, judged: int
) -> None:
    op, batch = "round_window", _batch("round_window", "base", base)
    _check_tokens(op, tokens, batch)
    _check_rows(op, batch, lengths=lengths, active=active)
    _check_least(op, "lead", lead, 1)
    _check_least(op, "judged", judged, 1)


@on_one_device
def check_round_push(
    tokens: Tensor,
    lengths: Tensor,
    active: Tensor,
    ends: Tensor,
    chosen: Tensor,
    confidence: Tensor,
    threshold: float,
    failed: Tensor,
    level: int,
) -> None:
    op, batch = "round_push", _batch("round_push", "lengths", lengths)
    _check_tokens(op, tokens, batch)
    _check_rows(op, batch, active=active, ends=ends, chosen=chosen, failed=failed)
    _check_confidence(op, confidence, threshold, batch)
    _check_least(op, "level", level, 1)


@on_one_device
def check_round_settle(
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
    op, batch = "round_settle", _batch("round_settle", "base", base)
    _check_tokens(op, tokens, batch)
    _check_rows(op, batch, lengths=lengths, active=active, ends=ends, failed=failed)
    count = _batch(op, "chosen", chosen)
    if not count or count % batch:
        raise ValueError(f"{op}: chosen has {count} entries for {batch} rows, expected as many for each")
    _check_confidence(op, confidence, threshold, count)
    check_dtype(op, "record", record, torch.int32)
    judged = count // batch
    if record.ndim != 2 or len(record) != batch or record.shape[1] not in (2, 2 + judged) or record.stride(1) != 1:
        raise ValueError(
            f"{op}: record has shape {list(record.shape)} and strides {list(record.stride())}, expected [{batch}, 2] "
            f"or [{batch}, {2 + judged}], dense in its rows"
        )
    _check_script(op, batch, script, cursor)
    _check_least(op, "level", level, 1)


def _batch(op: str, name: str, tensor: Tensor) -> int:
    """Entries of an int32 vector."""
    check_dtype(op, name, tensor, torch.int32)
    if tensor.ndim != 1 or not tensor.is_contiguous() or not len(tensor):
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}, expected a dense vector of at least one row")
    return len(tensor)


def _check_rows(op: str, batch: int, **vectors: Tensor) -> None:
    for name, vector in vectors.items():
        _batch(op, name, vector)
        check_shape(op, name, vector, (batch,))


def _check_tokens(op: str, tokens: Tensor, batch: int) -> None:
    check_dtype(op, "tokens", tokens, torch.int32)
    if tokens.ndim != 2 or len(tokens) != batch or not tokens.shape[1] or tokens.stride(1) != 1:
        raise ValueError(
            f"{op}: tokens has shape {list(tokens.shape)} and strides {list(tokens.stride())}, expected "
            f"[{batch}, slots], dense in its rows"
        )


def _check_confidence(op: str, confidence: Tensor, threshold: float, count: int) -> None:
    check_dtype(op, "confidence", confidence, torch.float32)
    check_shape(op, "confidence", confidence, (count,))
    if not confidence.is_contiguous():
        raise ValueError(f"{op}: confidence has strides {list(confidence.stride())}, expected a dense vector")
    if not 0 <= threshold < 1:
        raise ValueError(f"{op}: threshold is {threshold}, it is a probability in [0, 1)")


def _check_script(op: str, batch: int, script: Tensor | None, cursor: Tensor | None) -> None:
    if (script is None) != (cursor is None):
        given, lacking = ("cursor", "script") if script is None else ("script", "cursor")
        raise ValueError(f"{op}: {given} was given without {lacking}: give both or none")
    if script is None:
        return
    check_dtype(op, "script", script, torch.int32)
    if script.ndim != 3 or script.shape[0] != batch or script.shape[2] != 2 or not script.is_contiguous():
        raise ValueError(
            f"{op}: script has shape {list(script.shape)}, expected [{batch}, rounds, 2], contiguous"
        )
    _check_rows(op, batch, cursor=cursor)


def _check_least(op: str, name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{op}: {name} is {value}, it must be at least {least}")
