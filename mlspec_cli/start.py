"""How does a command start, and which exit status does it end with, whatever ends it?"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from .commands import add_commands
from .parser import Parser, Version, require_command

BAD_INPUT, UNFORESEEN, INTERRUPTED, CLOSED_PIPE = 2, 70, 130, 141  # 0: fine, 1: an id differs


def main(argv: list[str] | None = None) -> int:
    """Run a command; -> 0 as expected, 1 if ids differ, 2 for input that cannot work, 130 when interrupted, 141 when
    whoever reads the output goes away before its end, 70 for an error that was not foreseen.

    SystemExit, with the same numbers, for words that cannot be read and after --help.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    name = "mlspec"
    try:
        try:
            with _ending_quietly():
                args = _read(words)
                name = f"mlspec {args.command}"
                run = _what_runs()
            status = run(args)
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):  # rich leaves with 1
                raise end.__context__ from None
            _flush(end.code)
            raise
        _flush(status)
        return status
    except KeyboardInterrupt:
        return _ended(name, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        _let_go_of_output()
        return CLOSED_PIPE
    except OSError as error:  # of the last lines: what a command cannot read or write it says itself
        _let_go_of_output()
        return _ended(name, f"the output cannot be written: {error.strerror or error}", BAD_INPUT)
    except Exception:
        with suppress(OSError):
            traceback.print_exc()
        return UNFORESEEN


def _read(words: list[str]) -> Any:
    top = Parser(prog="mlspec", description="Multi-level lossless speculative decoding for transformers.",
                 epilog="mlspec COMMAND --help lists the options of a command.")
    top.add_argument("--traceback", action="store_true", help="show where an error came from")
    top.add_argument("--version", action=Version, help="print the version and end")
    commands = add_commands(top)
    if "_ARGCOMPLETE" in os.environ:
        _complete(top)
    require_command(top, words, commands)
    args = top.parse_args(words)
    if args.command is None:
        top.error(f"no command is given; there are {' | '.join(commands)}")
    return args


def _complete(top: Parser) -> None:
    """Tell the shell what could come next and end, where argcomplete is installed and the shell asks."""
    with suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(top)


def _what_runs() -> Callable[[Any], int]:
    """Seconds: torch, transformers and the package."""
    warnings.showwarning = _one_line
    from hf_mlspec.cli import run

    return run


def _one_line(message: Warning | str, *where: Any, **more: Any) -> None:
    print(f"mlspec: {' '.join(str(message).split())}", file=sys.stderr)


@contextmanager
def _ending_quietly() -> Iterator[None]:
    """Ctrl-C ends the process at once: nothing was begun, and imports, in whose middle an exception comes out as
    another one or not at all, leave nothing to tidy up."""
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(*_: Any) -> NoReturn:
        with suppress(OSError):
            os.write(2, b"mlspec: interrupted\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _flush(status: Any) -> None:
    """The last of the output; OSError where nothing was wrong before."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        if not status:
            raise
        _let_go_of_output()


def _let_go_of_output() -> None:
    """What is left in the buffer goes nowhere: Python would try again at its end, and end with another status."""
    with suppress(AttributeError, OSError, ValueError):  # no stdout, or one without a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _ended(name: str, why: str, status: int) -> int:
    with suppress(OSError):
        print(f"{name}: {why}", file=sys.stderr)
    return status
