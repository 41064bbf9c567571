"""What do the ops of a captured round write down, said row by row in plain Python, and do they on random states?

What a check keeps is acceptance_cases.py's; this is about the books around it: scripts, ends, who takes part.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.speculation.acceptance import accept_row
from hf_mlspec.speculation.drafters.prompt_lookup import PromptLookup

NAN = -1


def ints(values, device="cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def state(seed: int, batch: int, slots: int = 24, judged: int = 5) -> dict:
    """Lists: tokens, base, lengths (up to judged - 1 guesses), active, ends, chosen, confidence of every row."""
    draw = random.Random(seed)
    base = [draw.randint(1, slots - judged - 2) for _ in range(batch)]
    lengths = [b + draw.randint(0, judged - 1) for b in base]
    tokens = [[draw.randint(1, 6) for _ in range(slots)] for _ in range(batch)]
    chosen = []
    for row, b in zip(tokens, base, strict=True):
        agrees = draw.randint(0, judged)
        own = [row[b + j] if j < agrees else draw.choice([NAN, *range(1, 7)]) for j in range(judged)]
        chosen += own
    return {
        "tokens": tokens,
        "base": base,
        "lengths": lengths,
        "active": [draw.randint(0, 3) > 0 for _ in range(batch)],
        "ends": [draw.randint(b + 1, slots) for b in base],
        "chosen": chosen,
        "confidence": [draw.random() for _ in range(batch * judged)],
    }


def opened(s: dict, most: int, script=None, cursor=None) -> list[tuple[int, bool, int]]:
    """lengths, drafting, room of every row."""
    out = []
    for r, (base, active, end) in enumerate(zip(s["base"], s["active"], s["ends"], strict=True)):
        count = most if script is None else min(most, _round(script, cursor, r)[0])
        room = min(base + count, end - 1)
        out.append((base, bool(active) and base < room, room))
    return out


def window(s: dict, lead: int, judged: int) -> list[tuple[list[int], int, int, list[int], list[int]]]:
    """ids, start, count, columns that are asked for, positions of every row."""
    out, width = [], lead - 1 + judged
    for row, base, length, active in zip(s["tokens"], s["base"], s["lengths"], s["active"], strict=True):
        start = max(base - lead, 0)
        fed = row[start:length][:width] if active else []
        columns = [min(base - 1 - start + j, width - 1) for j in range(judged)]
        out.append((fed + [0] * (width - len(fed)), start if active else 0, len(fed), columns,
                    [base + j for j in range(judged)]))  # fmt: skip
    return out


def pushed(s: dict, chosen: list[int], confidence: list[float], threshold: float) -> list[tuple]:
    """tokens, length, active, failed, (id, start, count) of every row."""
    out = []
    for r, row in enumerate(s["tokens"]):
        row, length = list(row), s["lengths"][r]
        token, goes_on = max(chosen[r], 0), False
        if s["active"][r]:
            row[length] = token
            length += 1
            goes_on = chosen[r] >= 0 and not confidence[r] < threshold and length < s["ends"][r]
        failed = bool(s["active"][r]) and chosen[r] < 0
        out.append((row, length, goes_on, failed, (token, length - 1 if goes_on else 0, int(goes_on))))
    return out


def settled(s: dict, threshold: float, script=None, cursor=None) -> list[tuple]:
    """tokens, base, active, failed, record of every row."""
    judged = len(s["chosen"]) // len(s["base"])
    out = []
    for r, row in enumerate(s["tokens"]):
        row, base = list(row), s["base"][r]
        if not s["active"][r]:
            out.append((row, base, False, False, [-1] * (2 + judged)))
            continue
        own, sure = (s[name][r * judged : (r + 1) * judged] for name in ("chosen", "confidence"))
        guesses = row[base : s["lengths"][r]]
        accepted = accept_row(guesses, own) if script is None else min(_round(script, cursor, r)[1], len(guesses))
        mine = own[accepted]
        row[base + accepted] = max(mine, 0)
        kept = [*guesses[:accepted], max(mine, 0)]
        end = base + accepted + 1
        goes_on = mine >= 0 and min(sure[: accepted + 1]) >= threshold and end < s["ends"][r]
        out.append((row, end, goes_on, mine < 0, [len(guesses), accepted, *kept, *[-1] * (judged - len(kept))]))
    return out


def looked_up(s: dict, min_ngram: int, max_ngram: int) -> list[tuple[list[int], int]]:
    """tokens, length of every row, by the level that looks up on the host."""
    out = []
    for r, (row, length) in enumerate(zip(s["tokens"], s["lengths"], strict=True)):
        copied: list[int] = []
        if s["active"][r]:
            lookup = PromptLookup(max_ngram, min_ngram)
            lookup.start(1, torch.device("cpu"))
            (copied,) = lookup.propose([row[:length]], [max(s["ends"][r] - length, 0)]).rows()
        out.append(([*row[:length], *copied, *row[length + len(copied) :]], length + len(copied)))
    return out


def _round(script, cursor, r: int) -> tuple[int, int]:
    return script[r][cursor[r]] if cursor[r] < len(script[r]) else (0, 0)


def script_of(seed: int, batch: int, rounds: int = 3) -> tuple[list, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 5, (batch, rounds, 2), generator=generator)
    return table.tolist(), torch.randint(0, rounds + 2, (batch,), generator=generator).tolist()


def wide(tokens: list[list[int]], device: str = "cpu") -> torch.Tensor:
    """tokens as a part of a wider tensor: rows may lie apart."""
    whole = ints([[*row, 99, 99] for row in tokens], device)
    return whole[:, :-2]


def check_open(seed: int, batch: int, judged: int, device: str = "cpu") -> None:
    s = state(seed, batch, judged=judged)
    script, cursor = script_of(seed, batch)
    for table, at in ((None, None), (script, cursor)):
        outs = [ints([7] * batch, device) for _ in range(3)]
        given_script = None if table is None else ints(table, device), None if at is None else ints(at, device)
        ops.round_open(*(ints(s[n], device) for n in ("base", "active", "ends")), 3, *given_script, *outs)
        assert list(zip(*(out.tolist() for out in outs), strict=True)) == opened(s, 3, table, at)


def check_window(seed: int, batch: int, judged: int, device: str = "cpu") -> None:
    s = state(seed, batch, judged=judged)
    tokens = wide(s["tokens"], device)
    for lead in (1, 2, 3):
        operands = (ints(s[n], device) for n in ("base", "lengths", "active"))
        ids, starts, counts, pick, positions = ops.round_window(tokens, *operands, lead, judged)
        width = lead - 1 + judged
        expected = window(s, lead, judged)
        for r, (line, start, count, columns, numbers) in enumerate(expected):
            assert ids[r].tolist() == line
            assert (int(starts[r]), int(counts[r])) == (start, count)
            assert pick.view(batch, -1)[r].tolist() == [r * width + column for column in columns]
            assert positions.view(batch, -1)[r].tolist() == numbers
        assert pick.dtype == torch.int64


def check_push(seed: int, batch: int, judged: int, device: str = "cpu") -> None:
    s = state(seed, batch, judged=judged)
    chosen, confidence = s["chosen"][:batch], s["confidence"][:batch]
    for threshold in (0.0, 0.5):
        tokens, lengths, active = wide(s["tokens"], device), ints(s["lengths"], device), ints(s["active"], device)
        failed = ints([0] * batch, device)
        ids, starts, counts = ops.round_push(
            tokens, lengths, active, ints(s["ends"], device), ints(chosen, device),
            torch.tensor(confidence, device=device), threshold, failed, 4,
        )  # fmt: skip
        for r, (row, length, goes_on, bad, fed) in enumerate(pushed(s, chosen, confidence, threshold)):
            assert tokens[r].tolist() == row
            assert (int(lengths[r]), bool(active[r]), int(failed[r])) == (length, goes_on, 4 * bad)
            assert (int(ids[r, 0]), int(starts[r]), int(counts[r])) == fed


def check_lookup(seed: int, batch: int, judged: int, device: str = "cpu") -> None:
    s = state(seed, batch, judged=judged)
    for row in s["tokens"]:  # of two words, so that many n-grams come again
        row[:] = [1 + token % 2 for token in row]
    for least, most in ((1, 1), (1, 3), (2, 3), (3, 12), (1, 40)):
        tokens, lengths = wide(s["tokens"], device), ints(s["lengths"], device)
        ops.round_lookup(tokens, lengths, ints(s["active"], device), ints(s["ends"], device), least, most)
        for r, (row, length) in enumerate(looked_up(s, least, most)):
            assert tokens[r].tolist() == row
            assert int(lengths[r]) == length


def check_settle(seed: int, batch: int, judged: int, device: str = "cpu") -> None:
    s = state(seed, batch, judged=judged)
    script, cursor = script_of(seed, batch)
    for threshold in (0.0, 0.3):
        for table, at in ((None, None), (script, cursor)):
            for extra in (0, judged):
                tokens, base, active = wide(s["tokens"], device), ints(s["base"], device), ints(s["active"], device)
                failed, report = ints([0] * batch, device), ints([[5] * (4 + judged)] * batch, device)
                moved = None if at is None else ints(at, device)
                ops.round_settle(
                    tokens, base, ints(s["lengths"], device), active, ints(s["ends"], device),
                    ints(s["chosen"], device), torch.tensor(s["confidence"], device=device), threshold,
                    None if table is None else ints(table, device), moved, report[:, 1 : 3 + extra], failed, 2,
                )  # fmt: skip
                for r, (row, end, goes_on, bad, line) in enumerate(settled(s, threshold, table, at)):
                    assert tokens[r].tolist() == row
                    assert (int(base[r]), bool(active[r]), int(failed[r])) == (end, goes_on, 2 * bad)
                    assert report[r].tolist() == [5, *line[: 2 + extra], *[5] * (1 + judged - extra)]
                    assert moved is None or int(moved[r]) == at[r] + bool(s["active"][r])
