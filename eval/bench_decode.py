"""How fast does a chain decode against its target alone, stock generate and transformers' assisted generation?

    python -m eval.bench_decode --model PATH --level mxfp4 --level PATH --prompts FILE --json out.jsonl
    python -m eval.bench_decode --model PATH --chain mxfp4 --chain mxfp4,PATH --prompts FILE    # several chains
    python -m eval.bench_decode --shape llama-1.1b          # random weights: steps of the target and of its MXFP4 cast
    python -m eval.bench_decode --quick                     # the demo pair, few tokens

Every prompt is decoded by every contender in turn, so that all meet the same state of the machine. Decode-only starts
when a contender hands out its first tokens, so reading the prompt is no part of it; "with prefill" is the whole call.
Ratios are of tokens a second on one prompt, their geometric mean over prompts and repeats.
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
from eval import machine
from eval.bench_decode_contenders import Contender, chains, measure, of_shape, shapes
from eval.bench_decode_report import summary, table

FIELDS = ("prompt", "question", "text")


def read_prompts(path: Path, count: int) -> list[str]:
    """The first `count` prompts of a JSON list or of JSON lines; the first turn where an entry has several."""
    text = path.read_text(encoding="utf-8")
    entries = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line]
    found = []
    for entry in entries[:count]:
        value = next((entry[name] for name in FIELDS if name in entry), None) or entry.get("turns", [None])[0]
        if not isinstance(value, str):
            raise ValueError(f"{path}: an entry has none of {', '.join(FIELDS)}, turns; it has {', '.join(entry)}")
        found.append(value)
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of the target (the demo pair's)")
    parser.add_argument("--shape", choices=sorted(shapes), help="a target of random BF16 weights instead")
    parser.add_argument("--level", action="append", default=[], help="a level; repeated: the levels of one chain")
    parser.add_argument("--chain", action="append", default=[],
                        help="levels with commas between; LEVEL=12:0.2 drafts 12 tokens to threshold 0.2")
    parser.add_argument("--prompts", type=Path, action="append", default=[],
                        help='JSON or JSON lines with "prompt", "question", "text" or "turns"; may be repeated')
    parser.add_argument("--count", type=int, help="prompts to read of each file (10)")
    parser.add_argument("--repeats", type=int, help="(3)")
    parser.add_argument("--max-new-tokens", type=int, help="(128)")
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--threshold", type=float, default=0.4)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="1 prompt, 1 repeat, 12 tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line a contender")
    args = parser.parse_args(argv)
    if args.shape and (args.model or args.level or args.chain or args.prompts):
        parser.error("--shape has random weights: no --model, --level, --chain or --prompts goes with it")
    few, many = {"count": 1, "repeats": 1, "max_new_tokens": 12}, {"count": 10, "repeats": 3, "max_new_tokens": 128}
    for name, value in (few if args.quick else many).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def chosen_chains(args: argparse.Namespace) -> list[list[str]]:
    """--level as one chain, then every --chain; of the demo pair the three usual ones."""
    found = [args.level] if args.level else []
    found += [text.split(",") for text in args.chain]
    draft = hf_mlspec.demo_pair()[1]
    return found if found or args.model else [[str(draft)], ["mxfp4"], ["mxfp4", str(draft)]]


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, list[Contender], dict[str, list[Any]]]:
    """Target, contenders, and the encoded prompts of each file."""
    if args.shape:
        target, contenders, ids = of_shape(args.shape, args.max_new_tokens)
        return target, contenders, {"random ids": [ids] * args.count}
    folder = args.model or str(hf_mlspec.demo_pair()[0])
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    files = args.prompts or [Path(hf_mlspec.demo_pair()[0]).parent / "prompts.json"]
    prompts = {}
    for file in files:
        encoded = [tokenizer(text, return_tensors="pt") for text in read_prompts(file, args.count)]
        prompts[file.stem] = [{name: e[name] for name in ("input_ids", "attention_mask")} for e in encoded]
    return target, chains(target, chosen_chains(args), args), prompts


def memory(target: PreTrainedModel) -> dict[str, Any]:
    """Bytes of the target and of what its MXFP4 cast adds; the cast's share of the BF16 weights it casts."""
    cast = hf_mlspec.direct_cast(target, "mxfp4")
    added = hf_mlspec.resident_bytes(cast, shared_with=target)
    packed = sum(b.nbytes for name, b in cast.state_dict().items() if name.endswith("weight_packed"))
    return {
        "target_bytes": hf_mlspec.resident_bytes(target),
        "cast_adds_bytes": added,
        "share_of_bfloat16": added / (packed * 4),  # 4 bits a weight
    }


def why_not_prepared(target: PreTrainedModel) -> str | None:
    """The reason why no compiled steps run this target; None where they do."""
    try:
        hf_mlspec.prepare(target)
    except (RuntimeError, ValueError) as error:
        return str(error)
    by_linear = any(type(module).__name__ == "KernelLinear" for module in target.modules())
    hf_mlspec.restore(target)
    return f"{type(target).__name__}'s linears run one by one, as the log says why" if by_linear else None


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    target, contenders, prompts = load(args)
    reason = why_not_prepared(target)
    console = Console(width=None if Console().is_terminal else 200)
    common = {"machine": machine.card(), "memory": memory(target), "not_prepared": reason,
              "asked": {name: str(value) for name, value in vars(args).items()}}
    for data, encoded in prompts.items():
        reads = measure(contenders, encoded, args.repeats, machine.ReadProbe())
        rows = [summary(one, contenders) for one in contenders]
        console.print(table(data, rows, len(encoded), reads))
        entry = {"data": data, "probe_bytes_per_second": reads, "regime": machine.regime(reads), **common}
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            with args.json.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps({**row, **entry}) + "\n" for row in rows)
    held = common["memory"]
    console.print(f"target {held['target_bytes']:,} bytes; its MXFP4 cast adds {held['cast_adds_bytes']:,}, "
                  f"{held['share_of_bfloat16']:.4f} of the weights it casts in bfloat16")
    if reason is not None:
        console.print(f"NOT PREPARED, nothing above ran compiled steps: {reason}", style="bold red", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
