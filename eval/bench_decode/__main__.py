"""How fast does a chain decode against its target alone, stock generate and transformers' assisted generation?

    python -m eval.bench_decode --model PATH --level mxfp4 --level PATH --prompts FILE --json out.jsonl
    python -m eval.bench_decode --model PATH --chain mxfp4 --chain mxfp4+PATH --prompts FILE    # several chains
    python -m eval.bench_decode --model PATH --chain mxfp4 --prompts FILE --batch-size 4    # four prompts at a time
    python -m eval.bench_decode --shape llama-1.1b          # random weights: steps of the target and of its MXFP4 cast
    python -m eval.bench_decode --shape moe-844m            # a mixture of experts, beside all of stock's ways
    python -m eval.bench_decode --quick                     # the demo pair, few tokens
    python -m eval.bench_decode PLAN.toml --models FOLDER --data FOLDER    # batches, ablations, memory

Every prompt is decoded by every contender in turn, so that all meet the same state of the machine. Decode-only starts
when a contender hands out its first tokens, so reading the prompt is no part of it; "with prefill" is the whole call.
Ratios are of tokens a second on one batch, their geometric mean over batches and repeats. Stock assisted generation
takes one prompt at a time.

A plan (eval/configs/decode_*.toml; Python 3.11 or later) names chains over one target, data files, batch sizes and
draft lengths. A finished batch of all contenders is on disk at once (RESULTS/NAME/), the lines of a finished plan are
in RESULTS/NAME.jsonl. Exit status 1 where a chain wrote another id than its target alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec
from eval.bench_decode.contenders import Contender, chains, measure, of_shape, split_level
from eval.bench_decode.report import summary, table
from eval.records import machine
from eval.rows import padded
from eval.targets import MIXTURES, SMALL_SHAPES, why_not_prepared
from hf_mlspec.evaluation import check_words, levels_of_options, read_prompts


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_decode", description=__doc__.splitlines()[0],
                                     epilog='What the columns of the table say is in eval/README.md, "Reading the '
                                            'table".')
    parser.add_argument("plan", type=Path, nargs="?", help="TOML file; goes with --models, --data, "
                        "--results, --device, --threads")
    parser.add_argument("--models", type=Path, default=Path("models"), help="what {models} of a plan stands for")
    parser.add_argument("--data", type=Path, default=Path("data"), help="what {data} of a plan stands for")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of a plan's results")
    parser.add_argument("--device", default="cpu", help="of a plan (%(default)s)")
    parser.add_argument("--model", help="folder of the target (the demo pair's)")
    parser.add_argument("--shape", choices=sorted({**SMALL_SHAPES, **MIXTURES}), help="a target of random BF16 "
                        "weights instead")
    parser.add_argument("--level", action="append", default=[], help="levels with + between; repeated: those of one "
                        "chain")
    parser.add_argument("--chain", action="append", default=[],
                        metavar="LEVEL+LEVEL",
                        help="levels with + (or a comma) between; repeated: several chains; LEVEL=12:0.2 drafts 12 "
                             "tokens to threshold 0.2")
    parser.add_argument("--prompts", type=Path, action="append", default=[],
                        help="text with one prompt a line, .jsonl or .json of HumanEval, GSM8K ...; may be repeated")
    parser.add_argument("--count", type=int, help="prompts to read of each file (10)")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="prompts decoded together, as whole "
                        "batches (1)")
    parser.add_argument("--repeats", type=int, help="(3)")
    parser.add_argument("--max-new-tokens", type=int, help="(128)")
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--threshold", type=float, default=0.4)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="1 prompt, 1 repeat, 12 tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line a contender")
    return _checked(parser, parser.parse_args(argv))


def _checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    _check_plan(parser, args)
    if args.shape and (args.model or args.level or args.chain or args.prompts):
        parser.error("--shape has random weights: no --model, --level, --chain or --prompts goes with it")
    few, many = {"count": 1, "repeats": 1, "max_new_tokens": 12}, {"count": 10, "repeats": 3, "max_new_tokens": 128}
    for name, value in (few if args.quick else many).items():
        if getattr(args, name) is None:
            setattr(args, name, max(value, args.batch_size) if name == "count" else value)
    if not 1 <= args.batch_size <= args.count:
        parser.error(f"--batch-size is {args.batch_size}, it must be 1 to --count, {args.count}")
    return args


def _check_plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """A plan says what the other options say; both at once would hide which of them counts."""
    of_plan = ("plan", "models", "data", "results", "device", "threads")
    given = [name for name, value in vars(args).items() if name not in of_plan and value != parser.get_default(name)]
    if args.plan is not None and given:
        parser.error(f"--{given[0].replace('_', '-')} does not go with a plan, which says it itself")
    needless = [name for name in ("models", "data", "results", "device")
                if getattr(args, name) != parser.get_default(name)]
    if args.plan is None and needless:
        parser.error(f"--{needless[0]} goes with a plan, and none is given")
    if args.threads < 1:
        parser.error(f"--threads is {args.threads}, it must be at least 1")


def run_plan(args: argparse.Namespace, console: Console) -> int:
    """The plan's status; 2 with one sentence for what cannot be, 130 where it was interrupted."""
    from eval.bench_decode import run  # plans need Python 3.11; the rest of this program does not

    try:
        return run.run(args, console)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: finished batches are kept in {args.results}; the same command goes on", file=sys.stderr)
        return 130


