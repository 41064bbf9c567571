"""What do zipper weights cost and bring: empty high parts, perplexity, and accepted drafts of the low part?

    python -m eval.zipper --model FOLDER --text FILE --humaneval FILE

Of a model in bfloat16 and of the same in zipper weights, by each mode: the part of all weights whose high part is 0,
and the least of a layer; bits a packed weight takes on disk, and in memory once it is in tiles; perplexity of the
text's first windows and of HumanEval's solutions behind their prompts, with both parts and with the low part alone;
how many tokens of "zipper-low" drafts the whole model accepts, greedy, over all that were drafted and over those whose
verdict is known; and how many of the continuations differ from the model's own (0, or the exit status is 1).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from hf_mlspec.evaluation import score_rows

WINDOW = 512  # tokens
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
MODES = ("exact", "paper", "clamp")
Rows = tuple[list[list[int]], list[int]]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.zipper", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a model and its tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="file of plain text")
    parser.add_argument("--humaneval", type=Path, required=True, help="HumanEval.jsonl")
    parser.add_argument("--windows", type=int, default=16, help=f"of {WINDOW} tokens of the text (%(default)s)")
    parser.add_argument("--solutions", type=int, default=40, help="of HumanEval that are scored (%(default)s)")
    parser.add_argument("--prompts", type=int, default=12, help="of HumanEval that are continued (%(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="of each continuation (%(default)s)")
    parser.add_argument("--draft", type=int, default=4, help="tokens a draft has (%(default)s)")
    parser.add_argument("--bits", type=int, default=6)
    parser.add_argument("--low-bits", type=int, default=4)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the results, too")
    return parser.parse_args(argv)


def perplexity(model: nn.Module, rows: Rows, precision: str | None = None) -> float:
    options = {} if precision is None else {"precision": precision}
    found = score_rows(model, rows[0], num_scored=rows[1], batch_size=4, **options)
    return math.exp(-sum(scores.total for _, scores in found) / sum(rows[1]))


def rows_of(args: argparse.Namespace, tokenizer: Any, tasks: list[dict]) -> dict[str, Rows]:
    """Of the text and of the solutions: token ids, and how many at their end are scored."""
    ids = tokenizer(args.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW, WINDOW)][: args.windows]
    rows, scored = [], []
    for task in tasks[: args.solutions]:
        prompt, solution = (tokenizer(task[key], add_special_tokens=False)["input_ids"]
                            for key in ("prompt", "canonical_solution"))  # fmt: skip
        rows.append(prompt + solution)
        scored.append(len(solution))
    return {"text": (windows, [WINDOW - 1] * len(windows)), "solutions": (rows, scored)}


def packed_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "packed_weight")]


def told_of_weights(model: nn.Module) -> dict[str, float]:
    """Zeros of high parts, and bits a weight, of a model that is as on disk; and in tiles, which it then is."""
    layers = packed_layers(model)
    counts = [layer.in_features * layer.out_features for layer in layers]
    zeros = [layer.packed_weight().high_zeros() for layer in layers]
    disk = _bytes(layers)
    for layer in layers:
        layer.prepack_()
    return {
        "high part 0": sum(own * count for own, count in zip(zeros, counts, strict=True)) / sum(counts),
        "least of a layer": min(zeros),
        "bits on disk": 8 * disk / sum(counts),
        "bits in memory": 8 * _bytes(layers) / sum(counts),
    }


def _bytes(layers: list[nn.Module]) -> int:
    return sum(part.numel() * part.element_size() for layer in layers for part in layer.held("weight"))


def acceptance(model: nn.Module, prompts: list[torch.Tensor], args: argparse.Namespace) -> dict[str, float]:
    """Of "zipper-low" drafts, and how many continuations are not the model's own."""
    drafted = tested = accepted = differing = 0
    for ids in prompts:
        options = {"input_ids": ids, "max_new_tokens": args.tokens, **GREEDY}
        alone = model.generate(**options, assistant_models=[])
        chain = model.generate(**options, assistant_models=["zipper-low"],
                               speculation_config={"num_draft_tokens": args.draft})  # fmt: skip
        differing += not torch.equal(alone, chain)
        level = hf_mlspec.last_stats(model).levels[0]
        drafted, tested, accepted = drafted + level.drafted, tested + level.tested, accepted + level.accepted
    return {"accepted / drafted": accepted / drafted, "accepted / tested": accepted / tested, "differing": differing}


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; -> the exit status."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tasks = [json.loads(line) for line in args.humaneval.read_text(encoding="utf-8").splitlines() if line]
    texts = rows_of(args, tokenizer, tasks)
    prompts = [tokenizer(task["prompt"], return_tensors="pt")["input_ids"] for task in tasks[: args.prompts]]
    load = partial(AutoModelForCausalLM.from_pretrained, args.model, dtype=torch.bfloat16)
    wide = load().eval()
    results: list[dict[str, Any]] = [{"weights": "bfloat16"}]
    results[0] |= {f"perplexity, {name}": perplexity(wide, rows) for name, rows in texts.items()}
    for mode in args.modes:
        config = hf_mlspec.MLSpecConfig("zipper", bits=args.bits, low_bits=args.low_bits, mode=mode)
        model = load(quantization_config=config).eval()
        line: dict[str, Any] = {"weights": mode} | told_of_weights(model)
        for name, rows in texts.items():
            line[f"perplexity, {name}"] = perplexity(model, rows)
            line[f"low alone, {name}"] = perplexity(model, rows, "zipper-low")
        results.append(line | acceptance(model, prompts, args))
        print(results[-1], file=sys.stderr, flush=True)
    _show(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return int(any(line.get("differing") for line in results))


def _show(results: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for line in (*results[1:], results[0]) for key in line))
    print("| " + " | ".join(columns) + " |\n|---|" + "--:|" * (len(columns) - 1))
    for line in results:
        cells = [line.get(column, "") for column in columns]
        print("| " + " | ".join(cell if isinstance(cell, str) else f"{cell:.4g}" for cell in cells) + " |")


if __name__ == "__main__":
    raise SystemExit(main())
