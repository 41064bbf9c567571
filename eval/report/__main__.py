"""What do the JSON lines of earlier runs say? One Markdown report with pictures beside it.

    python -m eval.report results/*.jsonl [--out FOLDER] [--no-plots]

Reads lines of every program in eval/, in any mix, and decodes nothing. Lines of different machines stay in different
parts of the report, those of different runs in different tables; of a line that was measured twice on one machine at
one commit the newer counts. What is not known, broken or superseded is counted and named at the top. Lines of a
replay are labelled "replayed" wherever they appear. The same lines give the same bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eval.report import quality, speed
from eval.report.lines import Machine, ReportError, Results, read

Row = dict[str, Any]
# (kinds, heading, tables): in the order of the report
PARTS: list[tuple[tuple[str, ...], str, Callable[[list[Row]], Iterator[str]]]] = [
    (("task",), "Task scores", quality.tasks),
    (("fidelity",), "Fidelity", quality.fidelity),
    (("lossless",), "Chains against the target alone", quality.lossless),
    (("perplexity",), "Perplexity", quality.perplexity),
    (("probabilities",), "Token probabilities of two precisions", quality.probabilities),
    (("decode",), "Throughput", speed.throughput),
    (("decode",), "Where the time goes", speed.latency),
    (("average",), "Means over batch sizes", speed.averages),
    (("acceptance",), "Acceptance", speed.acceptance),
    (("paired acceptance",), "Two drafts of one target", quality.pairs),
    (("nested",), "Nested weights", quality.nested),
    (("ablation",), "Draft length", speed.ablation),
    (("memory",), "Memory", speed.memory),
    (("stream",), "Streams of requests", speed.streams),
    (("quantize",), "Quantizing", speed.quantizing),
    (("kernel",), "Kernels", speed.kernels),
]


def report(found: Results, pictures: dict[tuple[Machine, str, str], list[tuple[str, str]]]) -> str:
    """The Markdown; `pictures`: (machine, run, heading) -> file names with what they show."""
    out = ["# Results", "", *_intake(found), ""]
    machines = machines_of(found)
    for at, machine in enumerate(machines, 1):
        records = [row for row in found.records if row["machine"] == machine]
        commits = sorted({row["commit"] for row in records})
        out += [f"## Machine {at}: {machine}" if len(machines) > 1 else f"## {machine}", "",
                f"Commit{'s' * (len(commits) > 1)} {', '.join(f'`{commit}`' for commit in commits)}{_dates(records)}.",
                ""]
        for run in dict.fromkeys(row["run"] for row in records):
            out += _run(machine, run, [row for row in records if row["run"] == run], pictures)
    return "\n".join(out).rstrip() + "\n"


def _run(machine: Machine, run: str, records: list[Row], pictures) -> list[str]:
    out = [f"### {run}", ""]
    for kinds, heading, tables in PARTS:
        chosen = labelled([row for row in records if row["kind"] in kinds])
        text = list(tables(chosen)) if chosen else []
        shown = pictures.get((machine, run, heading), [])
        if text or shown:
            out += [f"#### {heading}", "", *text, *(f"![{what}]({name})\n" for name, what in shown)]
    return out


def machines_of(found: Results) -> list[Machine]:
    """In the order in which their lines came."""
    return list(dict.fromkeys(row["machine"] for row in found.records))


def labelled(records: list[Row]) -> list[Row]:
    """The records with what their names must say: that they are replayed, and the commit where there are several."""
    several = len({row["commit"] for row in records}) > 1

    def more(row: Row) -> str:
        says = "(replayed)" in row["label"]  # eval.replay's names say it already
        return " (replayed)" * (row["replayed"] and not says) + f" @{row['commit']}" * several

    return [{**row, "label": row["label"] + more(row), "suffix": more(row)} for row in records]


def _intake(found: Results) -> Iterator[str]:
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(found.counted.items()))
    yield f"{found.lines} lines of {found.files} file{'s' * (found.files > 1)}: {kinds}."
    if any(row["replayed"] for row in found.records):
        yield ("\n\"(replayed)\" marks runs on random weights that replay accepted lengths recorded elsewhere: their "
               "speed is measured, their acceptance is not theirs.")
    for kind, number in sorted(found.unknown.items()):
        yield f"\n**Not in this report:** {number} line{'s' * (number > 1)} of unknown kind `{kind}`."
    for kind, number in sorted(found.superseded.items()):
        yield f"\n{number} {kind} result{'s' * (number > 1)} measured again later; the newer one counts."
    for remark in found.remarks:
        yield f"\n**Not in this report:** {remark}."


def _dates(records: list[Row]) -> str:
    days = sorted({row["time"][:10] for row in records if row["time"]})
    return "" if not days else f", {days[0]}" if len(days) == 1 else f", {days[0]} to {days[-1]}"


def draw_all(found: Results, folder: Path) -> dict[tuple[Machine, str, str], list[tuple[str, str]]]:
    """Every picture of every run, written into the folder; (machine, run, heading) -> names and what they show."""
    # matplotlib takes a second, and a report without pictures does not need it.
    from eval.report.plots.draw import figures
    from eval.report.plots.figure import save

    written: dict[tuple[Machine, str, str], list[tuple[str, str]]] = {}
    machines = machines_of(found)
    for at, machine in enumerate(machines, 1):
        mine = [row for row in found.records if row["machine"] == machine]
        names: set[str] = set()
        for run in dict.fromkeys(row["run"] for row in mine):
            rows = [row for row in mine if row["run"] == run]
            for kinds, heading, _ in PARTS:
                for name, what, figure in figures(heading, labelled([r for r in rows if r["kind"] in kinds])):
                    file = _file_name(f"{at}-" * (len(machines) > 1) + f"{run}-{name}", names)
                    write(folder / file, lambda path, figure=figure: save(figure, path))
                    written.setdefault((machine, run, heading), []).append((file, what))
    return written


def _file_name(text: str, taken: set[str]) -> str:
    stem = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    name = next(name for at in range(1, len(taken) + 2)
                if (name := f"{stem}{f'-{at}' * (at > 1)}.png") not in taken)
    taken.add(name)
    return name


def write(file: Path, writing: Callable[[Path], object]) -> None:
    """Whole or not at all: written beside it, then renamed."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        writing(beside)
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="JSON lines of programs in eval/")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="FOLDER",
                        help="gets report.md and the pictures (%(default)s)")
    parser.add_argument("--no-plots", action="store_true", help="tables only; needs no matplotlib")
    args = parser.parse_args(argv)
    if not args.no_plots and importlib.util.find_spec("matplotlib") is None:
        print("pictures need matplotlib: pip install 'hf-mlspec[eval]', or say --no-plots", file=sys.stderr)
        return 2
    try:
        found = read(args.files)
        args.out.mkdir(parents=True, exist_ok=True)
        pictures = {} if args.no_plots else draw_all(found, args.out)
        text = report(found, pictures)
        write(args.out / "report.md", lambda path: path.write_text(text, encoding="utf-8"))
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{args.out} cannot be written: {error}; name another folder with --out", file=sys.stderr)
        return 2
    count = sum(map(len, pictures.values()))
    print(f"{args.out / 'report.md'}: {len(found.records)} results, {count} pictures")
    for said in (*(f"unknown kind: {kind}, {number} lines" for kind, number in sorted(found.unknown.items())),
                 *found.remarks):
        print(said, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
