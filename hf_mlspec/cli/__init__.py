"""What does a command of mlspec do? A file a command; mlspec_cli reads its words and starts it."""

from __future__ import annotations

import argparse
import sys
import traceback

from mlspec_cli import main

from ..engines.memory import out_of_memory
from ..integration.hook import enable
from ..integration.levels.chain_text import levels_of_options
from ..ops import KernelError
from .batch import run_batch
from .convert import run_convert
from .demo import run_demo
from .eval import run_eval
from .generate import run_generate
from .info import run_info
from .inspect import run_inspect
from .quantize import run_quantize
from .route import run_route
from .serve import run_serve
from .tune import run_tune
from .verify import run_verify

__all__ = ["main", "run"]

_COMMANDS = {"demo": run_demo, "quantize": run_quantize, "convert": run_convert, "inspect": run_inspect,
             "verify": run_verify, "generate": run_generate, "batch": run_batch, "serve": run_serve,
             "tune": run_tune, "route": run_route, "eval": run_eval, "info": run_info}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run `args.command`; 0 as expected, 1 if ids differ, 2 for invalid input, with one line of text."""
    enable()
    try:
        if getattr(args, "levels", None):  # each --level is one level, or several with + between
            args.levels = levels_of_options(args.levels)
        return _COMMANDS[args.command](args)
    except BrokenPipeError:  # an OSError that says nothing of the input
        raise
    except (ValueError, TypeError, FloatingPointError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not (isinstance(error, KernelError) or out_of_memory(error)):
            raise  # a fault of ours
        if args.traceback:
            traceback.print_exc()
        print(f"mlspec {args.command}: {said(error)}", file=sys.stderr)
        return 2


def said(error: Exception) -> str:
    """The message of an error in one line, without the name of a Python class."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).removeprefix("MLSpecConfig: ").split()) or type(error).__name__
