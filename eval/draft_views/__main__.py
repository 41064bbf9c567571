"""How often is a draft right that sees a part of the target's cache, or keys and values of fewer bits, and how far on?

    python -m eval.draft_views --model FOLDER/code-76m --text FOLDER/wikitext2/test.txt --tokens 1000
    python -m eval.draft_views --model FOLDER/code-21m-long --draft FOLDER/code-4m-long --text hf_mlspec \\
        --tokens 8192 --until 512 1024 2048 4096 8192 --window 512 1024
    python -m eval.draft_views --quick

The target reads texts and its keys and values are kept. Its cast to MXFP4, and the target itself, then read the same
texts over these keys and values, seen in several ways; a --draft reads them over its own. Counted is how often the
likeliest token is the target's, in the second half of each text, or with --until in ranges of positions. Ways: all
tokens; the first 64 and the last N (SpeculationConfig(draft_window=N)); and all tokens in fewer bits: "int8" with a
scale a token and head, "4.25 bits" as in the draft of a nested weight (blocks of 32 along the head, a power of two
each, eight magnitudes). "The text" says how often the target's token is the text's next one: how well it reads there.
A text is a piece of a file, or of a folder's sources in order. Nothing is timed: it says which view is worth a kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
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
from eval.draft_views.views import CHUNK, Views, int8, nested
from eval.refused import refused
from eval.sources import read_texts

TARGET = "the target itself"


def likeliest(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The best next token behind each position of ids int64 `[1, tokens]` -> int64 `[tokens]`."""
    states, head = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0], model.get_output_embeddings()
    return torch.cat([head(part).argmax(-1) for part in states.split(CHUNK)])


def agreements(target: PreTrainedModel, drafts: dict[str, PreTrainedModel], texts: list[list[int]],
               windows: list[int], ranges: list[tuple[int, int]]) -> list[dict[str, object]]:
    """A line for each draft, view and range of positions. `drafts` have caches of their own."""
    views = Views()
    ALL_ATTENTION_FUNCTIONS.register("draft_views", partial(Views.attend, views))
    for model in (target, *drafts.values()):
        model.set_attn_implementation("draft_views")
    readers = {"mxfp4": hf_mlspec.direct_cast(target, "mxfp4"), TARGET: target, **drafts}
    ways = {"all tokens": {}, **{f"window {n}": {"window": n} for n in windows},
            "all, int8": {"codes": int8}, "all, 4.25 bits": {"codes": nested}}
    names = [(draft, way) for draft in readers for way in ways]
    right = {name: torch.zeros(len(ranges), dtype=torch.int64) for name in [*names, ("the text", "all tokens")]}
    with torch.inference_mode():
        for text in track(texts, description="texts", console=Console(stderr=True)):
            ids = torch.tensor([text], device=target.device)
            views.__init__()
            best, kept = likeliest(target, ids), views.kept
            for name in names:
                own = name[0] in drafts
                views.__init__({} if own else kept, keeps=own, **ways[name[1]])
                right[name] += counts(likeliest(readers[name[0]], ids) == best, ranges)
            right["the text", "all tokens"] += counts(best[:-1] == ids[0, 1:], ranges)
    return [{"draft": draft, "view": way, "from": low, "to": high, "positions": (high - low) * len(texts),
             "agreement": int(n) / ((high - low) * len(texts))}
            for (draft, way), found in right.items() for (low, high), n in zip(ranges, found, strict=True)]


def counts(hits: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
    """bool `[tokens]` -> how many hold in each range, int64 `[ranges]` on the CPU."""
    return torch.stack([hits[low:high].sum() for low, high in ranges]).cpu()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.draft_views", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of the target, a Llama-like model")
    parser.add_argument("--draft", type=Path, action="append", default=[],
                        help="folder of a draft with a cache of its own and the same tokenizer; repeat it for more")
    parser.add_argument("--text", type=Path, action="append", help="a text file or a folder; repeat it for more")
    parser.add_argument("--tokens", type=int, default=1000, help="of each text (1000)")
    parser.add_argument("--count", type=int, default=3, help="texts of each file (3)")
    parser.add_argument("--window", type=int, nargs="+", default=[128, 256, 512], help="(128 256 512)")
    parser.add_argument("--until", type=int, nargs="+", metavar="POSITION",
                        help="where ranges of positions end, the first from 0 on (the second half alone)")
    parser.add_argument("--device", default="cpu", help="(cpu)")
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
    ends = args.until or [args.tokens // 2, args.tokens]
    if sorted({0, *ends}) != [0, *ends] or ends[-1] > args.tokens:
        parser.error(f"--until {' '.join(map(str, ends))}: positions rise, from 1 to at most --tokens {args.tokens}")
    models = [("--model", args.model), *(("--draft", folder) for folder in args.draft)]
    texts = [("--text", file) for file in args.text]
    if (reason := refused(args.device, models, texts, [("--json", args.json)])) is not None:
        parser.error(reason)
    args.ranges = list(zip([0, *ends], ends, strict=False))[0 if args.until else 1 :]
    return args


def read(args: argparse.Namespace) -> list[list[int]]:
    """Ids of the first whole pieces of each file or folder; ValueError where there are too few."""
    tokenizer, texts = AutoTokenizer.from_pretrained(args.model), []
    for file in args.text:
        text = "\n\n".join(read_texts(file)) if file.is_dir() else file.read_text(encoding="utf-8", errors="replace")
        ids = tokenizer(text).input_ids
        if len(ids) < args.tokens * args.count:
            raise ValueError(f"--text {file} has {len(ids)} tokens, {args.count} texts of {args.tokens} are asked for")
        texts += [ids[at * args.tokens : (at + 1) * args.tokens] for at in range(args.count)]
    return texts


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, dict[str, PreTrainedModel]]:
    """The target and its drafts; ValueError for a draft of other tokens, and for longer texts than one of them reads.
    """
    target, *drafts = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(args.device)
                       for folder in (args.model, *args.draft))
    for folder, model in zip((args.model, *args.draft), (target, *drafts), strict=True):
        most = getattr(model.config, "max_position_embeddings", None)
        if most is not None and args.tokens > most:
            raise ValueError(f"--tokens {args.tokens:,} is more than the {most:,} positions of {folder}: take fewer")
    for folder, draft in zip(args.draft, drafts, strict=True):
        if draft.config.vocab_size != target.config.vocab_size:
            raise ValueError(f"--draft {folder} has {draft.config.vocab_size:,} tokens, the target "
                             f"{target.config.vocab_size:,}: a draft needs the target's tokenizer")
    return target, {folder.resolve().name: draft for folder, draft in zip(args.draft, drafts, strict=True)}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        texts = read(args)
        lines = agreements(*load(args), texts, args.window, args.ranges)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table("draft", "view", *(f"{low:,} to {high:,}" for low, high in args.ranges),
                  title=f"likeliest token is the target's, {len(texts)} texts")
    found = {(line["draft"], line["view"], line["to"]): line["agreement"] for line in lines}
    for draft, view in dict.fromkeys((line["draft"], line["view"]) for line in lines):
        table.add_row(draft, view, *(f"{found[draft, view, high]:.3f}" for _, high in args.ranges))
    Console().print(table)
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
