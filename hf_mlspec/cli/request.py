"""What did the user hand to the command line: which prompts, which chain, on which device?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from .. import ops
from ..evaluation.prompts import read_prompts as read_prompts  # the commands take it from here
from ..integration.config import SpeculationConfig
from ..integration.levels.load import DTYPES, hide_progress_bars, load_causal_lm, require_device
from ..integration.levels.resolve import check_words, draws_on_nested, nested_for

_OF_LEVELS = "num_draft_tokens", "confidence_threshold", "draft_window"


def chain_config(args: argparse.Namespace, levels: list[Any] | None = None) -> SpeculationConfig:
    """The run-time options the user set; everything else stays at its default.

    levels: of the chain, where a command has some of its own. Called before a model is loaded, so it also reads dtype
    and levels: ValueError for those that cannot be, and for what says how levels draft where there is none.
    """
    require_dtype(args.dtype)
    check_words(args.levels or [])
    names = "num_draft_tokens", "confidence_threshold", "draft_window", "profile", "router"
    given = {name: getattr(args, name, None) for name in names}
    useless = [name for name in _OF_LEVELS if given[name] is not None] if not (levels or args.levels) else []
    if useless:
        option = f"--{useless[0].replace('_', '-')}"
        raise ValueError(f"{option} says how levels draft, and there is no level; add --level, or drop {option}")
    if given["profile"] is not None and not Path(given["profile"]).is_file():
        raise ValueError(f"--profile is {given['profile']!r}, which is no file; mlspec tune --output writes one")
    if given["router"] is not None and not Path(given["router"]).is_file():
        raise ValueError(f"--router is {given['router']!r}, which is no file; mlspec route train writes one")
    return SpeculationConfig(**{name: value for name, value in given.items() if value is not None})


def require_dtype(word: str, *more: str) -> None:
    """ValueError for a word that is neither a dtype nor one of `more`."""
    if word not in (known := [*more, *DTYPES]):
        raise ValueError(f"--dtype is {word!r}, it must be one of {', '.join(known)}")


def load_target(path: str, args: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer in the dtype and on the device the user asked for; args.device is chosen where none was."""
    hide_progress_bars()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(args.device)
    ops.kernel_table()  # an instruction set that is unknown is refused before a model is loaded
    require_nestable(args)
    model, tokenizer = load_causal_lm(path, args.dtype, args.device)
    return nested_for(model, args.levels or []), tokenizer


def require_nestable(args: argparse.Namespace) -> None:
    """ValueError for a level inside BF16 weights and another dtype."""
    wanted = next((level for level in args.levels or [] if draws_on_nested(level)), None)
    if wanted is not None and args.dtype != "bfloat16":
        raise ValueError(f"--level {wanted} drafts inside BF16 weights, not {args.dtype} ones; add --dtype bfloat16")
