"""What does a cache of fewer bits change: a text's perplexity, and the finding of a line that stands far back?

    python -m eval.cache_quality FOLDER/code-76m --text FOLDER/wikitext2/test.txt --contexts 512 1024 1900
    python -m eval.cache_quality --quick

Each cache is that of the same model, whose weights are not packed. Perplexity: of the first --lines lines, in windows
of --window tokens every half of it, of the tokens that no window before it scored. Retrieval: a line that sets a
variable to five digits is put into the text at a share of the context, and the same name stands at the context's end;
--lines-asked such lines a place, each with a name, digits and text of its own. Found: greedy decoding would write the
digits. Their log-probability, in nats, is compared line by line with that under the first cache.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from eval.records import machine
from hf_mlspec.evaluation import TokenScores, token_logprobs

CACHES = {"as computed": None, "int8": "int8", "int4": "int4"}
NAMES = ("port", "retries", "color", "offset", "height", "budget", "radius", "serial", "weight", "delay")
QUICK = {"contexts": [64, 200], "depths": [0.0, 0.5], "lines_asked": 2, "lines": 40, "window": 128}


def load(folder: str, word: str | None) -> Any:
    """The model in bfloat16, its cache in the format of the word."""
    how = {} if word is None else {"quantization_config": hf_mlspec.MLSpecConfig(format=None, kv_cache=word)}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how)


def windows(ids: list[int], size: int) -> tuple[list[list[int]], list[int]]:
    """Rows of `size` tokens every half of it, and of each how many tokens at its end no row before it holds."""
    rows, scored, known = [], [], 1
    for begin in range(0, max(1, len(ids) - size // 2), size // 2):
        row = ids[begin : begin + size]
        if begin + len(row) > known:
            rows.append(row)
            scored.append(begin + len(row) - known)
            known = begin + len(row)
    return rows, scored


def perplexity(model: Any, rows: list[list[int]], scored: list[int]) -> float:
    found = token_logprobs(model, rows, num_scored=scored)
    return math.exp(-sum(one.total for one in found) / sum(scored))


class Needles:
    """Rows that end with digits that a line far back sets."""

    def __init__(self, tokenizer: Any, text: list[int], seed: int):
        self.tokenizer, self.text, self.random = tokenizer, text, random.Random(seed)

    def row(self, context: int, depth: float) -> tuple[list[int], int]:
        """`context` tokens at most, and how many at their end are the digits."""
        name = f"{self.random.choice(NAMES)}_{self.random.randrange(100)}"
        digits = "".join(str(self.random.randrange(10)) for _ in range(5))
        line, asked = (self._ids(part) for part in (f'\n{name} = "{digits}"\n', f'\nassert {name} == "'))
        answer = self._ids(digits)
        room = context - len(line) - len(asked) - len(answer)
        begin = self.random.randrange(max(1, len(self.text) - room))
        hay, place = self.text[begin : begin + room], int(depth * room)
        return hay[:place] + line + hay[place:] + asked + answer, len(answer)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


def places(args: argparse.Namespace) -> list[tuple[int, float]]:
    return [(context, depth) for context in args.contexts for depth in args.depths]


def retrieval(scores: dict[str, list[TokenScores]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each context, depth and cache; scores in the order of `places`, `lines_asked` each."""
    lines, reference = [], next(iter(CACHES))
    for number, (context, depth) in enumerate(places(args)):
        part = slice(number * args.lines_asked, (number + 1) * args.lines_asked)
        for cache, found in scores.items():
            pairs = zip(found[part], scores[reference][part], strict=True)
            off = [one.total - other.total for one, other in pairs]
            lines.append({
                "context": context, "depth": depth, "cache": cache, "asked": args.lines_asked,
                "found": sum(bool(one.greedy.all()) for one in found[part]),
                "logprob": statistics.mean(one.total for one in found[part]),
                "difference": statistics.mean(off), "largest_difference": max(map(abs, off)),
            })  # fmt: skip
    return lines


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Lines of both parts."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = "".join(Path(args.text).read_text(encoding="utf-8").splitlines(keepends=True)[: args.lines])
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    rows, scored = windows(ids, args.window)
    needles = Needles(tokenizer, ids, args.seed)
    asked = [needles.row(context, depth) for context, depth in places(args) for _ in range(args.lines_asked)]
    texts, scores = [], {}
    for cache, word in CACHES.items():
        model = load(args.model, word)
        texts.append({"cache": cache, "tokens": sum(scored), "perplexity": perplexity(model, rows, scored)})
        scores[cache] = token_logprobs(model, [row for row, _ in asked], num_scored=[count for _, count in asked])
        print(f"cache_quality: {cache} done", file=sys.stderr)
    for line in texts:
        line["change"] = line["perplexity"] / texts[0]["perplexity"] - 1
    return {"perplexity": texts, "retrieval": retrieval(scores, args)}


def show(console: Console, found: dict[str, list[dict[str, Any]]]) -> None:
    table = Table("cache", "tokens", "perplexity", "change")
    for line in found["perplexity"]:
        change = f"{100 * line['change']:+.3f} %"
        table.add_row(line["cache"], str(line["tokens"]), f"{line['perplexity']:.4f}", change)
    console.print(table)
    table = Table("context", "depth", "cache", "found", "log-probability", "difference", "largest")
    for line in found["retrieval"]:
        found_of = f"{line['found']} of {line['asked']}"
        table.add_row(str(line["context"]), f"{line['depth']:.2f}", line["cache"], found_of, f"{line['logprob']:.3f}",
                      f"{line['difference']:+.4f}", f"{line['largest_difference']:.4f}")
    console.print(table)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.cache_quality", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder of the model (the demo target)")
    parser.add_argument("--text", default="README.md", help="file that is scored, and that lines are put into")
    parser.add_argument("--lines", type=int, help="of the text (all)")
    parser.add_argument("--window", type=int, default=1024, help="tokens scored together (1024)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024], help="tokens before an answer")
    parser.add_argument("--depths", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 0.95],
                        help="where a line is put, as a share of the context")
    parser.add_argument("--lines-asked", type=int, default=20, help="lines at each place (20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="threads of the CPU (torch's own choice)")
    parser.add_argument("--json", type=Path, help="write a line of JSON for each row of the tables")
    parser.add_argument("--quick", action="store_true", help="short contexts, few lines")
    args = parser.parse_args(argv)
    vars(args).update(QUICK if args.quick else {})
    args.model = args.model or hf_mlspec.demo_pair()[0]
    if min(args.contexts) < 40 or args.window < 2 or args.lines_asked < 1:
        parser.error("--contexts are at least 40 tokens, --window 2 and --lines-asked 1")
    if not all(0 <= depth <= 1 for depth in args.depths):
        parser.error("--depths are shares of the context, from 0 to 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    found = measure(args)
    show(Console(), found)
    if args.json:
        card = machine.card("cpu")
        lines = [{"part": part, **line, "machine": card} for part, own in found.items() for line in own]
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
