"""What did the user hand to the command line: which prompts, which chain, on which device?"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from .. import ops
from ..evaluation.prompts import read_prompts as read_prompts  # the commands take it from here
from ..integration.config import SpeculationConfig
from ..integration.levels.load import DTYPES, hide_progress_bars, load_causal_lm
from ..integration.levels.resolve import draws_on_nested, nested_for, parse_level


def add_chain_options(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """The options that every decoding command has."""
    parser.add_argument("--level", action="append", metavar="LEVEL", dest="levels",
                        help="a level below the target, from the largest down; repeat it for more: a folder, mxfp4, "
                             "int3, int2, ternary, FOLDER@mxfp4, prompt_lookup, ngram, early_exit:N; nested (a BF16 "
                             "target is nested for it); planes1 ... planes8, qspec, w4a8, w4a4 for a packed target")
    parser.add_argument("--max-new-tokens", type=positive, default=max_new_tokens, metavar="N",
                        help="tokens to write for each prompt (default %(default)s)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32",
                        help="in float32 the chain's ids are the target's own (default %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default %(default)s")
    parser.add_argument("--num-draft-tokens", type=_numbers(int), metavar="N[,N...]",
                        help="tokens a level drafts before it is checked: one number, or one a level")
    parser.add_argument("--confidence-threshold", type=_numbers(float), metavar="P[,P...]",
                        help="a level stops drafting after a token it gave less: one number, or one a level")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def chain_config(args: argparse.Namespace) -> SpeculationConfig:
    """The run-time options the user set; everything else stays at its default.

    Called before a model is loaded, so it also reads every level word: ValueError for an unknown one.
    """
    for level in args.levels or []:
        parse_level(level)
    given = {name: getattr(args, name) for name in ("num_draft_tokens", "confidence_threshold")}
    return SpeculationConfig(**{name: value for name, value in given.items() if value is not None})


def load_target(path: str, args: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer in the dtype and on the device the user asked for."""
    hide_progress_bars()
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {args.device!r} cannot be used: {str(error).splitlines()[0]}") from error
    ops.kernel_table()  # an instruction set that is unknown is refused before a model is loaded
    wanted = next((level for level in args.levels or [] if draws_on_nested(level)), None)
    if wanted is not None and args.dtype != "bfloat16":
        raise ValueError(f"--level {wanted} drafts inside BF16 weights, not {args.dtype} ones; add --dtype bfloat16")
    model, tokenizer = load_causal_lm(path, args.dtype, args.device)
    return nested_for(model, args.levels or []), tokenizer


def positive(text: str) -> int:
    """An argparse type: an integer of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def positives(text: str) -> list[int]:
    """An argparse type: different integers of 1 or more, between commas."""
    values = [positive(part) for part in text.split(",")]
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text} names one number twice")
    return values


positives.__name__ = "list of integers"  # argparse: "invalid list of integers value"


def seed(text: str) -> int:
    """An argparse type: what torch.manual_seed takes."""
    value = int(text)
    if not 0 <= value < 2**64:
        raise argparse.ArgumentTypeError(f"{value} is not in 0 to 2**64 - 1")
    return value


def _numbers(kind: type) -> Any:
    def parse(text: str) -> Any:
        values = [kind(part) for part in text.split(",")]
        return values[0] if len(values) == 1 else values

    parse.__name__ = f"list of {kind.__name__}"  # argparse: "invalid list of int value"
    return parse
