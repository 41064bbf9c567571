"""Which options do several commands share?"""

from __future__ import annotations

import argparse

from .values import numbers, positive


def add_place(parser: argparse.ArgumentParser) -> None:
    """How a model in bit-planes is loaded."""
    parser.add_argument("--group-size", type=positive, default=128, metavar="N",
                        help="weights that share a scale, where the model is dense (default %(default)s)")
    parser.add_argument("--dtype", default="float32", metavar="WORD", help="float32 (default), bfloat16 or float16")
    parser.add_argument("--device", metavar="NAME", help="default: cuda where there is one, else cpu")
    add_json(parser)


def add_chain(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """The options that every decoding command has."""
    add_levels(parser)
    parser.add_argument("--max-new-tokens", type=positive, default=max_new_tokens, metavar="N",
                        help="tokens to write for each prompt (default %(default)s)")
    add_drafting(parser)
    add_json(parser)


def add_drafting(parser: argparse.ArgumentParser) -> None:
    """How much the levels draft."""
    parser.add_argument("--num-draft-tokens", type=numbers(int), metavar="N[,N...]",
                        help="tokens a level drafts before it is checked: one number, or one a level (default: chosen "
                             "round by round; where rounds are captured on a GPU 8, or the level's own)")
    parser.add_argument("--confidence-threshold", type=numbers(float), metavar="P[,P...]",
                        help="a level stops drafting after a token whose probability is below P: one number, or one "
                             "a level (default: 0.4, or the level's own; 0: never). Given, it fixes the draft "
                             "lengths too")
    parser.add_argument("--draft-window", type=int, metavar="N",
                        help="levels see the first 64 and the last N tokens of a row, the target sees all; 0: levels "
                             "see all, too (default: chosen with the draft lengths)")
    parser.add_argument("--profile", metavar="FILE",
                        help="what mlspec tune --output wrote (default: what earlier calls measured)")
    parser.add_argument("--router", metavar="FILE", help="of level routed: what mlspec route train wrote")


def add_levels(parser: argparse.ArgumentParser) -> None:
    """Which models: the levels, and how they are loaded."""
    parser.add_argument("--level", action="append", metavar="LEVEL", dest="levels",
                        help="a level below the target, from the largest down; repeat it for more, or join them "
                             "by +, as in mxfp4+FOLDER: the folder of a model or of a trained head (last), mxfp4, "
                             "int3, int2, ternary, FOLDER@mxfp4, prompt_lookup, ngram, early_exit:N; "
                             "experts:N for a mixture of experts; nested (a BF16 target is nested for it); "
                             "planes1 ... planes7, up to one plane fewer than the target has; routed, with --router; "
                             "zipper-low for a target in zipper weights; qspec, w4a8, w4a4 for a packed target")
    parser.add_argument("--dtype", default="float32", metavar="WORD",
                        help="float32 (default), bfloat16 or float16")
    parser.add_argument("--device", metavar="NAME", help="default: cuda where there is one, else cpu")


def add_json(parser: argparse.ArgumentParser) -> None:
    """For scripts."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
