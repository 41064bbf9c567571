"""How is a small mixture in gpt-oss's form trained, and does it beat a dense model of its active size?

    python -m eval.train_mixture --tokenizer FOLDER --text FOLDER ... --held-out FOLDER ... --out FOLDER --minutes 2.5
    python -m eval.train_mixture --smoke                                   # a toy: a CPU, seconds

14.9M parameters: 6 layers of 8 experts, 2 a token; sinks, windows of 128 on every other layer, YaRN without
truncation, biases, clamped gates. Trained from scratch on windows of 512 tokens: AdamW, a cosine, float32 weights,
products in bfloat16 on a GPU, a loss that balances experts. Then, but with --mixture-only, a dense model of as many
active weights takes the same steps on the same tokens. Printed are the loss and the share of right tokens in held-out
text of both, and of every layer how its tokens spread over experts. --out gets BF16 weights, config, tokenizer and
training.json as soon as the mixture is trained, and what is found of the dense model when that is; --steps repeats a
training, --minutes takes as many as they allow. A text is what `eval.extend_context` takes for one.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerBase

from eval.refused import refused
from eval.train_mixture.mixture import (
    SHAPE,
    SMOKE,
    balanced_loss,
    config_of,
    dense_of,
    held_out,
    new_model,
    routing,
)
from eval.training.command import run
from eval.training.folder import tell, write
from eval.training.steps import Recipe, train
from eval.training.tokens import Texts, batches, read

LENGTH, ROWS, RATE, MINUTES, WINDOWS = 512, 48, 3e-3, 2.5, 64


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.train_mixture", description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", help="folder with a tokenizer.json")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files and folders that train")
    parser.add_argument("--held-out", type=Path, nargs="+", default=[], help="files and folders that are only read")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="folders of this name are left out")
    parser.add_argument("--out", type=Path, help="folder that gets the model; it must not exist")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=MINUTES, help=f"of training the mixture ({MINUTES})")
    length.add_argument("--steps", type=int, help="of training, whatever the time")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"windows a step ({ROWS})")
    parser.add_argument("--rate", type=float, default=RATE, help=f"the highest learning rate ({RATE})")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers: faster on a GPU")
    parser.add_argument("--mixture-only", action="store_true", help="train no dense model beside it")
    parser.add_argument("--smoke", action="store_true", help="a toy model, this program's own text, a few steps")
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


def gather(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, length: int) -> Texts:
    """The texts; ValueError where there are too few to train."""
    texts = read(tokenizer, args.text, args.held_out, args.without)
    held = ", ".join(f"{len(ids):,} of {name}" for name, ids in texts.held_out.items())
    print(f"{len(texts.trained):,} tokens train; held out: {held}", flush=True)
    if len(texts.trained) <= length:
        raise ValueError(f"the texts have {len(texts.trained):,} tokens, a window {length:,}: give more text")
    return texts


def trained(model: GptOssForCausalLM, texts: Texts, recipe: Recipe, compile_layers: bool) -> dict:
    """Trains in place, layers compiled before the clock starts; -> what `eval.training.steps.train` says."""
    if compile_layers:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        stream = torch.from_numpy(texts.trained[: 4 * recipe.positions * recipe.rows].astype("int32"))
        ids = next(batches(stream.to(model.device), recipe.positions, recipe.rows, seed=0))
        balanced_loss(model.train(), ids).backward()
        model.zero_grad()
    return train(model, texts.trained, recipe, balanced_loss)


def make(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Trains the mixture and saves it, then the dense model; -> what training.json says."""
    shape, length, rows = (SMOKE, 64, 4) if args.smoke else (SHAPE, LENGTH, args.rows)
    texts = gather(args, tokenizer, length)
    words = len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id
    recipe = Recipe(length, rows, args.rate, args.minutes, args.steps, args.seed)
    report: dict = {"recipe": asdict(recipe), "torch": torch.__version__, "device": args.device,
                    "stream_tokens": len(texts.trained)}

    def one(name: str, config: GptOssConfig, recipe: Recipe) -> GptOssForCausalLM:
        torch.manual_seed(args.seed)
        model = new_model(config, args.device)
        found = trained(model, texts, recipe, args.compile)
        held = {text: dict(zip(("loss", "right"), held_out(model, ids, length, WINDOWS), strict=True))
                for text, ids in texts.held_out.items()}
        report[name] = {**found, "parameters": model.num_parameters(), "held_out": held}
        return model

    mixture = one("mixture", config_of(shape, *words), recipe)
    text, ids = next(iter(texts.held_out.items()))
    report["routing"] = {"text": text, "layers": routing(mixture, ids, length, WINDOWS)}
    if args.out:
        saved = GptOssForCausalLM(mixture.config).to(torch.bfloat16)
        saved.load_state_dict(mixture.state_dict())
        write(saved, tokenizer, report, args.out)
    if not args.mixture_only:
        one("dense", dense_of(shape, *words), replace(recipe, steps=report["mixture"]["steps"]))
        if args.out:
            tell(report, args.out)
    show(report)
    return report


def show(report: dict) -> None:
    """The models on held-out text, and how tokens spread over experts."""
    table = Table("model", "parameters", "steps", "seconds", "held-out text", "loss", "tokens right")
    for name in [one for one in ("mixture", "dense") if one in report]:
        own = report[name]
        for text, found in own["held_out"].items():
            table.add_row(name, f"{own['parameters']:,}", str(own["steps"]), f"{own['seconds']:.0f}", text,
                          f"{found['loss']:.3f}", f"{found['right']:.3f}")
    spread = Table("layer", "bits of what is chosen", "bits of a token's weights", "least", "most",
                   title=f"routing of {report['routing']['text']}")
    for index, found in enumerate(report["routing"]["layers"]):
        spread.add_row(str(index), f"{found['chosen_bits']:.2f}", f"{found['token_bits']:.2f}",
                       f"{found['least']:.3f}", f"{found['most']:.3f}")
    Console(width=120).print(table, spread)


def main(argv: list[str] | None = None) -> int:
    return run(make, parse(argv), Path(__file__).parent)


if __name__ == "__main__":
    sys.exit(main())
