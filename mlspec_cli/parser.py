"""How are the words of a command line read, and how is one refused that cannot be?"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which names itself as what does not know a word.

    complete: called with the parser and its words before they are read: it may add arguments.
    passes_on: words it does not know are kept, as `words`, for another parser.
    """

    complete: Callable[[Parser, list[str]], None] | None = None
    passes_on = False

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.removeprefix('argument ').split())}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self.complete is not None:
            complete, self.complete = self.complete, None
            complete(self, list(args or ()))
        found, unknown = super().parse_known_args(args, namespace)
        if self.passes_on:
            found.words, unknown = unknown, []
        if unknown:  # argparse would let the parser above say so, with a list of the commands
            self.error(f"unknown {'words' if len(unknown) > 1 else 'word'} {' '.join(unknown)}")
        return found, unknown


class Version(argparse.Action):
    """Print the version of the package, whose import would take seconds, and end."""

    def __init__(self, option_strings: Any, dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"mlspec {version()}")
        parser.exit(0)


def version() -> str:
    """As `hf_mlspec/__init__.py` says it, of whichever package an import would find."""
    found = find_spec("hf_mlspec")  # finds the file, and runs nothing of it
    if found is None or found.origin is None:
        return "unknown: hf_mlspec is not installed"
    said = re.search(r'^__version__ = "(.+)"$', Path(found.origin).read_text(encoding="utf-8"), re.MULTILINE)
    return said[1] if said else "unknown"


def require_command(top: Parser, words: list[str], commands: list[str]) -> None:
    """End with status 2 where the first word that is no option is no command, naming the nearest."""
    given = next((word for word in words if not word.startswith("-")), None)
    if given is None or given in commands:
        return
    near = difflib.get_close_matches(given, commands, n=1)
    top.error(f"there is no command {given!r}: " + (f"perhaps {near[0]}" if near else " | ".join(commands)))
