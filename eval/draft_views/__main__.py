"""How often is a draft right that sees a part of the target's cache, or keys and values of fewer bits?

    python -m eval.draft_views --model FOLDER/code-76m --text FOLDER/wikitext2/test.txt --tokens 1000
    python -m eval.draft_views --quick

The target reads texts and its keys and values are kept. Its cast to MXFP4, and the target itself, then read the same
texts over these keys and values, seen in several ways. Counted is how often the likeliest token is the target's, in
the second half of each text. Ways: all tokens; the first 64 and the last N (SpeculationConfig(draft_window=N)); and
all tokens in fewer bits: "int8" with a scale a token and head, "4.25 bits" as in the draft of a nested weight (blocks
of 32 along the head, a power of two each, eight magnitudes). It tells which view is worth a kernel; nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_mlspec

FIRST = 64  # tokens that a window leaves in view
LEVELS = torch.tensor([2.0, 7.0, 11.0, 16.0, 22.0, 30.0, 38.0, 51.0]) / 8  # of a nested weight (formats/nested)
BLOCK = 32


def int8(states: Tensor) -> Tensor:
    """`[..., head_dim]` through codes of 8 bits, a scale for each head of a token."""
    scale = (states.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return (torch.round(states.float() / scale) * scale).to(states.dtype)


def nested(states: Tensor) -> Tensor:
    """`[..., head_dim]` through 4-bit codes, a power of two for each block of 32 elements."""
    size = min(BLOCK, states.shape[-1])
    blocks = states.float().unflatten(-1, (-1, size))
    unit = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30))) - 2)
    code = ((blocks.abs() / unit).unsqueeze(-1) - LEVELS).abs().argmin(-1)
    return (LEVELS[code] * unit * blocks.sign()).flatten(-2).to(states.dtype)


@dataclass
class Views:
    """Attention that keeps the target's keys and values, or reads kept ones in one way."""

    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    keeps: bool = True
    window: int = 0
    codes: Callable[[Tensor], Tensor] = lambda states: states

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
               scaling: float, **_: object) -> tuple[Tensor, None]:
        """As transformers calls it: query `[1, heads, tokens, head_dim]` -> `[1, tokens, heads, head_dim]`."""
        if self.keeps:
            self.kept[module.layer_idx] = key, value
        key, value = (self.codes(states) for states in self.kept[module.layer_idx])
        groups = query.shape[1] // key.shape[1]
        key, value = (states.float().repeat_interleave(groups, 1) for states in (key, value))
        slot = torch.arange(key.shape[2])
        hidden = slot > slot[:, None]
        if self.window:
            hidden |= (slot >= FIRST) & (slot <= slot[:, None] - self.window)
        scores = (query.float() @ key.transpose(2, 3) * scaling).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ value).to(query.dtype).transpose(1, 2).contiguous(), None


def likeliest(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """The best next token at each position of the second half."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, len(ids) // 2 :].argmax(-1)


def agreements(target: PreTrainedModel, texts: list[list[int]], windows: list[int]) -> list[dict[str, object]]:
    """A line for each draft and view."""
    views = Views()
    ALL_ATTENTION_FUNCTIONS.register("draft_views", partial(Views.attend, views))
    target.set_attn_implementation("draft_views")
    drafts = {"mxfp4": hf_mlspec.direct_cast(target, "mxfp4"), "the target itself": target}
    ways = {"all tokens": {}, **{f"window {n}": {"window": n} for n in windows},
            "all, int8": {"codes": int8}, "all, 4.25 bits": {"codes": nested}}
    right = {(draft, way): 0 for draft in drafts for way in ways}
    counted = 0
    with torch.inference_mode():
        for ids in track(texts, description="texts", console=Console(stderr=True)):
            views.__init__()
            best = likeliest(target, ids)
            counted += len(best)
            for (draft, model), (way, view) in ((d, w) for d in drafts.items() for w in ways.items()):
                views.__init__(views.kept, keeps=False, **view)
                right[draft, way] += int((likeliest(model, ids) == best).sum())
    return [{"draft": draft, "view": way, "positions": counted, "agreement": n / counted}
            for (draft, way), n in right.items()]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.draft_views", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of the target, a Llama-like model")
    parser.add_argument("--text", type=Path, action="append", help="a text file; repeat it for more")
    parser.add_argument("--tokens", type=int, default=1000, help="of each text (1000)")
    parser.add_argument("--count", type=int, default=3, help="texts of each file (3)")
    parser.add_argument("--window", type=int, nargs="+", default=[128, 256, 512], help="(128 256 512)")
    parser.add_argument("--json", type=Path, help="write a line of JSON for each row of the table")
    parser.add_argument("--quick", action="store_true", help="the demo pair's target, its own source, 200 tokens")
    args = parser.parse_args(argv)
    if args.quick:
        args.model = args.model or hf_mlspec.demo_pair()[0]
        args.text, args.tokens, args.count, args.window = args.text or [Path(__file__)], 200, 1, [16, 200]
    if not args.model or not args.text:
        parser.error("--model and --text are needed, or --quick")
    if min(args.tokens, args.count, *args.window) < 1:
        parser.error("--tokens, --count and --window are at least 1")
    return args


def read(args: argparse.Namespace) -> list[list[int]]:
    """Ids of the first whole pieces of each file; ValueError where there are too few."""
    tokenizer, texts = AutoTokenizer.from_pretrained(args.model), []
    for file in args.text:
        ids = tokenizer(file.read_text(encoding="utf-8", errors="replace")).input_ids
        if len(ids) < args.tokens * args.count:
            raise ValueError(f"--text {file} has {len(ids)} tokens, {args.count} texts of {args.tokens} are asked for")
        texts += [ids[at * args.tokens : (at + 1) * args.tokens] for at in range(args.count)]
    return texts


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        texts = read(args)
        lines = agreements(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16), texts, args.window)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table("draft", "view", "positions", "likeliest token is the target's")
    for line in lines:
        table.add_row(line["draft"], line["view"], str(line["positions"]), f"{line['agreement']:.3f}")
    Console().print(table)
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
