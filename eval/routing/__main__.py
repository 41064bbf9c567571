"""Does a trained router choose by the query, and is that better than the best fixed width of every block?

    python -m eval.routing --model FOLDER/code-21m --router router.safetensors \
        --tune code=code.txt --tune math=math.txt --tune prose=prose.txt \
        --held code=HumanEval.jsonl --held math=test.jsonl --held prose=wikitext2/test.txt
    python -m eval.routing --quick

Rows of --tokens tokens: the first --query-tokens are the query that the router sees, what follows is scored. The fixed
widths are searched greedily on texts of --tune and scored, as the router is, on those of --held. Where the averages
differ, fixed widths next above and next below are blended. Intervals: queries resampled. The oracle chooses the widths
of each query, of the first --oracle of every kind, knowing what follows. Without --router one is trained on --tune for
--steps steps (`mlspec route train` does the same). --shares: the same with a choice for each token behind the query,
whose features are moved by such shares towards its own; --step-router: one trained for that. --drafts: with the router
picking planes of drafts, ids are compared with those of the target alone on the first so many prompts of each .jsonl
file of --held.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from eval.records import machine
from eval.sources import read_texts
from hf_mlspec.evaluation import read_prompts
from hf_mlspec.routing.blocks import blocks_of
from hf_mlspec.routing.router import Router

from .allocations import around, blend, greedy, oracle
from .choices import between_blocks, between_kinds, entropy, interval
from .plot import draw_kinds
from .scoring import Found, Scorer
from .speed import of_generate, of_prefill

QUICK = {"tokens": 24, "query_tokens": 12, "queries": 4, "tuned_queries": 2, "steps": 3, "permutations": 200,
         "oracle": 2, "sweeps": 1, "drafts": 2, "new_tokens": 8, "prefill_tokens": 32}
QUICK_TEXTS = {"code": "def area(width, height):\n    return width * height\n\n" * 60,
               "prose": "The river was low that summer, and nobody crossed it by boat. " * 60}


def rows_of(texts: dict[str, list[str]], tokenizer: Any, tokens: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 ``[queries, tokens]``, `count` of every kind spread over its text, and the number of each one's kind."""
    rows, kinds = [], []
    for number, (kind, own) in enumerate(texts.items()):
        ids = tokenizer("\n\n".join(own), add_special_tokens=False, verbose=False)["input_ids"]
        there = len(ids) // tokens
        if there < count:
            raise ValueError(f"the text of {kind} has {there} rows of {tokens} tokens, {count} were asked for")
        for place in range(count):
            begin = place * there // count * tokens
            rows.append(ids[begin : begin + tokens])
        kinds += [number] * count
    return torch.tensor(rows), torch.tensor(kinds)


def line(name: str, found: Found, more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"part": "perplexity", "name": name, "bits": float(found.bits.mean()), "perplexity": found.perplexity,
            "distance": float(found.distance.mean()), **(more or {})}


def against(name: str, own: Found, other: Found, seed: int) -> dict[str, Any]:
    """Nats a token and distance of one beyond those of another, query by query."""
    bits = {"bits": float(own.bits.mean()), "bits_of_other": float(other.bits.mean())}
    told = {"part": "difference", "name": name, **bits}
    for what in ("nats", "distance"):
        told[what], told[f"{what}_low"], told[f"{what}_high"] = interval(
            getattr(own, what) - getattr(other, what), 10000, seed)
    return told


def of_choices(found: Found, kinds: torch.Tensor, names: list[str], blocks: list[str], args: Any) -> dict[str, Any]:
    """Entropies by block, mean widths by kind, and both permutation tests."""
    widths = torch.tensor(found.widths, dtype=torch.float32)
    by_kind, p_kind = between_kinds(widths, kinds, args.permutations, args.seed)
    by_block, p_block = between_blocks(widths, args.permutations, args.seed)
    entropies = {name: entropy(widths[:, j].int().tolist()) for j, name in enumerate(blocks)}
    return {"part": "choices", "entropy": entropies,
            "different": len(set(map(tuple, found.widths))), "queries": len(widths),
            "bits_by_kind": {name: float(found.bits[kinds == k].mean()) for k, name in enumerate(names)},
            "mean_widths": {name: dict(zip(blocks, widths[kinds == k].mean(0).tolist(), strict=True))
                            for k, name in enumerate(names)},
            "kinds_spread": by_kind, "kinds_p": p_kind, "blocks_spread": by_block, "blocks_p": p_block}


