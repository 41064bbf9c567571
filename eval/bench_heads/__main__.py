"""What do QSpec, a small drafter, its trees, and both together bring, and which number of a chain matters how much?

    python -m eval.bench_heads --model FOLDER --small HEAD --own mxfp4 --prompts FILE --part tables --part depth

The rows of `tables` are those of tables 5 and 7 of QSpec's paper (version 1), where EAGLE stands beside it: QSpec, a
head (or a tiny model, --small), its tree, both. `depth`, `width` and `order` change one thing at a time. Every chain
answers the same prompts in turn in a stream of --batch-size rows, greedily: tokens a round of the target, accepted of
drafted tokens (of a tree, of all of its nodes), processor time beside the target's alone (median over groups of
prompts, so that other programs count little), tokens that differ, and the share of rounds in which the target kept a
token at each place of a draft.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec
from eval.bench_heads.chains import PARTS, Chain, chains_of
from eval.refused import refused
from hf_mlspec import Request, generate_stream
from hf_mlspec.evaluation import read_prompts

PLACES = 6  # of a draft, in the table


@dataclass
class Counted:
    """Of one chain over all prompts. kept: how many rounds kept so many tokens; the last of an answer, whose draft may
    have been cut, does not count."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    differing: int = 0
    kept: Counter = field(default_factory=Counter)
    beside: list[float] = field(default_factory=list)

    def line(self, name: str) -> str:
        """A row of the table."""
        rate = f"{self.accepted / self.drafted:.3f}" if self.drafted else ""
        all_rounds = sum(self.kept.values())
        reached = [sum(n for kept, n in self.kept.items() if kept >= place) for place in range(1, PLACES + 1)]
        shares = [f"{one / all_rounds:.2f}" if one else "" for one in reached]
        ratio = f"{statistics.median(self.beside):.2f}"
        cells = [name, f"{self.tokens / self.rounds:.2f}", rate, ratio, *shares, str(self.differing)]
        return f"| {' | '.join(cells)} |"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_heads", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--small", required=True, help="folder of a head for it, or of a tiny model")
    parser.add_argument("--own", default="mxfp4", help="the level of the target's own weights")
    parser.add_argument("--format", help="quantize the target to this while it loads, such as int4 for --own w4a4")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: tables")
    parser.add_argument("--chain", action="append", default=[], help="one more, NAME=LEVEL+LEVEL:4,4:WIDTH,WIDTH")
    parser.add_argument("--confidence-threshold", type=float, default=0.0)
    parser.add_argument("--prompts", required=True, action="append", help="file of prompts")
    parser.add_argument("--count", type=int, default=8, help="prompts of each file")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    models, texts = [("--model", args.model)], [("--prompts", file) for file in args.prompts]
    small = args.small.split("@")[0]
    if why := refused("cpu", models=[*models, ("--small", small)], texts=texts):
        parser.error(why)
    config = json.loads((Path(small) / "config.json").read_text(encoding="utf-8"))
    args.heads = "speculators_model_type" in config or "Eagle3" in str(config.get("architectures"))  # or SpecForge
    args.called = "head" if args.heads else "tiny"
    stands = {"own": args.own, "small": args.small}
    try:
        more = [one.partition("=") for one in args.chain]
        args.more = [Chain.of(name, text, stands, args.confidence_threshold) for name, _, text in more]
    except ValueError as error:
        parser.error(f"--chain: {error}")
    args.chains = {
        part: chains_of(part, stands, args.confidence_threshold, args.called, heads=args.heads)
        for part in args.part or ([] if args.more else ["tables"])
    } | ({"chains": args.more} if args.more else {})
    return args


def load(args: argparse.Namespace) -> PreTrainedModel:
    config = {"quantization_config": hf_mlspec.MLSpecConfig(format=args.format)} if args.format else {}
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, **config)


def answer(model: PreTrainedModel, rows: list[list[int]], chain: Chain | None, args: argparse.Namespace) -> tuple:
    """(answers by prompt, tokens that each round gained and kept by prompt, drafted and accepted, seconds)."""
    requests = [Request(row, id=n, max_new_tokens=args.max_new_tokens, do_sample=False) for n, row in enumerate(rows)]
    began, answers, rounds, drafted, accepted = time.process_time(), {}, {}, 0, 0
    levels, config = ([], None) if chain is None else (chain.levels, chain.config)
    for one in generate_stream(model, requests, max_batch=args.batch_size, assistant_models=levels, events=True,
                               speculation_config=config):  # fmt: skip
        if isinstance(one, hf_mlspec.NewTokens):
            rounds.setdefault(one.id, []).append(sum(level is not None for level in one.levels))
        elif one.error is not None:
            raise one.error
        else:
            answers[one.id] = one.new_tokens
    if chain is not None:
        last = hf_mlspec.last_stats(model).levels[-1]
        drafted, accepted = last.drafted, last.accepted
    return answers, rounds, (drafted, accepted), time.process_time() - began


def count(counted: Counted, found: tuple, alone: tuple) -> None:
    """Add what one group of prompts gave."""
    answers, rounds, (drafted, accepted), seconds = found
    counted.beside.append(alone[3] / seconds)
    counted.drafted += drafted
    counted.accepted += accepted
    for number, own in answers.items():
        wanted = alone[0][number]
        counted.differing += sum(a != b for a, b in zip(own, wanted, strict=False)) + abs(len(own) - len(wanted))
        counted.tokens += len(own)
        counted.rounds += len(rounds[number])
        counted.kept.update(rounds[number][1:-1])  # nothing is drafted before the first round has read the prompt


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    tokenizer, model = AutoTokenizer.from_pretrained(args.model), load(args)
    for file in args.prompts:
        rows = [tokenizer(text)["input_ids"] for text in read_prompts(file, args.count)]
        groups = [rows[n : n + args.batch_size] for n in range(0, len(rows), args.batch_size)]
        for part, chains in args.chains.items():
            counted = {chain.name: Counted() for chain in chains}
            for number, group in enumerate(groups):
                alone = answer(model, group, None, args)
                for chain in chains:
                    if not number:
                        answer(model, [row[:8] for row in group], chain, args)  # levels are built once
                    count(counted[chain.name], answer(model, group, chain, args), alone)
            places = " | ".join(str(place) for place in range(1, PLACES + 1))
            print(f"\n{part}, {Path(file).name}: {len(rows)} prompts, batch {args.batch_size}, "
                  f"{args.max_new_tokens} tokens, threshold {args.confidence_threshold}\n")  # fmt: skip
            print(f"| chain | tokens a round | accepted | x alone | {places} | differ |\n|---|{'--:|' * (4 + PLACES)}")
            print("\n".join(one.line(name) for name, one in counted.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
