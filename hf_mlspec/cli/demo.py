"""What can it do? Three levels write code and prose, and then the target alone writes the same."""

from __future__ import annotations

import argparse
import json
from contextlib import closing

from rich.console import Console

from ..demo_pair import DEMO_DRAFT, DEMO_TARGET, demo_pair, demo_prompts
from ..integration.compare import Comparison, Item, compare
from .request import chain_config, load_target
from .stream import LiveTable, MarkedStream
from .tables import describe, say, show_comparison


def run_demo(args: argparse.Namespace) -> int:
    path, levels = _chain(args)
    config = chain_config(args, levels)
    model, tokenizer = load_target(path, args)
    prompts = demo_prompts() if args.prompt is None else [{"name": "your prompt", "kind": "text", "text": args.prompt}]
    console = Console(quiet=args.json)
    names = [_shown(level) for level in levels]
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    say(console, f"target: {_shown(path)}, {parameters:.1f}M parameters, {args.dtype} on {args.device}")
    say(console, "levels below it: " + (", then ".join(names) or "none") + "\n")
    watch = _Watch(console, prompts, 2 * len(prompts))
    stream = LiveTable(console, tokenizer, model) if console.is_terminal else MarkedStream(console, tokenizer)
    with closing(stream):  # an interrupt or an error too leaves the terminal with its cursor
        found = compare(model, tokenizer, [prompt["text"] for prompt in prompts], levels, on_item=watch,
                        max_new_tokens=args.max_new_tokens, speculation_config=config,
                        streamer=None if args.json else stream)
    if args.json:
        print(json.dumps({"model": path, "levels": levels, "dtype": args.dtype, **found.to_dict()}))
    else:
        show_comparison(console, found, "levels, all prompts")
        say(console, f"ids identical: {found.identical} of {len(found.items)} prompts")
    return 0 if found.identical == len(found.items) else 1


def _chain(args: argparse.Namespace) -> tuple[str, list[str]]:
    if args.model:
        return args.model, args.levels or ["mxfp4"]
    target, draft = demo_pair()
    return target, args.levels or ["mxfp4", draft]


def _shown(path: str) -> str:
    """The demo's folders by their role, everything else as the user wrote it."""
    return {str(DEMO_TARGET): "the demo target", str(DEMO_DRAFT): "the demo draft"}.get(path, path)


class _Watch:
    """Says, prompt by prompt, how the target alone compares."""

    def __init__(self, console: Console, prompts: list[dict[str, str]], calls: int) -> None:
        self.console, self.prompts, self.calls = console, prompts, calls

    def __call__(self, item: Item, comparison: Comparison) -> None:
        name = f"{self.prompts[item.index]['name']} ({self.prompts[item.index]['kind']})"
        if item.reference_ids is None:
            say(self.console, f"-- {name}: {len(item.ids)} tokens\n")
        elif item.difference is None:
            say(self.console, f"target alone, {name}: the same {len(item.ids)} ids")
        else:
            say(self.console, "target alone, " + describe(item.index, item.difference))
