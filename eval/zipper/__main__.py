"""What do zipper weights cost and bring: empty high parts, perplexity, and accepted drafts of the low part?

    python -m eval.zipper --model FOLDER --text FILE --humaneval FILE

Of a model in bfloat16 and of the same in zipper weights, by each mode: the part of all weights whose high part is 0,
and the least of a layer; bits a packed weight takes on disk, and in memory once it is in tiles; perplexity of the
text's first windows and of HumanEval's solutions behind their prompts, with both parts and with the low part alone;
how many tokens of "zipper-low" drafts the whole model accepts, greedy, over all that were drafted and over those whose
verdict is known; and how many of the continuations differ from the model's own (0, or the exit status is 1). --ends:
the same once more with the output head and the embedding as codes of that split.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from eval.scored import GREEDY, WINDOW, continued, perplexity, prompts_of, solutions_of, tasks_of, windows_of

MODES = ("exact", "paper", "clamp")
BATCH = 4


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
    parser.add_argument("--ends", action="store_true", help="all of it, too, with head and embedding as such codes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the results, too")
    return parser.parse_args(argv)


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
    chains, shares = continued(model, prompts, "zipper-low", args.draft, args.tokens)
    differing = 0
    for ids, chain in zip(prompts, chains, strict=True):
        alone = model.generate(input_ids=ids, max_new_tokens=args.tokens, **GREEDY, assistant_models=[])
        differing += not torch.equal(alone, chain)
    return shares | {"differing": differing}


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; -> the exit status."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tasks = tasks_of(args.humaneval)
    texts = {"text": windows_of(args.text, tokenizer, args.windows),
             "solutions": solutions_of(tasks[: args.solutions], tokenizer)}  # fmt: skip
    prompts = prompts_of(tasks[: args.prompts], tokenizer)
    load = partial(AutoModelForCausalLM.from_pretrained, args.model, dtype=torch.bfloat16)
    wide = load().eval()
    results: list[dict[str, Any]] = [{"weights": "bfloat16"}]
    results[0] |= {f"perplexity, {name}": perplexity(wide, rows, batch_size=BATCH) for name, rows in texts.items()}
    for mode in args.modes:
        config = hf_mlspec.MLSpecConfig("zipper", bits=args.bits, low_bits=args.low_bits, mode=mode)
        model = load(quantization_config=config).eval()
        line: dict[str, Any] = {"weights": mode} | told_of_weights(model)
        for name, rows in texts.items():
            line[f"perplexity, {name}"] = perplexity(model, rows, batch_size=BATCH)
            line[f"low alone, {name}"] = perplexity(model, rows, "zipper-low", BATCH)
        line |= acceptance(model, prompts, args)
        if args.ends:
            hf_mlspec.pack_head_and_embedding(model)
            line |= {f"ends too, {name}": perplexity(model, rows, batch_size=BATCH) for name, rows in texts.items()}
            line |= {f"ends too, low alone, {name}": perplexity(model, rows, "zipper-low", BATCH)
                     for name, rows in texts.items()}  # fmt: skip
            line |= {f"ends too, {name}": value for name, value in acceptance(model, prompts, args).items()}
        results.append(line)
        print(results[-1], file=sys.stderr, flush=True)
    _show(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return int(any(line.get("differing") or line.get("ends too, differing") for line in results))


def _show(results: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for line in (*results[1:], results[0]) for key in line))
    print("| " + " | ".join(columns) + " |\n|---|" + "--:|" * (len(columns) - 1))
    for line in results:
        cells = [line.get(column, "") for column in columns]
        print("| " + " | ".join(cell if isinstance(cell, str) else f"{cell:.4g}" for cell in cells) + " |")


if __name__ == "__main__":
    raise SystemExit(main())
