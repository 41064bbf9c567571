"""How is a small model of Mamba-2 layers trained, as a target whose every layer keeps a state?

    python -m eval.train_mamba --tokenizer FOLDER --text FOLDER ... --held-out FOLDER ... --out FOLDER --minutes 2
    python -m eval.train_mamba --smoke                                     # a toy: a CPU, seconds

14.4M parameters: 12 layers of Mamba-2 (arXiv 2405.21060), nothing beside them. Trained from scratch on windows of 512
tokens: AdamW, a cosine, float32 weights, products in bfloat16 on a GPU, the scan as products (scan.py). Printed are
the loss and the share of right tokens in held-out text, by transformers' own forward. --out gets BF16 weights, config,
tokenizer and training.json; --steps repeats a training, --minutes takes as many as they allow. A text is what
`eval.extend_context` takes for one.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedTokenizerBase

from eval.refused import refused
from eval.train_mamba.scan import few_products
from eval.training.command import run
from eval.training.folder import write
from eval.training.steps import Recipe, by_position, train
from eval.training.tokens import read

LENGTH, ROWS, RATE, MINUTES, WINDOWS = 512, 32, 2e-3, 2.0, 64
SHAPE = {"hidden_size": 384, "num_hidden_layers": 12, "num_heads": 12, "head_dim": 64, "state_size": 64}
SMOKE = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 32, "state_size": 16}
CHUNK = 64  # tokens that a scan has at once: it computes with squares of them


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.train_mamba", description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", help="folder with a tokenizer.json")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files and folders that train")
    parser.add_argument("--held-out", type=Path, nargs="+", default=[], help="files and folders that are only read")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="folders of this name are left out")
    parser.add_argument("--out", type=Path, help="folder that gets the model; it must not exist")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=MINUTES, help=f"of training ({MINUTES})")
    length.add_argument("--steps", type=int, help="of training, whatever the time")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"windows a step ({ROWS})")
    parser.add_argument("--rate", type=float, default=RATE, help=f"the highest learning rate ({RATE})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="a toy, on the program's own source")
    args = parser.parse_args(argv)
    if not args.smoke and not (args.tokenizer and args.text and args.held_out and args.out):
        parser.error("--tokenizer, --text, --held-out and --out are needed, or --smoke")
    if args.out and args.out.exists():
        parser.error(f"--out {args.out} exists: name a new folder")
    if min(args.rows, args.steps or 1) < 1 or args.minutes <= 0:
        parser.error("--minutes is above 0, --rows and --steps are at least 1")
    texts = [("--text", path) for path in args.text] + [("--held-out", path) for path in args.held_out]
    reason = refused(args.device, [("--tokenizer", args.tokenizer)], texts, [("--out", args.out)])
    if reason is not None:
        parser.error(reason)
    return args


def config_of(shape: dict[str, int], length: int, tokenizer: PreTrainedTokenizerBase) -> Mamba2Config:
    """One group of keys and queries for all heads, a table that is also the head. A state bounds no length; what says
    so is four windows, as tokenizers ask for a number."""
    return Mamba2Config(
        **shape, vocab_size=len(tokenizer), n_groups=1, chunk_size=CHUNK, tie_word_embeddings=True,
        max_position_embeddings=4 * length, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id)  # fmt: skip


def make(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Trains and saves; -> what training.json says. ValueError where there is too little text."""
    shape, length, rows = (SMOKE, 64, 4) if args.smoke else (SHAPE, LENGTH, args.rows)
    texts = read(tokenizer, args.text, args.held_out, args.without)
    held = ", ".join(f"{len(ids):,} of {name}" for name, ids in texts.held_out.items())
    print(f"{len(texts.trained):,} tokens train; held out: {held}", flush=True)
    if len(texts.trained) <= length:
        raise ValueError(f"the texts have {len(texts.trained):,} tokens, a window {length:,}: give more text")
    recipe = Recipe(length, rows, args.rate, args.minutes, args.steps, args.seed)
    torch.manual_seed(args.seed)
    model = Mamba2ForCausalLM(config_of(shape, length, tokenizer)).to(args.device)
    report: dict = {"recipe": asdict(recipe), "torch": torch.__version__, "device": args.device,
                    "stream_tokens": len(texts.trained), "parameters": model.num_parameters()}
    with few_products(model):
        report |= train(model, texts.trained, recipe)
    report["held_out"] = {name: by_position(model, ids, [length], WINDOWS)[0] for name, ids in texts.held_out.items()}
    show(report)
    if args.out:
        write(model.to(torch.bfloat16), tokenizer, report, args.out)
    return report


def show(report: dict) -> None:
    """The model on held-out text."""
    table = Table("parameters", "steps", "seconds", "held-out text", "loss", "tokens right")
    for text, found in report["held_out"].items():
        table.add_row(f"{report['parameters']:,}", str(report["steps"]), f"{report['seconds']:.0f}", text,
                      f"{found['loss']:.3f}", f"{found['right']:.3f}")
    Console(width=120).print(table)


def main(argv: list[str] | None = None) -> int:
    return run(make, parse(argv), Path(__file__).parent)


if __name__ == "__main__":
    sys.exit(main())
