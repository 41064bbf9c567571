"""What can be done from a shell? mlspec demo | quantize | verify | generate | eval | info."""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any, NoReturn

from ..integration.hook import enable
from ..ops import KernelError
from .demo import add_demo
from .eval import add_eval
from .generate import add_generate
from .info import add_info
from .quantize import add_quantize
from .verify import add_verify


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The command line, each command with a `run(args) -> exit status`."""
    top = _Parser(prog="mlspec", description="Multi-level lossless speculative decoding for transformers.")
    top.add_argument("--traceback", action="store_true", help="show where an error came from")
    names = "demo | quantize | verify | generate | eval | info"
    commands = top.add_subparsers(dest="command", required=True, metavar=names)
    for add in (add_demo, add_quantize, add_verify, add_generate, add_eval, add_info):
        add(commands)
    return top


def _one_line(message: Warning | str, *where: Any, **more: Any) -> None:
    print(f"mlspec: {' '.join(str(message).split())}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0 as expected, 1 if ids differ, 2 for input that cannot work, 130 when interrupted."""
    args: Any = parser().parse_args(argv)
    warnings.showwarning = _one_line
    enable()
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print(f"mlspec {args.command}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, FloatingPointError, OSError, KernelError) as error:
        if args.traceback:
            raise
        print(f"mlspec {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
