"""What does a chain write after one prompt, and how did its levels fare?"""

from __future__ import annotations

import argparse
import json
from contextlib import closing, nullcontext
from typing import Any

import torch
from rich.console import Console

from ..integration.compare import compare
from ..integration.config import SpeculationConfig
from .request import add_chain_options, chain_config, load_target, seed
from .stream import TextStream
from .tables import LEVEL_COLUMNS, describe, level_rows, say, show, show_comparison


def add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="continue one prompt with a chain of levels")
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    add_chain_options(parser, max_new_tokens=128)
    parser.add_argument("--compare", action="store_true",
                        help="decode with the target alone too; exit status 1 if any id differs")
    parser.add_argument("--do-sample", action="store_true", help="sample instead of taking the likeliest token")
    for name, kind in (("temperature", float), ("top-k", int), ("top-p", float), ("seed", seed)):
        parser.add_argument(f"--{name}", type=kind, help="with --do-sample")
    parser.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if not args.do_sample and (sampling or args.seed is not None):
        raise ValueError(f"{', '.join(sampling) or 'seed'} does nothing without --do-sample; add it")
    if args.do_sample and args.compare:
        raise ValueError("--compare needs greedy decoding: two samples of one distribution differ; drop --do-sample")
    if not args.prompt:
        raise ValueError("--prompt is empty; write the text to continue")
    config = chain_config(args)
    model, tokenizer = load_target(args.model, args)
    stream = None if args.json else TextStream(Console(), tokenizer)
    with nullcontext() if stream is None else closing(stream):  # an error begins on a line of its own
        if args.compare:
            return _compared(args, model, tokenizer, config, stream)
        return _written(args, model, tokenizer, config, stream, sampling)


def _written(args: argparse.Namespace, model: Any, tokenizer: Any, config: SpeculationConfig,
             stream: TextStream | None, sampling: dict[str, Any]) -> int:
    if args.seed is not None:
        torch.manual_seed(args.seed)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    output = model.generate(**inputs, assistant_models=args.levels or [], tokenizer=tokenizer, streamer=stream,
                            speculation_config=config, max_new_tokens=args.max_new_tokens,
                            do_sample=args.do_sample, return_dict_in_generate=True, **sampling)
    ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    if args.json:
        print(json.dumps({"text": tokenizer.decode(ids), "ids": ids, "speculation": output.speculation.to_dict()}))
    else:
        console = Console()
        stats = output.speculation
        show(console, "levels", LEVEL_COLUMNS, level_rows(stats.levels))
        say(console, f"{stats.new_tokens} tokens in {stats.seconds:.2f} s, "
                     f"{stats.tokens_per_target_pass:.2f} per target pass")
    return 0


def _compared(args: argparse.Namespace, model: Any, tokenizer: Any, config: SpeculationConfig,
              stream: TextStream | None) -> int:
    found = compare(model, tokenizer, [args.prompt], args.levels or [], max_new_tokens=args.max_new_tokens,
                    speculation_config=config, streamer=stream)
    ids, difference = found.items[0].ids, found.items[0].difference
    if args.json:
        print(json.dumps({"text": tokenizer.decode(ids), "ids": ids, **found.to_dict()}))
    else:
        console = Console()
        show_comparison(console, found, "levels")
        if difference is not None:
            say(console, describe(0, difference))
        say(console, f"ids identical: {found.identical} of 1 prompts")
    return 0 if difference is None else 1
