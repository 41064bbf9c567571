"""What does a tree bring where a row would be drafted, and what does it cost?

    python -m eval.bench_trees --model FOLDER --level lookups --tree 3,2 --tree 4 --num-draft-tokens 8 --prompts FILE

Decodes each batch of prompts with the target alone, with rows, and with each tree, one after the other, greedily:
tokens a pass of the target, processor time beside the target's alone (the median over batches, so that other programs
count little), and the tokens that differ from those of the target alone. Every contender has a table of n-grams of its
own, which grows from prompt to prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec
from eval.refused import refused
from eval.rows import ends_of, new_ids, padded
from hf_mlspec import LookupTree, NGram, PromptLookup
from hf_mlspec.evaluation import read_prompts


@dataclass
class Counted:
    """Of one contender over all batches: drafted and accepted of the last level, tokens and passes of the target."""

    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    row_passes: int = 0
    differing: int = 0
    beside: list[float] = field(default_factory=list)

    def line(self, name: str) -> str:
        rate = f"{self.accepted / self.drafted:.3f}" if self.drafted else "-"
        ratio = f"{statistics.median(self.beside):.2f}" if self.beside else "-"
        return f"{name:<24} {self.tokens / self.row_passes:>12.2f} {rate:>10} {ratio:>14} {self.differing:>10}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_trees", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--level", required=True, action="append", help="of the chain, from the target down")
    parser.add_argument("--tree", action="append", default=[], help="most tokens behind a token by depth, as in 3,2,1")
    parser.add_argument("--num-draft-tokens", type=int, help="of the last level; default: the depths of each tree")
    parser.add_argument("--confidence-threshold", type=float, help="of all levels")
    parser.add_argument("--prompts", required=True, action="append", help="file of prompts")
    parser.add_argument("--count", type=int, default=16, help="prompts of each file")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    if why := refused("cpu", models=[("--model", args.model)], texts=[("--prompts", file) for file in args.prompts]):
        parser.error(why)
    try:
        args.trees = [[int(width) for width in tree.split(",")] for tree in args.tree]
        for tree in args.trees:
            hf_mlspec.SpeculationConfig(tree=tree, num_draft_tokens=args.num_draft_tokens)
    except ValueError as error:
        parser.error(f"--tree: {error}")
    return args


def configs(args: argparse.Namespace) -> dict[str, dict | None]:
    """Options of every contender by its name; None: the target alone."""
    depth = args.num_draft_tokens or max(map(len, args.trees), default=8)
    lengths = [None] * (len(args.level) - 1)
    common = {"confidence_threshold": args.confidence_threshold}
    found = {"alone": None, f"row {depth}": {"num_draft_tokens": [*lengths, depth], **common}}
    for tree in args.trees:
        number = args.num_draft_tokens or len(tree)
        found[f"tree {tree} {number}"] = {"tree": tree, "num_draft_tokens": [*lengths, number], **common}
    return found


def levels_of(words: list[str], contenders: dict) -> dict[str, list]:
    """The levels of every contender; a table that grows is nobody else's."""
    made = {"ngram": NGram, "lookups": lambda: LookupTree([PromptLookup(), NGram()])}
    return {name: [made[word]() if word in made else word for word in words] for name in contenders}


def decode(model: PreTrainedModel, inputs: dict, levels: list, config: dict | None, tokens: int) -> tuple:
    """(ids, seconds of the processor) of one batch."""
    began = time.process_time()
    out = model.generate(
        **inputs, do_sample=False, max_new_tokens=tokens, assistant_models=[] if config is None else levels,
        speculation_config=config,
    )  # fmt: skip
    return out, time.process_time() - began


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    pad = tokenizer.pad_token_id or 0
    contenders = configs(args)
    levels = levels_of(args.level, contenders)
    for file in args.prompts:
        rows = [tokenizer(text)["input_ids"] for text in read_prompts(file, args.count)]
        counted = {name: Counted() for name in contenders}
        for first in range(0, len(rows), args.batch_size):
            inputs = padded(rows[first : first + args.batch_size], pad=pad)
            count_batch(model, inputs, contenders, levels, counted, args.max_new_tokens, warm=first == 0)
        print(f"\n{file}: {len(rows)} prompts, batch {args.batch_size}, {args.max_new_tokens} tokens")
        print(f"{'':<24} {'tokens/pass':>12} {'accepted':>10} {'x alone (cpu)':>14} {'differing':>10}")
        for name, one in counted.items():
            print(one.line(name))
        sys.stdout.flush()
    return 0


def count_batch(
    model: PreTrainedModel, inputs: dict, contenders: dict, levels: dict, counted: dict[str, Counted], tokens: int, *,
    warm: bool,
) -> None:  # fmt: skip
    """Decode one batch with every contender; warm: the first tokens once before it counts."""
    width, ends, alone = inputs["input_ids"].shape[1], ends_of(model), None
    for name, config in contenders.items():
        if warm:
            decode(model, inputs, levels[name], config, 4)
        out, seconds = decode(model, inputs, levels[name], config, tokens)
        stats, written, one = hf_mlspec.last_stats(model), new_ids(out, width, ends), counted[name]
        alone = alone or (written, seconds)
        one.beside.append(alone[1] / seconds)
        one.tokens += sum(map(len, written))
        one.row_passes += stats.row_passes
        one.differing += sum(
            own != other for line, wanted in zip(written, alone[0], strict=True)
            for own, other in zip(line, wanted, strict=False)
        ) + sum(abs(len(line) - len(wanted)) for line, wanted in zip(written, alone[0], strict=True))  # fmt: skip
        if stats.levels:
            one.drafted += stats.levels[-1].drafted
            one.accepted += stats.levels[-1].accepted


if __name__ == "__main__":
    sys.exit(main())