def of_oracle(scorer: Scorer, path: list[list[int]], tuned: Scorer, bits: float, args: Any) -> list[dict[str, Any]]:
    """The oracle at the price that fixed widths pay there, against fixed widths of its average."""
    above, below, _ = around(path, tuned, bits)
    high, low = tuned.fixed(above), tuned.fixed(below)
    price = float((low.distance - high.distance).mean() / (high.bits - low.bits).mean())
    best = oracle(scorer, below, args.router.widths, price, args.sweeps, said("oracle"))
    above, below, share = around(path, scorer, float(best.bits.mean()))
    fixed = blend(scorer.fixed(above), scorer.fixed(below), share)
    return [line("oracle, a choice for each query", best, {"queries": len(scorer.rows)}),
            line("fixed widths, of the oracle's queries", fixed), against("oracle - fixed", best, fixed, args.seed)]


def said(name: str):
    """What is called at every step: a count on stderr."""
    count = iter(range(1, 1 << 30))

    def step() -> None:
        if (number := next(count)) % 10 == 0:
            print(f"routing: {name}, {number} evaluations", file=sys.stderr, flush=True)

    return step


def of_drafts(model: Any, tokenizer: Any, router: Router, args: Any) -> list[dict[str, Any]]:
    """Differing ids of draft routing, and its speed beside the fixed levels."""
    lines = []
    for kind, file in args.held.items():
        if not str(file).endswith(".jsonl"):
            continue
        prompts = read_prompts(file, args.drafts)
        reference = alone = None
        for level in ("routed", *args.levels):
            config = {"num_draft_tokens": args.draft_tokens, **({"router": router} if level == "routed" else {})}
            found = hf_mlspec.compare(model, tokenizer, prompts, [level], max_new_tokens=args.new_tokens,
                                      reference_ids=reference, speculation_config=config)
            alone = alone or found.alone_seconds
            reference = [item.reference_ids for item in found.items]
            tokens = sum(len(item.ids) for item in found.items)
            differing = sum(item.difference is not None for item in found.items)
            lines.append({"part": "drafts", "kind": kind, "level": level, "prompts": len(prompts), "tokens": tokens,
                          "differing": differing, "over_target": alone / found.chain_seconds,
                          "acceptance": found.speculation.levels[0].acceptance})
    return lines


def of_steps(held: Scorer, path: list[list[int]], routed: Found, args: Any) -> Iterator[dict[str, Any]]:
    """A choice for each token behind a query, beside one for the query and fixed widths of the same average."""
    routers = [(f"every step, share {share:g}", args.router, share) for share in args.shares]
    if args.step_router is not None:
        trained = Router.load(args.step_router, held.blocks)
        routers.append((f"every step, trained so, share {trained.step_share:g}", trained, trained.step_share))
    for name, router, share in routers:
        own = router.choosing("step")
        own.step_share = share
        found = held.in_steps(own)
        above, below, part = around(path, held, float(found.bits.mean()))
        fixed = blend(held.fixed(above), held.fixed(below), part)
        entropies = [entropy(list(of)) for of in zip(*found.widths, strict=True)]
        yield line(name, found, {"entropy": sum(entropies) / len(entropies)})
        yield line(f"fixed widths, blended at the bits of {name}", fixed)
        yield against(f"{name} - fixed", found, fixed, args.seed)
        yield against(f"{name} - routed once", found, routed, args.seed)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Line by line, the quickest first."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    load = {"dtype": getattr(torch, args.dtype)}
    teacher = AutoModelForCausalLM.from_pretrained(args.model, **load).to(args.device)
    planes = hf_mlspec.MLSpecConfig(format="planes", group_size=args.group_size)
    model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=planes, **load).to(args.device)
    texts = {part: {kind: text_of(file) for kind, file in getattr(args, part).items()} for part in ("tune", "held")}
    args.router = router_for(model, teacher, tokenizer, texts["tune"], args)
    if args.only_drafts:
        yield from of_drafts(model, tokenizer, args.router, args)
        return
    yield from of_texts(model, teacher, tokenizer, texts, args)


