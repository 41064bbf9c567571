"""How long do running rows wait while a long prompt joins, and how long for the first token behind a kept prefix?

    python -m eval.bench_prompts --model PATH --device cuda --json out.jsonl
    python -m eval.bench_prompts --shape llama-3-8b --device cuda   # random weights
    python -m eval.bench_prompts --quick                    # the demo pair, short prompts

Gap: rows run in a stream, and a request with a long prompt of random tokens joins. Of one running row the longest time
between two of its rounds from the join until the long prompt has its first token, over the median time before the
join; once with chunks, and once with prompts read at once. longest_at in --json: where it began, 0 as the request came
and 1 with its first token; gaps_over_3: how many of the gaps were longer than three median ones. Prefix: requests
come one after another, all with the same first tokens; time to the first token with prefixes kept over that without.
First runs warm up, and their figures go to --json alone; medians over the others. Tokens are compared. A model of
fewer positions is given more: its tokens mean nothing then, and its times are the same.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_mlspec
from eval.few import add_quick, settle
from eval.records import machine
from eval.targets import SHAPES, random_model
from hf_mlspec.evaluation import check_words, levels_of_options

_TAIL = 40  # tokens of a prompt behind the common prefix


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_prompts", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of the target (the demo pair's)")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a target of random BF16 weights instead")
    parser.add_argument("--level", action="append", default=[], help="levels with + between; may be repeated")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4, help="that run while the long prompt joins (%(default)s)")
    parser.add_argument("--joining", type=int, help="tokens of the long prompt (8000)")
    parser.add_argument("--before", type=int, help="rounds before it joins (60)")
    parser.add_argument("--prefix", type=int, help="tokens of the common prefix (2000)")
    parser.add_argument("--repeats", type=int, help="(3)")
    parser.add_argument("--chunk", type=int, default=512, help="prefill_chunk of the stream (%(default)s)")
    parser.add_argument("--log-probs", action="store_true", help="ask for log probabilities: no captured rounds")
    parser.add_argument("--seed", type=int, default=0)
    add_quick(parser, "a prompt of 600 tokens, a prefix of 400, 1 repeat")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line a figure")
    args = parser.parse_args(argv)
    if args.shape and args.model:
        parser.error("--shape is a target of random weights, --model one of a folder: give one of them")
    settle(args, {"joining": 600, "before": 6, "prefix": 400, "repeats": 1},
           {"joining": 8000, "before": 60, "prefix": 2000, "repeats": 3})
    return args


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, list[Any]]:
    """The target and its levels, all with positions for the longest row."""
    levels = levels_of_options(args.level)
    check_words(levels)
    folder, positions = args.model or str(hf_mlspec.demo_pair()[0]), 2 * max(args.joining, args.prefix) + 4096

    def model(path: str) -> PreTrainedModel:
        found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, max_position_embeddings=positions)
        return found.eval().to(args.device)

    if args.shape:
        target = random_model(args.shape, args.device, max_position_embeddings=positions, pad_token_id=0)
    else:
        target = model(folder)
    return target, [model(one) if Path(one).is_dir() else one for one in levels]


def joined(target: PreTrainedModel, levels: list[Any], args: argparse.Namespace, chunk: int | None) -> dict[str, Any]:
    """One run: gaps of a running row before and while the long prompt joins, seconds to its first token."""
    rng, rounds, asked, first = random.Random(args.seed), [], None, None
    new = 64 * (args.before + args.joining)  # more than they get: they are cancelled
    prompts = [[rng.randrange(5, 900) for _ in range(20)] for _ in range(args.rows)]
    long = [rng.randrange(5, 900) for _ in range(args.joining)]
    most = target.config.max_position_embeddings - 64
    options = {"logprobs": 0} if args.log_probs else {}
    running = [hf_mlspec.Request(prompt, id=n, max_new_tokens=min(new, most - 20), **options)
               for n, prompt in enumerate(prompts)]

    def source() -> Iterator[Any]:
        nonlocal asked
        yield from running
        while len(rounds) <= args.before:
            yield None
        asked = time.perf_counter()
        yield hf_mlspec.Request(long, id="long", max_new_tokens=24, **options)

    tokens: dict[Any, list[int]] = {}
    for event in hf_mlspec.generate_stream(target, source(), max_batch=args.rows + 1, assistant_models=levels,
                                           prefill_chunk=chunk, events=True, do_sample=False, eos_token_id=[]):
        if isinstance(event, hf_mlspec.Completion):
            if event.error is not None:
                raise event.error
            tokens[event.id] = event.new_tokens
            if event.id == "long":
                for one in running:
                    one.cancel()
        elif event.id == 0:
            rounds.append(time.perf_counter())
        elif event.id == "long" and first is None:
            first = time.perf_counter()
    usual = statistics.median(b - a for a, b in [*pairwise(rounds)][2:] if b <= asked)
    beside = [(b - a, a) for a, b in pairwise(rounds) if b > asked and a < first + usual]
    worst, at = max(beside)
    return {"median_gap_ms": 1e3 * usual, "longest_gap_ms": 1e3 * worst, "ratio": worst / usual,
            "first_token_ms": 1e3 * (first - asked), "longest_at": (at - asked) / (first - asked),
            "gaps": len(beside), "gaps_over_3": sum(gap > 3 * usual for gap, _ in beside),
            "tokens": {"long": tokens["long"], "first": tokens[0][: args.before]}}


def prefixed(target: PreTrainedModel, levels: list[Any], args: argparse.Namespace, kept: str | None) -> dict[str, Any]:
    """One run: the median time to the first token of prompts with the same beginning, behind the first of them."""
    rng, asked, first, tokens = random.Random(args.seed), {}, {}, {}
    prefix = [rng.randrange(5, 900) for _ in range(args.prefix)]

    def source() -> Iterator[Any]:
        for number in range(6):
            rest = [rng.randrange(5, 900) for _ in range(_TAIL)]
            other = [rng.randrange(5, 900) for _ in range(30)]  # else the slot would hold the prefix
            yield hf_mlspec.Request(other, id=("other", number), max_new_tokens=2)
            asked[number] = time.perf_counter()
            yield hf_mlspec.Request([*prefix, *rest], id=number, max_new_tokens=16)

    for event in hf_mlspec.generate_stream(target, source(), max_batch=1, assistant_models=levels, events=True,
                                           prefill_chunk=args.chunk, prefix_cache=kept, do_sample=False,
                                           eos_token_id=[]):
        if isinstance(event, hf_mlspec.Completion):
            if event.error is not None:
                raise event.error
            tokens[str(event.id)] = event.new_tokens
        else:
            first.setdefault(event.id, time.perf_counter())
    waits = [first[number] - asked[number] for number in asked]
    return {"first_token_ms": 1e3 * statistics.median(waits[1:]), "tokens": tokens}


def measure(name: str, ways: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians of every way of one figure, taking turns; AssertionError where they write other tokens."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(args.repeats + 1):
        for way, run in ways.items():
            runs[way].append(run())
    tokens = [one.pop("tokens") for line in runs.values() for one in line]
    if any(one != tokens[0] for one in tokens):
        raise AssertionError(f"{name}: ways write other tokens")
    return [{"figure": name, "way": way, **{key: statistics.median(one[key] for one in line[1:]) for key in line[0]},
             "of_first_run": line[0]} for way, line in runs.items()]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    target, levels = load(args)
    rows = measure("gap", {"chunks": lambda: joined(target, levels, args, args.chunk),
                           "at once": lambda: joined(target, levels, args, None)}, args)
    rows += measure("prefix", {"kept": lambda: prefixed(target, levels, args, "1GiB"),
                               "read anew": lambda: prefixed(target, levels, args, None)}, args)
    rows[-2]["ratio"], rows[-1]["ratio"] = rows[-2]["first_token_ms"] / rows[-1]["first_token_ms"], 1.0
    made = Table("figure", "way", "median gap, ms", "longest gap, ms", "x", "first token, ms")
    for row in rows:
        gap = [f"{row[key]:.2f}" if key in row else "" for key in ("median_gap_ms", "longest_gap_ms")]
        made.add_row(row["figure"], row["way"], *gap, f"{row['ratio']:.3f}", f"{row['first_token_ms']:.1f}")
    Console(width=None if Console().is_terminal else 120).print(made)
    if args.json:
        asked = {name: str(value) for name, value in vars(args).items()}
        with args.json.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps({**row, "machine": machine.card(), "asked": asked}) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
