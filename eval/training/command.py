"""How does a program that trains a target from scratch begin and end?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def run(
    make: Callable[[argparse.Namespace, PreTrainedTokenizerBase], object], args: argparse.Namespace, here: Path
) -> int:
    """The exit status of ``make`` with ``args`` and the tokenizer that they name.

    args: smoke, tokenizer, steps, text, held_out. A smoke run takes what they leave out from the demo pair and from
    the programs of eval, of which that in ``here`` is held out.
    """
    try:
        if args.smoke:
            from hf_mlspec import demo_pair  # its tokenizer; nothing else here needs the package

            args.tokenizer, args.steps = args.tokenizer or demo_pair()[0], args.steps or 30
            args.text, args.held_out = args.text or [here.parent / "extend_context"], args.held_out or [here]
        make(args, PreTrainedTokenizerFast.from_pretrained(args.tokenizer))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
