"""How is a model trained on so that it reads longer texts, and how well does it read them, position by position?

    python -m eval.extend_context --model FOLDER --text FOLDER ... --held-out FOLDER ... --out FOLDER --minutes 4
    python -m eval.extend_context --model FOLDER --text FOLDER ... --held-out FOLDER ... --prepare tokens.npz
    python -m eval.extend_context --model FOLDER --tokens tokens.npz --out FOLDER --steps 2000
    python -m eval.extend_context --smoke                                  # a toy model: a CPU, seconds

The model gets a larger rotary base and more positions and is trained on: AdamW, a cosine, float32 weights, products in
bfloat16 on a GPU. A text is a file, the lines of a .jsonl file, or a folder whose sources follow each other in the
order of their paths, so that names recur far away; all texts become one stream of tokens, and a window of it may begin
anywhere. Printed are the loss and the share of right tokens in held-out text, by the distance from a window's
beginning, before and after. --out gets BF16 weights, config, tokenizer and training.json; --prepare writes tokens to a
file that another machine trains on (--tokens). --steps repeats a training, --minutes takes as many as they allow.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from eval.extend_context.training import MINUTES, POSITIONS, RATE, ROWS, THETA, extend, load
from eval.refused import refused
from eval.training.folder import write
from eval.training.steps import Recipe, by_position, train
from eval.training.tokens import Texts, fingerprint, pack, read, unpack

RANGES = 8  # of positions, of equal length; the first is halved


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.extend_context", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a model with one rotary base, and its tokenizer")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files and folders that train")
    parser.add_argument("--held-out", type=Path, nargs="+", default=[], help="files and folders that are only read")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="folders of this name are left out")
    parser.add_argument("--tokens", type=Path, help="texts that --prepare wrote; those of --text follow them")
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="write the texts' tokens, train nothing")
    parser.add_argument("--out", type=Path, help="folder that gets the model; it must not exist")
    parser.add_argument("--positions", type=int, default=POSITIONS, help=f"({POSITIONS})")
    parser.add_argument("--rope-theta", type=float, default=THETA, help=f"the rotary base ({THETA:.0f})")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=MINUTES, help=f"of training ({MINUTES})")
    length.add_argument("--steps", type=int, help="of training, whatever the time")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"windows a step ({ROWS})")
    parser.add_argument("--rate", type=float, default=RATE, help=f"the highest learning rate ({RATE})")
    parser.add_argument("--windows", type=int, default=16, help="of each held-out text, at most (16)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="a toy model, this program's own text, a few steps")
    args = parser.parse_args(argv)
    if not args.smoke:
        if not args.model or not (args.text or args.tokens) or not (args.out or args.prepare):
            parser.error("--model, --text or --tokens, and --out or --prepare are needed, or --smoke")
        if args.out and args.out.exists():
            parser.error(f"--out {args.out} exists: name a new folder")
    if min(args.positions // (2 * RANGES), args.rows, args.windows, args.steps or 1) < 1 or args.minutes <= 0:
        parser.error(f"--positions is at least {2 * RANGES}, --minutes above 0, --rows, --windows, --steps at least 1")
    texts = [("--text", path) for path in args.text] + [("--held-out", path) for path in args.held_out]
    made = [("--out", args.out), ("--prepare", args.prepare)]
    reason = refused(args.device, [("--model", args.model)], [*texts, ("--tokens", args.tokens)], made)
    if reason is not None:
        parser.error(reason)
    return args


def gather(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Texts:
    """The texts of --tokens, --text and --held-out; ValueError where there are too few to train."""
    began, texts = time.monotonic(), read(tokenizer, args.text, args.held_out, args.without)
    if args.tokens:
        texts = unpack(args.tokens, fingerprint(tokenizer)).joined(texts)
    held = ", ".join(f"{len(ids):,} of {name}" for name, ids in texts.held_out.items())
    seconds = time.monotonic() - began
    print(f"{len(texts.trained):,} tokens train; held out: {held or 'none'}; read in {seconds:.0f} s", flush=True)
    if len(texts.trained) <= args.positions:
        raise ValueError(f"the texts have {len(texts.trained):,} tokens, a window {args.positions:,}: give more text")
    return texts


def measure(model: PreTrainedModel, texts: Texts, positions: int, windows: int, when: str) -> dict[str, list[dict]]:
    """By held-out text, loss and share of right tokens by position; prints a table each."""
    unit = positions // RANGES
    ends = [unit // 2, *(unit * (i + 1) for i in range(RANGES - 1)), positions]
    found = {name: by_position(model, ids, ends, windows) for name, ids in texts.held_out.items()}
    for name, lines in found.items():
        table = Table("positions", "loss", "tokens right", title=f"{name}, {when}, {lines[0]['windows']} windows")
        for line in lines:
            table.add_row(f"{line['from']:,} to {line['to']:,}", f"{line['loss']:.3f}", f"{line['right']:.3f}")
        Console().print(table)
    return found


def make(args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Texts) -> dict:
    """Measures, trains, measures; -> what training.json says."""
    recipe = Recipe(args.positions, args.rows, args.rate, args.minutes, args.steps, args.seed)
    report = {"recipe": {**asdict(recipe), "theta": args.rope_theta}, "torch": torch.__version__,
              "device": args.device, "stream_tokens": len(texts.trained)}
    report["before"] = measure(model, texts, args.positions, args.windows, "before")
    torch.manual_seed(args.seed)
    extend(model, args.positions, args.rope_theta)
    report |= train(model, texts.trained, recipe)
    print(f"{report['steps']} steps, {report['tokens']:,} tokens in {report['seconds']:.0f} s", flush=True)
    report["after"] = measure(model, texts, args.positions, args.windows, "after")
    if args.out:
        write(copy.deepcopy(model).to(torch.bfloat16), tokenizer, report, args.out)
    return report


def toy(args: argparse.Namespace) -> PreTrainedModel:
    """A model of random weights; sets in args what --smoke means, where the command says nothing else."""
    args.positions, args.steps, args.rows, args.windows, args.rate = 256, args.steps or 30, 2, 2, 1e-2
    here = Path(__file__).parent
    args.text, args.held_out = args.text or [here.parent / "train_demo_pair"], args.held_out or [here]
    torch.manual_seed(args.seed)
    config = LlamaConfig(vocab_size=4096, hidden_size=32, num_hidden_layers=2, intermediate_size=64,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
                         tie_word_embeddings=True)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        return load(folder, args.device)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        model = toy(args) if args.smoke else None
        if args.smoke:
            from hf_mlspec import demo_pair  # its tokenizer; nothing else here needs the package

            args.model = demo_pair()[0]
        # tokenizer.json as it is: for some model classes AutoTokenizer splits numbers in its own way.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
        texts = gather(args, tokenizer)
        if args.prepare:
            pack(texts, fingerprint(tokenizer), args.prepare)
            print(f"{args.prepare}: {args.prepare.stat().st_size / 1e6:.1f} MB")
            return 0
        make(args, model or load(args.model, args.device), tokenizer, texts)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
