"""How fast does a chain decode against stock generate and transformers' assisted generation, and what does it hold?

    python eval/bench_decode.py                        # the demo pair
    python eval/bench_decode.py --target FOLDER --draft FOLDER --prompts HumanEval.jsonl --count 10

Each prompt is decoded by every contender in turn, so that all meet the same state of the machine; a contender's ratio
is the median over prompts and repeats of (time of the peer / its time) on the same prompt and repeat. Every line of
the JSON file carries machine, commit and a bandwidth probe taken in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec

FIELDS = ("prompt", "question", "text")
STOCK, ASSISTED = "stock generate", "stock assisted"


@dataclass
class Contender:
    """A way to decode one prompt, and what was measured of it."""

    name: str
    decode: Callable[[Any], Any]
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    counts: list[hf_mlspec.SpeculationStats] = field(default_factory=list)


def read_prompts(path: Path, count: int) -> list[str]:
    text = path.read_text(encoding="utf-8")
    entries = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line]
    return [next(entry[name] for name in FIELDS if name in entry) for entry in entries[:count]]


def contenders(target: PreTrainedModel, draft: PreTrainedModel, args: argparse.Namespace) -> list[Contender]:
    """Stock, stock assisted, our loop without levels, and every chain."""
    settings = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    draft.generation_config.num_assistant_tokens = args.num_draft_tokens
    draft.generation_config.assistant_confidence_threshold = args.threshold
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    config = hf_mlspec.SpeculationConfig(
        num_draft_tokens=args.num_draft_tokens, confidence_threshold=args.threshold, materialize=args.materialize
    )

    def stock(inputs):
        return target.generate(**inputs, **settings)

    def assisted(inputs):
        return target.generate(**inputs, **settings, assistant_model=draft)

    def ours(levels, **options):
        def decode(inputs):
            return target.generate(
                **inputs,
                **settings,
                assistant_models=levels,
                return_dict_in_generate=True,
                speculation_config=hf_mlspec.SpeculationConfig(**{**vars(config), **options}),
            )

        return decode

    return [
        Contender(STOCK, stock),
        Contender(ASSISTED, assisted),
        Contender("[]", ours([])),
        Contender("[draft]", ours([draft])),
        Contender("[mxfp4]", ours(["mxfp4"])),
        Contender("[mxfp4], a cache of its own", ours(["mxfp4"], shared_cache=False)),
        Contender("[mxfp4, draft]", ours(["mxfp4", draft])),
    ]


def measure(field_: list[Contender], prompts: list[Any], repeats: int) -> None:
    """Every contender on every prompt, in turn; the first round warms up and is not counted."""
    for repeat in track(range(repeats + 1), description="repeats"):
        for inputs in prompts[:1] if repeat == 0 else prompts:
            for one in field_:
                begin = time.perf_counter()
                out = one.decode(inputs)
                seconds = time.perf_counter() - begin
                if repeat:
                    sequences = out if isinstance(out, torch.Tensor) else out.sequences
                    one.seconds.append(seconds)
                    one.tokens += sequences.shape[1] - inputs["input_ids"].shape[1]
                    if not isinstance(out, torch.Tensor):
                        one.counts.append(out.speculation)


def summary(one: Contender, peers: dict[str, Contender]) -> dict[str, Any]:
    """Medians of a contender, and its ratios to the two stock ways."""
    found: dict[str, Any] = {
        "contender": one.name,
        "runs": len(one.seconds),
        "tokens_per_second": one.tokens / sum(one.seconds),
    }
    for name, peer in peers.items():
        ratios = [theirs / own for theirs, own in zip(peer.seconds, one.seconds, strict=True)]
        found[f"speedup over {name}"] = statistics.median(ratios)
    if one.counts:
        found |= _of_counts(one.counts)
    return found


def _of_counts(counts: list[hf_mlspec.SpeculationStats]) -> dict[str, Any]:
    rounds = sum(c.target_passes for c in counts)
    outside, whole = sum(c.seconds_outside_forwards for c in counts), sum(c.seconds for c in counts)
    levels = []
    for same in zip(*(c.levels for c in counts), strict=True):
        tested = sum(level.tested for level in same)
        levels.append(
            {
                "level": same[0].name,
                "acceptance": sum(level.accepted for level in same) / max(tested, 1),
                "forwards": sum(level.forwards for level in same),
                "seconds": sum(level.seconds for level in same),
                "cache_bytes": max(level.cache_bytes for level in same),
            }
        )
    return {
        "tokens_per_target_pass": sum(c.new_tokens for c in counts) / sum(c.row_passes for c in counts),
        "round_ms": 1e3 * whole / rounds,
        "outside_forwards_ms_per_round": 1e3 * outside / rounds,
        "outside_forwards_share": outside / whole,
        "target_cache_bytes": max(c.target_cache_bytes for c in counts),
        "levels": levels,
    }


def memory(target: PreTrainedModel, rule: str = "ocp_floor") -> dict[str, Any]:
    """What the MXFP4 cast of the target adds, and the share of the weights it casts."""
    cast = hf_mlspec.direct_cast(target, "mxfp4", rule=rule)
    kept = {id(p) for p in target.parameters()} & {id(p) for p in cast.parameters()}
    added = hf_mlspec.resident_bytes(cast, shared_with=target)
    # 4 bits a weight and 8 bits a block of 32; what the same weights take in the target's dtype.
    packed = sum(b.nbytes for name, b in cast.state_dict().items() if name.endswith("weight_packed"))
    cast_bytes = packed * 2 * target.dtype.itemsize
    return {
        "target_bytes": hf_mlspec.resident_bytes(target),
        "cast_adds_bytes": added,
        "bytes_it_casts": cast_bytes,
        "share": added / cast_bytes,
        "share_of_bfloat16": added / (packed * 4),
        "shared_tensors": len(kept),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    names = {
        "tokens_per_second": "tokens/s",
        f"speedup over {STOCK}": "x stock",
        f"speedup over {ASSISTED}": "x assisted",
        "tokens_per_target_pass": "tokens/pass",
        "round_ms": "round ms",
        "outside_forwards_ms_per_round": "outside ms",
        "outside_forwards_share": "share",
        "target_cache_bytes": "KV bytes",
    }
    out = Table("contender", *names.values(), "acceptance", "KV of levels")
    for row in rows:
        cells = [f"{row[key]:,.3f}" if isinstance(row.get(key), float) else f"{row.get(key, '')}" for key in names]
        levels = row.get("levels", [])
        out.add_row(
            escape(row["contender"]),
            *cells,
            " ".join(f"{level['acceptance']:.3f}" for level in levels),
            " ".join(str(level["cache_bytes"]) for level in levels),
        )
    return out


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    target, draft = hf_mlspec.demo_pair()
    parser.add_argument("--target", default=target, help="folder of the target (default: the demo target)")
    parser.add_argument("--draft", default=draft, help="folder of the small draft (default: the demo draft)")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=Path(target).parent / "prompts.json",
        help='JSON or JSON lines with a "prompt", "question" or "text" each',
    )
    parser.add_argument("--count", type=int, default=10, help="prompts to read")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--threshold", type=float, default=0.4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--materialize", action="store_true", help="keep dequantized weights beside the packed ones")
    parser.add_argument("--only", nargs="*", help="names of contenders; the two stock ways always run")
    parser.add_argument("--out", type=Path, default=Path("results/bench_decode.jsonl"))
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    load = {"dtype": getattr(torch, args.dtype)}
    target = AutoModelForCausalLM.from_pretrained(args.target, **load).to(args.device).eval()
    draft = AutoModelForCausalLM.from_pretrained(args.draft, **load).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    texts = read_prompts(args.prompts, args.count)
    prompts = [tokenizer(text, return_tensors="pt").to(args.device) for text in texts]
    prompts = [{name: p[name] for name in ("input_ids", "attention_mask")} for p in prompts]
    every = contenders(target, draft, args)
    field_ = [c for c in every if not args.only or c.name in (STOCK, ASSISTED, *args.only)]
    bandwidth = machine.read_bandwidth(args.device)
    measure(field_, prompts, args.repeats)
    peers = {c.name: c for c in field_ if c.name in (STOCK, ASSISTED)}
    rows = [summary(c, peers) for c in field_]
    held = memory(target)
    console = Console(width=None if Console().is_terminal else 200)
    console.print(table(rows))
    console.print(
        f"the MXFP4 cast adds {held['cast_adds_bytes']:,} bytes, {held['share']:.4f} of the {args.dtype} weights it "
        f"casts ({held['share_of_bfloat16']:.4f} of them in bfloat16), and no keys and values in the target's cache"
    )
    step = held["target_bytes"] / (sum(peers[STOCK].seconds) / peers[STOCK].tokens)
    console.print(
        f"memory read {bandwidth / 1e9:.1f} GB/s; stock generate moves {step / bandwidth:.2f} of that in weights"
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    common = {
        "machine": machine.card(args.device),
        "read_bandwidth": bandwidth,
        "memory": held,
        "asked": {k: str(v) for k, v in vars(args).items()},
    }
    with args.out.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps({**row, **common}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
