"""What does a server cost over the stream it stands on, and how does it compare with transformers' own?

    python -m eval.bench_serve --clients 16 --json out.jsonl
    python -m eval.bench_serve --quick                      # few requests of few tokens

Clients ask for one greedy completion after another, each for its own number of tokens (log-uniform). Contenders:
generate_stream without HTTP, `mlspec serve` with the same levels and with none, and `transformers serve
--continuous-batching`, also with this package's streams behind it. Contenders take turns, so that each run has one of
every other next to it. The first turn warms them up; medians over the others, also of what a contender's run is of the
first contender's in the same turn. Texts are compared.

    python -m eval.bench_serve --soak 600 --clients 64      # minutes of answers, each compared with generate alone
    python -m eval.bench_serve --soak 600 --clients 64 --only "transformers serve"      # the same load
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import hf_mlspec
from eval.few import add_quick, limits, require_limits, settle
from eval.records import machine
from hf_mlspec.evaluation import check_words, levels_of_options, read_prompts

from .clients import Seen, Work
from .contenders import (
    Ask,
    free_port,
    our_server,
    served,
    serving,
    stream_alone,
    their_server,
    their_server_with_levels,
)
from .soak import answers_alone, soak

CONTENDERS = ("stream", "mlspec serve", "stream, target alone", "mlspec serve, target alone", "transformers serve",
              "transformers serve with levels")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_serve", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of the target (the demo pair's)")
    parser.add_argument("--level", action="append", default=[], help="levels with + between; may be repeated")
    parser.add_argument("--prompts", type=Path, help="text with one prompt a line, .jsonl or .json")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, help="(64)")
    parser.add_argument("--shortest", type=int, help="smallest limit of new tokens (16)")
    parser.add_argument("--longest", type=int, help="largest limit of new tokens (128)")
    parser.add_argument("--repeats", type=int, help="(3)")
    parser.add_argument("--threads", type=int, default=1, help="of the models; clients have a process of their own")
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="leave out the others; may be repeated")
    parser.add_argument("--server-cpus", metavar="LIST", help="cores of what decodes, as of taskset: 0-7")
    parser.add_argument("--http-cpus", metavar="LIST", help="of `mlspec serve`'s process that speaks HTTP (the same)")
    parser.add_argument("--their-python", metavar="FILE", help="of an environment with transformers' server")
    parser.add_argument("--soak", type=float, metavar="SECONDS",
                        help="ask `mlspec serve`, or the servers of --only, for so long instead")
    parser.add_argument("--seed", type=int, default=0, help="of the limits")
    add_quick(parser, "6 requests of 2 to 8 tokens, 1 repeat")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line a contender")
    args = parser.parse_args(argv)
    few = {"requests": 6, "shortest": 2, "longest": 8, "repeats": 1}
    many = {"requests": 64, "shortest": 16, "longest": 128, "repeats": 3}
    settle(args, few, many)
    require_limits(parser, args)
    streams = [one for one in args.only or () if one.startswith("stream")]
    if args.soak and streams:
        parser.error(f"--soak asks servers, and {streams[0]!r} is none: name another with --only")
    return args


def work_of(args: argparse.Namespace, demo: Any) -> Work:
    """The requests: prompts in turn, limits at random."""
    prompts = read_prompts(args.prompts or Path(demo[0]).parent / "prompts.json", None)
    return [(prompts[number % len(prompts)], limit) for number, limit in enumerate(limits(args))]


def contender_of(
    name: str, folder: str, levels: list[str], work: Work, args: argparse.Namespace
) -> AbstractContextManager[Ask]:
    """Somebody who answers all requests as often as asked."""
    levels = [] if "alone" in name else levels
    if name.startswith("stream"):
        return stream_alone(folder, levels, work, args.clients, args.threads, args.server_cpus)
    port = free_port()
    words = command(name, folder, levels, port, args)
    return served(words, port, folder, work, args.clients, args.threads, args.server_cpus, args.http_cpus)


def in_turns(names: Sequence[str], folder: str, levels: list[str], work: Work,
             args: argparse.Namespace) -> dict[str, list[Seen]]:
    """What clients saw of each contender, run by run, all of which are there at a time."""
    with ExitStack() as all_of_them:
        asks = {name: all_of_them.enter_context(contender_of(name, folder, levels, work, args)) for name in names}
        turns = [{name: ask() for name, ask in asks.items()} for _ in range(args.repeats + 1)][1:]
    return {name: [turn[name] for turn in turns] for name in names}


def command(contender: str, folder: str, levels: list[str], port: int, args: argparse.Namespace) -> list[str]:
    """Of a server."""
    if contender.startswith("mlspec"):
        return our_server(folder, levels, args.clients, port)
    if contender.endswith("levels"):
        return their_server_with_levels(folder, levels, args.clients, port)
    return their_server(folder, port, args.their_python)


def soaked(contender: str, folder: str, levels: list[str], work: Work, args: argparse.Namespace) -> dict[str, Any]:
    """What came of asking a server for minutes."""
    levels, port = [] if "alone" in contender else levels, free_port()
    words, cpus = command(contender, folder, levels, port, args), (args.server_cpus, args.http_cpus)
    with serving(words, port, args.threads, *cpus) as pid:
        expected = answers_alone(folder, work, args.threads)  # while the server begins
        found = soak(pid(), port, folder, work, expected, args.clients, args.soak)
    return {"contender": f"{contender}, soak", "clients": args.clients, "threads": args.threads, **found.figures()}


def entry(contender: str, runs: list[Seen], first: list[Seen], args: argparse.Namespace) -> dict[str, Any]:
    """Medians of a contender's runs, and of the tokens per second over those of the first contender's run in the same
    turn; how many of its texts are those of the first contender."""
    each, theirs = ([one.figures() for one in line] for line in (runs, first))
    found = {name: statistics.median(line[name] for line in each) for name in each[0]}
    speeds = [line["tokens_per_s"] for line in each]
    ratios = [speed / line["tokens_per_s"] for speed, line in zip(speeds, theirs, strict=True)]
    alike = sum(a == b for a, b in zip(first[-1].texts, runs[-1].texts, strict=True))
    return {"contender": contender, "clients": args.clients, "requests": args.requests, "threads": args.threads,
            **found, "of_first": statistics.median(ratios), "of_first_each": ratios, "texts_alike": alike}


def main(argv: list[str] | None = None) -> int:
    args, demo, console = parse(argv), hf_mlspec.demo_pair(), Console(width=120)
    levels = levels_of_options(args.level) or ([] if args.model else ["mxfp4", str(demo[1])])
    check_words(levels)
    folder, work, entries = args.model or str(demo[0]), work_of(args, demo), []
    if args.soak:
        for contender in args.only or ["mlspec serve"]:
            entries.append(soaked(contender, folder, levels, work, args))
            for name, value in entries[-1].items():
                console.print(f"{name}: {value}")
        _write(entries, levels, args)
        return int(any(one["wrong"] or one["failed"] for one in entries if one["contender"].startswith("mlspec")))
    runs = in_turns(args.only or CONTENDERS, folder, levels, work, args)
    entries = [entry(name, seen, next(iter(runs.values())), args) for name, seen in runs.items()]
    table = Table("contender", "tokens/s", "of the first", "CPU s", "beside, s", "first token p50, ms", "p99, ms",
                  "texts alike")
    for one in entries:
        table.add_row(one["contender"], f"{one['tokens_per_s']:.0f}",
                      f"{one['of_first']:.2f}", f"{one['cpu_seconds']:.2f}",
                      f"{one['beside_seconds']:.2f}",
                      f"{one['first_p50_ms']:.0f}",
                      f"{one['first_p99_ms']:.0f}", f"{one['texts_alike']} of {args.requests}")
    console.print(table)
    _write(entries, levels, args)
    return 0


def _write(entries: list[dict[str, Any]], levels: list[str], args: argparse.Namespace) -> None:
    if args.json:
        with args.json.open("a", encoding="utf-8") as file:
            for one in entries:
                file.write(json.dumps({**one, "levels": levels, "machine": machine.card()}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
