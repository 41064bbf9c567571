"""How much of what a drafter remembers of a row does the row still say?"""

from __future__ import annotations

# Tokens compared at the end of what is remembered. Rejected tokens are announced by `rollback`; this window also
# catches a level above that tried tokens on a row and came back with others, without a scan of the whole context.
LOOK_BACK = 32


def agreed_length(known: list[int], row: list[int]) -> int:
    """Number of leading tokens of `known` that `row` still has; O(LOOK_BACK) where nothing was taken back.

    Tokens further back than LOOK_BACK change by `rollback` only (the drafter protocol), so they are compared only when
    the window shows a difference.
    """
    shorter = min(len(known), len(row))
    begin = max(0, shorter - LOOK_BACK)
    if known[begin:shorter] == row[begin:shorter]:
        return shorter
    return next(i for i in range(shorter) if known[i] != row[i])


def common_prefix(left: list[int], right: list[int]) -> int:
    """Number of leading tokens two lists share."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(i for i in range(shorter) if left[i] != right[i])
