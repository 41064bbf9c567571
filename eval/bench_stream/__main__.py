"""What does it bring that a finished row's slot is refilled at once, over batches that wait for their longest row?

    python -m eval.bench_stream --model PATH --level PATH --prompts FILE --json out.jsonl
    python -m eval.bench_stream --shape llama-3-8b --device cuda    # random weights, prompts of random tokens
    python -m eval.bench_stream --quick                     # the demo pair, few requests

Requests with limits of very different lengths (log-uniform, end-of-sequence tokens ignored, so that every contender
has the same work) are decoded with the target alone and with the levels: as a stream, in static batches in their order
of arrival, where a row that reached its limit goes on until its batch has ended, one by one, and, if that is named, as
a stream whose rounds are not captured. What counts are the tokens that were asked for, a second. The static batches of
one contender are one call of generate each, with the batch's largest limit. With a temperature every request has a
seed of its own, which batches have not: streams only. Contenders take turns; medians over repeats. Ids are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec
from eval.few import add_quick, limits, require_limits, settle
from eval.records import machine
from eval.targets import SHAPES, random_model
from hf_mlspec.evaluation import check_words, levels_of_options, read_prompts

Work = list[tuple[list[int], dict[str, Any]]]  # prompt of every request, and its options, of which one is the limit
_LIMIT = "max_new_tokens"
Written = tuple[list[list[int]], list[float]]  # new tokens of every request, seconds until it was there


def as_stream(model: PreTrainedModel, levels: list, work: Work, max_batch: int) -> Written:
    begin, new, seconds = time.perf_counter(), [[] for _ in work], [0.0] * len(work)
    requests = (hf_mlspec.Request(ids, id=number, **options) for number, (ids, options) in enumerate(work))
    for done in hf_mlspec.generate_stream(model, requests, max_batch=max_batch, assistant_models=levels,
                                          eos_token_id=[]):
        if done.error is not None:
            raise done.error
        new[done.id], seconds[done.id] = done.new_tokens, time.perf_counter() - begin
    return new, seconds


def step_by_step(model: PreTrainedModel, levels: list, work: Work, max_batch: int) -> Written:
    """Who may ask for log probabilities is not in captured rounds; without events nobody computes them."""
    return as_stream(model, levels, [(ids, {**options, "logprobs": 0}) for ids, options in work], max_batch)


def in_batches(model: PreTrainedModel, levels: list, work: Work, max_batch: int) -> Written:
    begin, new, seconds = time.perf_counter(), [], []
    for first in range(0, len(work), max_batch):
        batch = work[first : first + max_batch]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([[0] * (width - len(row)) + row for row, _ in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row, _ in batch], device=model.device)
        longest = max(options[_LIMIT] for _, options in batch)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest,
                             assistant_models=levels, do_sample=False, eos_token_id=[])
        new += [row[: options[_LIMIT]] for row, (_, options) in zip(out[:, width:].tolist(), batch, strict=True)]
        seconds += [time.perf_counter() - begin] * len(batch)
    return new, seconds


def one_by_one(model: PreTrainedModel, levels: list, work: Work, max_batch: int) -> Written:
    return in_batches(model, levels, work, 1)


CONTENDERS: dict[str, Callable[[PreTrainedModel, list, Work, int], Written]] = {
    "stream": as_stream, "static batches": in_batches, "one by one": one_by_one, "step by step": step_by_step,
}  # fmt: skip
_ASKED = "stream", "static batches", "one by one"  # where no contender is named
_SEEDED = "stream", "step by step"  # a seed of every request


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_stream", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of the target (the demo pair's)")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a target of random BF16 weights instead")
    parser.add_argument("--level", action="append", default=[], help="levels with + between; may be repeated")
    parser.add_argument("--prompts", type=Path, help="text with one prompt a line, .jsonl or .json")
    parser.add_argument("--requests", type=int, help="(32)")
    parser.add_argument("--shortest", type=int, help="smallest limit of new tokens (8)")
    parser.add_argument("--longest", type=int, help="largest limit of new tokens (256)")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, help="(3)")
    parser.add_argument("--seed", type=int, default=0, help="of the limits")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="(all but step by step)")
    parser.add_argument("--temperature", type=float, help="sample with it; streams only (greedy)")
    parser.add_argument("--threads", type=int, default=2)
    add_quick(parser, "6 requests of 2 to 12 tokens, 1 repeat")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line a contender")
    args = parser.parse_args(argv)
    few = {"requests": 6, "shortest": 2, "longest": 12, "repeats": 1}
    many = {"requests": 32, "shortest": 8, "longest": 256, "repeats": 3}
    settle(args, few, many)
    require_limits(parser, args)
    if args.shape and (args.model or args.prompts):
        parser.error("--shape has random weights and no tokenizer: no --model and no --prompts goes with it")
    args.contenders = args.contenders or list(_ASKED if args.temperature is None else _SEEDED)
    if args.temperature is not None and (others := sorted({*args.contenders} - {*_SEEDED})):
        parser.error(f"--temperature: {', '.join(others)} have no seed of every request: leave them out")
    if args.temperature is not None and not args.temperature > 0:
        parser.error(f"--temperature is {args.temperature}, it must be above 0; leave it out for greedy requests")
    return args


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, list[str], Work]:
    """The target, its levels, and the requests."""
    levels = levels_of_options(args.level)
    check_words(levels)
    if args.shape:
        return _of_shape(args, levels)
    demo = hf_mlspec.demo_pair()
    folder = args.model or str(demo[0])
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()
    target.to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    file = args.prompts or Path(demo[0]).parent / "prompts.json"
    encoded = [tokenizer(text)["input_ids"] for text in read_prompts(file, args.requests)]
    return target, levels or ([] if args.model else [str(demo[1])]), _work(encoded, args)


def _of_shape(args: argparse.Namespace, levels: list[str]) -> tuple[PreTrainedModel, list[str], Work]:
    """A target of random weights, and prompts of 20 to 200 random tokens."""
    rng = random.Random(args.seed)
    target = random_model(args.shape, args.device, pad_token_id=0).to(getattr(torch, args.dtype))
    prompts = [[rng.randrange(5, target.config.vocab_size) for _ in range(rng.randint(20, 200))]
               for _ in range(args.requests)]
    return target, levels, _work(prompts, args)


def _work(prompts: list[list[int]], args: argparse.Namespace) -> Work:
    return [(prompts[number % len(prompts)], _options(number, limit, args.temperature))
            for number, limit in enumerate(limits(args))]


def _options(number: int, limit: int, temperature: float | None) -> dict[str, Any]:
    sampled = {} if temperature is None else {"temperature": temperature, "top_k": 0, "seed": number}
    return {_LIMIT: limit, "do_sample": temperature is not None, **sampled}


def measure(target: PreTrainedModel, levels: list[str], work: Work, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry a contender; every contender writes what the first one wrote."""
    runs = [(name, chain) for chain in ([[], levels] if levels else [[]]) for name in args.contenders]
    times: dict[tuple, list[tuple[float, float]]] = {}
    first: list[list[int]] | None = None
    for repeat in range(args.repeats + 1):  # the first is a warm-up
        for name, chain in runs:
            new, seconds = CONTENDERS[name](target, chain, work, args.max_batch)
            first = first or new
            if new != first:
                raise AssertionError(f"{name} with levels {chain} wrote other tokens than {runs[0][0]} without")
            if repeat:
                times.setdefault((name, tuple(chain)), []).append((max(seconds), statistics.mean(seconds)))
    tokens = sum(options[_LIMIT] for _, options in work)
    return [
        {
            "contender": name, "levels": list(chain), "requests": len(work), "tokens": tokens,
            "max_batch": args.max_batch if name != "one by one" else 1,
            "seconds": statistics.median(whole for whole, _ in seen),
            "mean_wait_seconds": statistics.median(wait for _, wait in seen),
            "tokens_per_second": tokens / statistics.median(whole for whole, _ in seen),
        }
        for (name, chain), seen in times.items()
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    named = {row["contender"] for row in rows}
    peer = "static batches" if "static batches" in named else "step by step"
    made = Table("levels", "contender", "tokens/s", "x static" if peer in _ASKED else "x stepwise", "mean wait, s")
    for row in rows:
        found = next((r for r in rows if r["contender"] == peer and r["levels"] == row["levels"]), row)
        ratio = row["tokens_per_second"] / found["tokens_per_second"]
        levels = " > ".join(Path(level).name for level in row["levels"]) or "none"
        made.add_row(levels, row["contender"], f"{row['tokens_per_second']:.1f}", f"{ratio:.2f}",
                     f"{row['mean_wait_seconds']:.2f}")
    return made


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    target, levels, work = load(args)
    rows = measure(target, levels, work, args)
    console = Console(width=None if Console().is_terminal else 200)
    asked = sorted(options[_LIMIT] for _, options in work)
    console.print(f"{len(work)} requests of {asked[0]} to {asked[-1]} new tokens, {args.max_batch} at a time")
    console.print(table(rows))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        asked = {name: str(value) for name, value in vars(args).items()}
        with args.json.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps({**row, "machine": machine.card(), "asked": asked}) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