def of_texts(
    model: Any, teacher: Any, tokenizer: Any, texts: dict[str, Any], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Quality on the held texts, then time."""
    rows, kinds = rows_of(texts["held"], tokenizer, args.tokens, args.queries)
    rows = rows.to(args.device)
    ids = rows.flatten()[None, : args.prefill_tokens]
    if args.only_speed:
        yield from of_speed(model, ids, args)
        return
    held = Scorer(model, teacher, rows, args.query_tokens)
    rows_to_tune = rows_of(texts["tune"], tokenizer, args.tokens, args.tuned_queries)[0].to(args.device)
    tuned = Scorer(model, teacher, rows_to_tune, args.query_tokens)
    dense, whole, routed = held.teachers(), held.all_planes(), held.routed(args.router)
    yield from (line("dense", dense), line("all planes", whole), line("routed", routed))
    yield against("all planes - dense", whole, dense, args.seed)
    names = [block.name for block in blocks_of(model)]
    yield of_choices(routed, kinds, list(args.held), names, args)
    for width in args.router.widths[1:-1]:
        yield line(f"{width} planes in every block", held.fixed([width] * len(held.blocks)))
    path = greedy(tuned, args.router.widths, min(float(routed.bits.mean()), args.router.average) - 0.3, said("greedy"))
    above, below, share = around(path, held, float(routed.bits.mean()))
    fixed = {name: held.fixed(own) for name, own in (("above", above), ("below", below))}
    best = blend(fixed["above"], fixed["below"], share)
    for name, own in fixed.items():
        yield line(f"fixed widths, next {name}", own, {"widths": own.widths[0]})
    yield from (line("fixed widths, blended", best), against("routed - fixed", routed, best, args.seed))
    yield from of_steps(held, path, routed, args)
    if args.only_steps:
        return
    yield from of_speed(model, ids, args)
    if args.drafts:
        yield from of_drafts(model, tokenizer, args.router, args)
    if args.oracle:
        some = torch.cat([rows[kinds == k][: args.oracle] for k in range(len(args.held))])
        few = Scorer(model, teacher, some, args.query_tokens)
        yield from of_oracle(few, path, tuned, float(routed.bits.mean()), args)


def of_speed(model: Any, ids: torch.Tensor, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of a prefill, and of generate behind 64 tokens."""
    yield {"part": "prefill", **of_prefill(model, args.router, ids, args.repeats)}
    yield {"part": "speed", **of_generate(model, args.router, ids[:, :64], args.new_tokens, args.repeats)}


def text_of(file: Path | str) -> list[str]:
    return QUICK_TEXTS[file] if file in QUICK_TEXTS else read_texts(Path(file))


def router_for(model: Any, teacher: Any, tokenizer: Any, texts: dict[str, Any], args: Any) -> Router:
    """That of the file, else one trained here."""
    if args.router is not None:
        return Router.load(args.router, blocks_of(model))
    rows, _ = rows_of(texts, tokenizer, args.tokens, args.tuned_queries)
    recipe = hf_mlspec.RouterRecipe(args.target_bits, steps=args.steps, query_tokens=args.query_tokens)
    return hf_mlspec.train_router(model, teacher, rows.to(args.device), recipe).router


def show(lines: list[dict[str, Any]]) -> None:
    """A table for each part."""
    console = Console()
    for part in dict.fromkeys(one["part"] for one in lines):
        own = [one for one in lines if one["part"] == part]
        columns = [key for key in own[0] if key != "part" and not isinstance(own[0][key], dict | list)]
        table = Table(title=part, title_justify="left")
        for column in columns:
            table.add_column(column)
        for one in own:
            table.add_row(*(f"{v:.5g}" if isinstance(v := one.get(key, ""), float) else str(v) for key in columns))
        console.print(table)
        for key, value in own[0].items() if part == "choices" else ():
            if isinstance(value, dict):
                console.print(f"{key}: {json.dumps(value)}", markup=False, highlight=False, soft_wrap=True)


def named(text: str) -> tuple[str, str]:
    """KIND=FILE."""
    kind, equals, file = text.partition("=")
    if not (kind and equals and file):
        raise argparse.ArgumentTypeError(f"{text!r} is no KIND=FILE")
    return kind, file


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval.routing", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", metavar="FOLDER", help="dense (default: the demo target, with --quick)")
    parser.add_argument("--router", metavar="FILE", help="what mlspec route train wrote (default: one trained here)")
    parser.add_argument("--tune", type=named, action="append", metavar="KIND=FILE", help="texts to search on")
    parser.add_argument("--held", type=named, action="append", metavar="KIND=FILE", help="texts to score")
    parser.add_argument("--quick", action="store_true", help="the demo target, two short texts, few of everything")
    numbers = {"group_size": 128, "tokens": 128, "query_tokens": 64, "queries": 48, "tuned_queries": 12, "steps": 200,
               "permutations": 10000, "oracle": 8, "sweeps": 2, "drafts": 0, "draft_tokens": 4, "new_tokens": 64,
               "repeats": 5, "prefill_tokens": 512, "seed": 0, "threads": None}
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N")
    parser.add_argument("--target-bits", type=float, default=4.5, metavar="N", help="of a router trained here")
    parser.add_argument("--levels", nargs="*", default=["planes3", "planes4"], metavar="WORD",
                        help="fixed levels beside draft routing (default planes3 planes4)")
    parser.add_argument("--shares", nargs="*", type=float, default=[], metavar="N",
                        help="of a token in what it chooses")
    parser.add_argument("--step-router", metavar="FILE", help="what mlspec route train --every step wrote")
    parser.add_argument("--only-steps", action="store_true", help="nothing behind --shares and --step-router")
    parser.add_argument("--only-speed", action="store_true", help="nothing but seconds")
    parser.add_argument("--only-drafts", action="store_true", help="nothing but --drafts")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="(%(default)s)")
    parser.add_argument("--device", default="cpu", help="where the models run (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the lines, too")
    parser.add_argument("--plot", metavar="FILE", help="a picture of mean planes by block and kind of query")
    return parser


def main(words: list[str] | None = None) -> int:
    args = parser().parse_args(words)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.quick:
        given = parser().parse_args([])
        for name, value in QUICK.items():
            if getattr(args, name) == getattr(given, name):
                setattr(args, name, value)
        args.model, args.group_size = args.model or str(hf_mlspec.demo_pair()[0]), 32
        args.tune = args.held = [(kind, kind) for kind in QUICK_TEXTS]
    if not (args.model and args.tune and args.held):
        raise SystemExit("routing: give --model, --tune and --held, or --quick")
    args.tune, args.held = dict(args.tune), dict(args.held)
    asked = {name: str(value) for name, value in vars(args).items()}
    lines = []
    with open(args.json or os.devnull, "w", encoding="utf-8") as out:
        heads = {"part": "machine", **machine.card(args.device)}, {"part": "asked", **asked}
        for one in chain(heads, measure(args)):
            print(json.dumps(one), file=out, flush=True)  # a run that is killed leaves what it measured
            lines.append(one)
            if args.plot and one["part"] == "choices":
                draw_kinds(one, args.plot)
    show(lines[len(heads) :])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