def chosen_chains(args: argparse.Namespace) -> list[list[str]]:
    """--level as one chain, then every --chain; of the demo pair the three usual ones."""
    found = [levels_of_options(args.level)] if args.level else []
    found += [levels_of_options([text]) for text in args.chain]
    draft = hf_mlspec.demo_pair()[1]
    return found if found or args.model else [[str(draft)], ["mxfp4"], ["mxfp4", str(draft)]]


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, list[Contender], dict[str, list[Any]]]:
    """Target, contenders, and the encoded prompts of each file, in whole batches."""
    if args.shape:
        target, contenders, ids = of_shape(args.shape, args.max_new_tokens)
        rows = {name: tensor.expand(args.batch_size, -1).contiguous() for name, tensor in ids.items()}
        return target, contenders, {"random ids": [rows] * (args.count // args.batch_size)}
    asked = chosen_chains(args)
    for chain in asked:
        check_words([split_level(level, args)[0] for level in chain])
    folder = args.model or str(hf_mlspec.demo_pair()[0])
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    files = args.prompts or [Path(hf_mlspec.demo_pair()[0]).parent / "prompts.json"]
    prompts = {}
    for file in files:
        rows = [tokenizer(text)["input_ids"] for text in read_prompts(file, args.count)]
        starts = range(0, len(rows) - args.batch_size + 1, args.batch_size)
        prompts[file.stem] = [padded(rows[start : start + args.batch_size]) for start in starts]
        if not starts:
            raise ValueError(f"{file} holds {len(rows)} prompts, which fill no batch of {args.batch_size}: lower "
                             "--batch-size")
    return target, chains(target, tokenizer, asked, args), prompts


def memory(target: PreTrainedModel) -> dict[str, Any]:
    """Bytes of the target and of what its MXFP4 cast adds; the cast's share of the BF16 weights it casts."""
    cast = hf_mlspec.direct_cast(target, "mxfp4")
    added = hf_mlspec.resident_bytes(cast, shared_with=target)
    packed = sum(b.nbytes for name, b in cast.state_dict().items() if name.endswith("_packed"))
    return {
        "target_bytes": hf_mlspec.resident_bytes(target),
        "cast_adds_bytes": added,
        "share_of_bfloat16": added / (packed * 4),  # 4 bits a weight
    }


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    console = Console(width=None if Console().is_terminal else 200)
    if args.plan is not None:
        return run_plan(args, console)
    try:
        return compared(args, console)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def compared(args: argparse.Namespace, console: Console) -> int:
    """Measure and print; 0."""
    target, contenders, prompts = load(args)
    reason = why_not_prepared(target)
    common = {"machine": machine.card(), "memory": memory(target), "not_prepared": reason,
              "asked": {name: str(value) for name, value in vars(args).items()}}
    for data, encoded in prompts.items():
        reads = measure(contenders, encoded, args.repeats, machine.ReadProbe())
        rows = [summary(one, contenders) for one in contenders]
        console.print(table(data, rows, len(encoded), args.batch_size, reads))
        entry = {"data": data, "probe_bytes_per_second": reads, "regime": machine.regime(reads), **common}
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            with args.json.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps({**row, **entry}) + "\n" for row in rows)
    console.print('columns: eval/README.md, "Reading the table"', markup=False, highlight=False)
    held = common["memory"]
    console.print(f"target {held['target_bytes']:,} bytes; its MXFP4 cast adds {held['cast_adds_bytes']:,}, "
                  f"{held['share_of_bfloat16']:.4f} of the weights it casts in bfloat16")
    if reason is not None:
        console.print(f"NOT PREPARED, nothing above ran compiled steps: {reason}", style="bold red", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
