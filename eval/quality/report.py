"""What came out of a plan? Markdown tables in the form of QSpec's: systems side by side, and how they differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from eval.quality.plan import Plan
from eval.quality.units import Unit
from eval.records.writer import Results

_MOST_DIFFERENCES = 50  # of one system on one thing; the lines hold all
Line = dict[str, Any]


def report(plan: Plan, units: Sequence[Unit], results: Results) -> Iterator[str]:
    """The tables of what is finished, and what is not."""
    found = {id(unit): unit.line(results) for unit in units}
    lines = {part: [line for unit in units if unit.part == part and (line := found[id(unit)])]
             for part in ("tasks", "fidelity", "perplexity", "probabilities")}
    done = sum(line is not None for line in found.values())
    yield f"## {plan.name}\n\n{done} of {len(units)} results.\n"
    if lines["tasks"]:
        yield from _tasks(plan, lines["tasks"], results)
    if lines["fidelity"]:
        yield from _fidelity(plan, lines["fidelity"])
    if lines["perplexity"]:
        yield from _perplexity(lines["perplexity"])
    if lines["probabilities"]:
        yield from _probabilities(lines["probabilities"])
    yield from _differences(plan, [*lines["tasks"], *lines["fidelity"]])


def lossy(plan: Plan, line: Line) -> bool:
    """Whether a system with levels wrote another id than its target alone: what must never be."""
    return bool(plan.system(line["system"]).levels and line.get("differences"))


def _tasks(plan: Plan, first: list[Line], results: Results) -> Iterator[str]:
    """A row per task and metric, a column per system: value, standard error, and the distance from its reference."""
    of_plan = {(line["system"], line["task"], tuple(line["asked"]["task"].items())) for line in first}
    lines = [line for line in results.rows if line["kind"] == "task" and line["name"] == plan.name
             and (line["system"], line["task"], tuple(line["asked"]["task"].items())) in of_plan]
    cells = {(line["task"], line["metric"], line["system"]): line for line in lines}
    systems = [system for system in plan.systems if any(key[2] == system.name for key in cells)]
    keys = list(dict.fromkeys((line["task"], line["metric"]) for line in lines))
    yield "### Tasks\n"
    yield table(["task", "metric", "items", *(system.name for system in systems)],
                ([*key, max(line["items"] for line in lines if (line["task"], line["metric"]) == key),
                  *(_score(cells, key, system) for system in systems)] for key in keys), left=2)
    compared = [line for line in first if line["identical_items"] is not None]
    if compared:
        yield "Items answered with the same ids as the reference, or scored with the same numbers:\n"
        yield table(["system", "reference", "task", "identical items"],
                    ([line["system"], plan.system(line["system"]).reference, line["task"],
                      f"{line['identical_items']} of {line['items']}"] for line in compared), left=3)


def _score(cells: dict[tuple[str, str, str], Line], key: tuple[str, str], system: Any) -> str:
    line, reference = cells.get((*key, system.name)), cells.get((*key, system.reference))
    if line is None:
        return "-"
    error = "" if line["stderr"] is None else f" ± {line['stderr']:.3f}"
    change = "" if reference is None else f" ({line['value'] - reference['value']:+.3f})"
    return f"{line['value']:.3f}{error}{change}"


def _fidelity(plan: Plan, lines: list[Line]) -> Iterator[str]:
    yield f"### Fidelity: greedy continuations of at most {plan.max_new_tokens} tokens\n"
    yield table(["system", "reference", "data", "batch", "prompts", "all tokens equal", "95 % interval",
                 "first difference, of those that differ", "tokens in common, of all", "tokens"],
                ([line["system"], line["reference"], line["data"], line["batch"], line["prompts"],
                  f"{line['equal']} ({line['equal_share']:.1%})",
                  " to ".join(f"{edge:.1%}" for edge in line["equal_share_interval"]),
                  _number(line["mean_first_difference"], 1), _number(line["mean_common_tokens"], 1), line["tokens"]]
                 for line in lines), left=3)


def _perplexity(lines: list[Line]) -> Iterator[str]:
    yield "### Perplexity\n"
    yield table(["system", "text", "tokens", "per token", "per word", "bits per byte"],
                ([line["system"], line["data"], line["tokens"], _number(line["token_perplexity"], 3),
                  _number(line["word_perplexity"], 3), _number(line["bits_per_byte"], 4)] for line in lines), left=2)


def _probabilities(lines: list[Line]) -> Iterator[str]:
    yield "### Probabilities of the tokens that the reference writes\n"
    yield table(["system", "reference", "data", "tokens", "Pearson r", "mean difference"],
                ([line["system"], line["reference"], line["data"], line["tokens"], _number(line["pearson_r"], 4),
                  _number(line["mean_difference"], 4)] for line in lines), left=3)


def _differences(plan: Plan, lines: list[Line]) -> Iterator[str]:
    """Whether the chains kept their promise, and every place where one did not."""
    promised = [line for line in lines if plan.system(line["system"]).levels]
    broken = [line for line in promised if lossy(plan, line)]
    if promised:
        number = sum(len(line["differences"]) for line in broken)
        yield (f"Systems with levels against their target alone: {number} "
               f"difference{'' if number == 1 else 's'}{':' if number else '.'}")
    for line in broken:
        what = line.get("task") or line["data"]
        for place in line["differences"][:_MOST_DIFFERENCES]:
            yield f"- {line['system']}, {what}, item {place['item']}, position {place['position']}"
        if (more := len(line["differences"]) - _MOST_DIFFERENCES) > 0:
            yield f"- {line['system']}, {what}: {more} more"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are words."""
    lines = [list(head), ["---" if column < left else "--:" for column in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"
