"""What does a chain write after a prompt, or after each of a file, and how did its levels fare?"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing, nullcontext
from typing import Any

import torch
from rich.console import Console

from ..integration.compare import Comparison, accumulate, compare
from ..integration.config import SpeculationConfig
from ..integration.request import check_prompt_rows
from ..speculation.stats import SpeculationStats
from .request import chain_config, load_target, read_prompts
from .stream import TextStream
from .tables import LEVEL_COLUMNS, describe, level_rows, say, show, show_comparison, show_plans, where_time_went

_STANDARD_INPUT = "/dev/stdin"


def run_generate(args: argparse.Namespace) -> int:
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if not args.do_sample and (sampling or args.seed is not None):
        raise ValueError(f"{', '.join(sampling) or 'seed'} does nothing without --do-sample; add it")
    if args.do_sample and args.compare:
        raise ValueError("--compare needs greedy decoding: two samples of one distribution differ; drop --do-sample")
    if args.stop and args.compare:
        raise ValueError("--compare compares all of --max-new-tokens; drop --stop")
    config, prompts = chain_config(args), _prompts(args)
    model, tokenizer = load_target(args.model, args)
    stream = None if args.json else TextStream(Console(), tokenizer)
    with nullcontext() if stream is None else closing(stream):  # an error begins on a line of its own
        if args.compare:
            return _compared(args, model, tokenizer, prompts, config, stream)
        return _written(args, model, tokenizer, prompts, config, stream, sampling)


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt_file is None:
        return [args.prompt]
    if args.prompt_file != "-":
        return read_prompts(args.prompt_file)
    if sys.stdin is None:
        raise ValueError("--prompt-file - reads standard input, which is closed; name a file")
    return read_prompts(_STANDARD_INPUT)


def _written(args: argparse.Namespace, model: Any, tokenizer: Any, prompts: list[str], config: SpeculationConfig,
             stream: TextStream | None, sampling: dict[str, Any]) -> int:
    if args.seed is not None:
        torch.manual_seed(args.seed)
    check_prompt_rows(model, [tokenizer(prompt).input_ids for prompt in prompts], args.max_new_tokens)
    total, items = SpeculationStats(), []
    for index, prompt in enumerate(prompts):
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        output = model.generate(**inputs, assistant_models=args.levels or [], tokenizer=tokenizer, streamer=stream,
                                speculation_config=config, max_new_tokens=args.max_new_tokens, stop_strings=args.stop,
                                do_sample=args.do_sample, return_dict_in_generate=True, **sampling)
        ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        items.append({"prompt": prompt, "text": tokenizer.decode(ids), "ids": ids})
        accumulate(total, output.speculation)
        if stream is not None:
            _say_end(index, prompts, ids)
    if args.json:
        print(json.dumps(_told(args, items) | {"speculation": total.to_dict()}))
    else:
        console = Console()
        show(console, _title(prompts), LEVEL_COLUMNS, level_rows(total.levels))
        show_plans(console, total)
        say(console, where_time_went(total))
        say(console, f"{total.new_tokens} tokens in {total.seconds:.2f} s, {total.tokens_per_target_pass:.2f} per "
                     "target pass")
    return 0


def _compared(args: argparse.Namespace, model: Any, tokenizer: Any, prompts: list[str], config: SpeculationConfig,
              stream: TextStream | None) -> int:
    def watch(item: Any, comparison: Comparison) -> None:
        if stream is not None and item.reference_ids is None:
            _say_end(item.index, prompts, item.ids)

    found = compare(model, tokenizer, prompts, args.levels or [], max_new_tokens=args.max_new_tokens,
                    speculation_config=config, streamer=stream, on_item=watch)
    if args.json:
        items = [{"prompt": prompt, "text": tokenizer.decode(item.ids), "ids": item.ids}
                 for prompt, item in zip(prompts, found.items, strict=True)]
        print(json.dumps(found.to_dict() | _told(args, items)))
    else:
        console = Console()
        show_comparison(console, found, _title(prompts))
        for item in found.items:
            if item.difference is not None:
                say(console, describe(item.index, item.difference))
        say(console, f"ids identical: {found.identical} of {len(prompts)} prompts")
    return 0 if found.identical == len(prompts) else 1


def _told(args: argparse.Namespace, items: list[dict[str, Any]]) -> dict[str, Any]:
    """The text of --prompt, or a list of those of --prompt-file, however many it has."""
    if args.prompt_file is not None:
        return {"texts": items}
    return {name: items[0][name] for name in ("text", "ids")}


def _title(prompts: list[str]) -> str:
    return "levels" if len(prompts) == 1 else "levels, all prompts"


def _say_end(index: int, prompts: list[str], ids: list[int]) -> None:
    """The line between two texts; prompts count from 0, as in every message."""
    if len(prompts) > 1:
        say(Console(), f"-- prompt {index}: {len(ids)} tokens\n")
