"""How is a throughput plan run so that it may be killed at any moment? Unit by unit, each kept at once.

A unit is one batch that every contender decodes in turn. Ratios are taken inside units only, so a run that was killed
and goes on hours later is as honest as one that was not: both sides of a ratio met the same minutes of the machine.
Another machine, other settings or another commit are refused: their units would meet in one mean.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from eval.bench_decode import memory
from eval.bench_decode.lines import PEERS, lines
from eval.bench_decode.plan import ALONE, STOCK, Contender, Plan, Unit, check, contenders, read_plan, sizes_of, units
from eval.bench_decode.takes import Decoder, Decoders, unit
from eval.plans.identity import digest, fingerprint, level_weights
from eval.plans.models import Loaded, Models, check_levels
from eval.plans.places import Places
from eval.plans.tables import PlanError
from eval.records import machine
from eval.records.progress import Bars
from eval.records.writer import OTHER_RESULTS, Results
from hf_mlspec.evaluation import Journal

Row = dict[str, Any]


def run(args: argparse.Namespace, console: Console) -> int:
    """Whatever of the plan is not done yet, its lines, its table; -> 1 where a chain wrote other ids than its target.

    PlanError, ResultsError and ValueError (of the journal) name what cannot be.
    """
    disable_progress_bar()  # of weights being loaded; the units have their own
    plan = read_plan(args.plan)
    places = Places.of(args.models, args.data)
    prompts = check(plan, places, args.plan)
    card = {name: value for name, value in machine.card(args.device).items() if name != "time"}
    weights = {system.name: [fingerprint(Path(places.fill(system.model))), level_weights(system, places)]
               for system in plan.systems}
    asked = {"plan": asdict(plan), "machine": card, "weights": weights, "prompts": digest(prompts)}
    file = args.results / f"{plan.name}.jsonl"
    journal = Journal(args.results / plan.name / "decode.jsonl", asked, elsewhere=OTHER_RESULTS)
    try:
        with journal:
            measure(plan, places, prompts, journal, args.device)
            found = journal.items
    except PlanError:
        if not len(journal):
            journal.path.unlink()  # it would refuse the corrected plan
        raise
    with Results(file, plan.name, args.device, elsewhere=OTHER_RESULTS) as results:
        for kind, values, identity in all_lines(plan, found):
            if results.find(kind, asked, **identity) is None:
                results.add(kind, values, asked=asked)
        rows = [row for row in results.rows if row["name"] == plan.name]
    show(plan, rows, console)
    console.print(f"lines in {file}; python -m eval.report {file} makes tables and pictures of them", markup=False)
    return 1 if any(row.get("rows_differing") for row in rows) else 0


def measure(plan: Plan, places: Places, prompts: dict[str, list[str]], journal: Journal, device: str) -> None:
    """Decode the units, and ask for the memory, that the journal does not have."""
    left = [one for one in units(plan) if one.key not in journal]
    held = [one for one in memory_keys(plan) if one[0] not in journal] if plan.memory else []
    if not left and not held and "reads" in journal:
        return
    field_ = contenders(plan)
    targets = {one.system.format: one.system for one in field_}
    loaded = {format: Models(places, device).load(system) for format, system in targets.items()}
    for system in plan.systems:
        check_levels(system, _with_levels(loaded[system.format], places, system))
    first = loaded[field_[0].system.format]
    rows = {name: [first.encode(text) for text in texts] for name, texts in prompts.items()}
    _check_lengths(plan, first, rows)
    if "reads" not in journal:
        journal.add("reads", reads_of(field_, places, {format: one.model for format, one in loaded.items()}))
    decoders = Decoders({format: Decoder(one, places, plan.max_new_tokens) for format, one in loaded.items()})
    with Bars() as progress:
        _measure_units(left, field_, decoders, rows, journal, progress)
        task = progress.add_task("memory", total=len(held), visible=bool(held))
        for key, one, data, size in held:
            journal.add(key, memory.ask(memory.request(one, places, rows[data][:size], plan.max_new_tokens, device)))
            progress.advance(task)


def _check_lengths(plan: Plan, loaded: Loaded, rows: dict[str, list[list[int]]]) -> None:
    for name, ids in rows.items():
        longest = max(map(len, ids))
        if loaded.positions is not None and longest + plan.max_new_tokens > loaded.positions:
            raise PlanError(f"[[data]] {name!r}: its longest prompt has {longest} tokens, which with "
                            f"{plan.max_new_tokens} new ones exceed the target's {loaded.positions} positions: lower "
                            "max_new_tokens")


def _with_levels(loaded, places: Places, system):
    return type(loaded)(loaded.model, loaded.tokenizer, [places.fill(level) for level in system.levels])


def _measure_units(left: list[Unit], field_: list[Contender], decoder: Decoders, rows, journal: Journal,
                   progress: Bars) -> None:
    probe, warmed = machine.ReadProbe(), set()
    task = progress.add_task("decoding", total=len(left), visible=bool(left))
    for one in left:
        batch = rows[one.data][one.batch * one.size:][: one.size]
        there = [contender for contender in field_ if contender.takes_part(one.size)]
        if (one.data, one.size) not in warmed:
            for contender in there:
                decoder.warm(contender, batch)
            warmed.add((one.data, one.size))
        journal.add(one.key, unit(decoder, there, batch, one.repeat + one.batch, probe))
        progress.advance(task)


def reads_of(field_: list[Contender], places: Places, targets: dict[str | None, Any]) -> dict[str, list[int]]:
    """By contender: bytes that one pass of its target (by format) reads, then of each level. Stock generate counts no
    passes."""
    asked = {(one.system.format, word): None for one in field_ for word in (None, *one.system.levels)}
    read = {(format, word): memory.reads(None if word is None else places.fill(word), targets[format])
            for format, word in asked}
    return {one.name: [] if one.way in ("stock", "assisted") else
            [read[one.system.format, word] for word in (None, *one.system.levels)] for one in field_}


def memory_keys(plan: Plan) -> list[tuple[str, Contender, str, int]]:
    """(key, contender, data, batch size), on the first data file of each size; ablations hold what their chain does.
    """
    by_size: dict[int, str] = {}
    for data in plan.data:
        for size in sizes_of(plan, data):
            by_size.setdefault(size, data.name)
    return [(f"memory of {one.name}, batch size {size}", one, data, size) for size, data in sorted(by_size.items())
            for one in contenders(plan) if one.ablation is None and one.takes_part(size)]


def all_lines(plan: Plan, found: Row) -> list[tuple[str, Row, Row]]:
    """(kind, values, what tells the line from others of its kind) of everything that was measured."""
    made, every = [], contenders(plan)
    for data in plan.data:
        for size in sorted(set(sizes_of(plan, data))):
            same = [found[one.key] for one in units(plan) if (one.data, one.size) == (data.name, size)]
            for one in (one for one in every if one.takes_part(size)):
                for kind, values in lines(one, data.name, size, same, found["reads"][one.name], (*PEERS, *plan.over)):
                    made.append((kind, values, _identity(values)))
    for key, one, _, size in memory_keys(plan) if plan.memory else []:
        values = {"contender": one.name, "batch": size, **found[key]}
        made.append(("memory", values, {"contender": one.name, "batch": size}))
    return made


def _identity(values: Row) -> Row:
    names = ("contender", "system", "level_index", "data", "batch", "num_draft_tokens")
    return {name: values[name] for name in names if name in values}


def show(plan: Plan, rows: list[Row], console: Console) -> None:
    """A row a contender and batch size; ratios are geometric means over its units."""
    peers = (ALONE, STOCK, *plan.over)
    table = Table("contender", "data", "batch", "tokens/s", *(f"x {peer}" for peer in peers), "tokens/pass",
                  "bandwidth", "rows that differ",
                  title=f"{plan.name}: decode-only, {plan.max_new_tokens} new tokens, greedy")
    for row in (row for row in rows if row["kind"] == "decode"):
        table.add_row(escape(row["contender"]), row["data"], str(row["batch"]), _number(row["tokens_per_second"], 1),
                      *(_number(row["over"].get(peer)) for peer in peers), _number(row["tokens_per_pass"]),
                      _number(row["bandwidth_share"]), f"{row.get('rows_differing', '')}")
    console.print(table)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
