"""What does a cell cost in every contender's way? Seconds, tokens, ids that differ, and what auto chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hf_mlspec
from eval.bench_auto.contenders import ALONE, AUTO, Contender, Decoder, Level, contenders
from eval.bench_auto.plan import Cell, Plan
from eval.own_costs import own_costs
from eval.plans.models import Loaded
from eval.plans.tables import PlanError

_WARMING_TOKENS = 8
Row = dict[str, Any]


def measure(plan: Plan, cell: Cell, target: Loaded, levels: list[Level], prompts: list[str]) -> Row:
    """The cell as JSON: takes of every repeat, and what was counted of auto.

    Nothing of an earlier cell is known: levels are built anew and costs are probed in an empty cache.
    """
    batches = batches_of(plan, cell, prompts, target.encode)
    _check_lengths(cell, target, batches)
    _forget(target, levels)
    field, decoder = contenders(levels, plan.lengths, plan.stock and cell.batch == 1), Decoder(target, cell, levels)
    generation = target.model.generation_config
    ends = generation.eos_token_id
    if cell.temperature:  # rows differ from contender to contender: all write the same number of tokens
        generation.eos_token_id, decoder.ends = None, frozenset()
    try:
        with own_costs():
            probe = warm(decoder, field, batches[-1], min(_WARMING_TOKENS, cell.new_tokens))
            if target.model.device.type == "cuda":
                repeats = in_blocks(decoder, field, batches)
            else:
                repeats = [repeat(decoder, field, rows, number) for number, rows in enumerate(batches[:-1])]
    finally:
        generation.eos_token_id = ends
        _forget(target, levels)
    return {**probe, "prompt_tokens": sum(len(row) for rows in batches[:-1] for row in rows),
            "takes": [takes for takes, _, _ in repeats],
            "rows": cell.batch * plan.repeats,
            "rows_differing": None if cell.temperature else sum(differing for _, differing, _ in repeats),
            "plans": added([counts for _, _, counts in repeats])}


def _forget(target: Loaded, levels: list[Level]) -> None:
    """Free what calls have kept of the target and of levels that are models in memory."""
    for model in (target.model, *(level.given for level in levels if level.is_made)):
        hf_mlspec.clear(model)


def batches_of(plan: Plan, cell: Cell, prompts: list[str], encode: Callable[[str], list[int]]) -> list[list[Any]]:
    """The ids of a batch for every repeat, and of one to warm with; a data set that is used up begins anew."""
    rows, at = [], 0
    for _ in range((plan.repeats + 1) * cell.batch):
        text, at = prompts[at % len(prompts)], at + 1
        ids = encode(text)
        while cell.prompt == "long" and len(ids) < plan.long:
            text, at = f"{text}\n\n{prompts[at % len(prompts)]}", at + 1
            ids = encode(text)
        rows.append(ids[: plan.long if cell.prompt == "long" else plan.short])
    return [rows[first : first + cell.batch] for first in range(0, len(rows), cell.batch)]


def _check_lengths(cell: Cell, target: Loaded, batches: list[list[list[int]]]) -> None:
    longest = max(len(row) for rows in batches for row in rows)
    if target.positions is not None and longest + cell.new_tokens > target.positions:
        raise PlanError(f"cell {cell.name}: prompts of {longest} tokens and {cell.new_tokens} new ones exceed the "
                        f"target's {target.positions} positions: lower long, short or new_tokens")


def warm(decoder: Decoder, field: list[Contender], rows: list[list[int]], new_tokens: int) -> Row:
    """Every contender once, auto last and twice: its first call has to probe the costs, and the second has not.

    The others come before it, so that weights, levels and kernels are loaded when the probe is timed.
    """
    auto = next(one for one in field if one.name == AUTO)
    for one in (one for one in field if one is not auto):
        decoder.take(one, rows, 0, new_tokens)
    first, second = (decoder.take(auto, rows, 0, new_tokens)[0] for _ in range(2))
    return {"first_call_seconds": first, "second_call_seconds": second, "probe_seconds": max(first - second, 0.0)}


def repeat(decoder: Decoder, field: list[Contender], rows: list[list[int]], number: int) -> tuple[Row, int, Row]:
    """Every contender on the same rows in turn, beginning with another one each time.

    -> takes by contender, the rows in which auto differs from the target alone, the plans of auto.
    """
    start = number % len(field)
    new_tokens = decoder.cell.new_tokens
    return _told({one.name: decoder.take(one, rows, number + 1, new_tokens) for one in field[start:] + field[:start]})


def in_blocks(decoder: Decoder, field: list[Contender], batches: list[list[list[int]]]) -> list[tuple[Row, int, Row]]:
    """`repeat` on a GPU, where a target keeps the graphs of two chains: auto and the target alone decode all batches
    in turn, then one contender after another; behind a call that is not timed, with the last batch, and auto, which
    learns, behind as many as are timed."""
    *timed, warming = batches
    new_tokens, found = decoder.cell.new_tokens, [{} for _ in timed]
    pair = [one for one in field if one.name in (ALONE, AUTO)]
    for group in (pair, *([one] for one in field if one not in pair)):
        for one in group:
            for seed in range(len(timed) if one.name == AUTO else 1):
                decoder.take(one, warming, seed, new_tokens)
        for number, rows in enumerate(timed):
            for one in group if number % 2 else group[::-1]:
                found[number][one.name] = decoder.take(one, rows, number + 1, new_tokens)
    return [_told(takes) for takes in found]


def _told(takes: dict[str, tuple[float, Any, list]]) -> tuple[Row, int, Row]:
    """What `repeat` returns, of what `Decoder.take` returned for every contender."""
    counted = {name: {"seconds": seconds, "tokens": sum(map(len, ids))} for name, (seconds, _, ids) in takes.items()}
    (_, counts, own), (_, _, alone) = takes[AUTO], takes[ALONE]
    differing = sum(got != told for got, told in zip(own, alone, strict=True))
    return counted, differing, counts.to_dict()["plans"]


def added(counts: list[Row]) -> Row:
    """Plans of several calls as one: their rounds, tokens and seconds added."""
    found: Row = {}
    for plans in counts:
        for name, values in plans.items():
            before = found.get(name, {})
            found[name] = {key: before.get(key, 0) + value for key, value in values.items()}
    return found
