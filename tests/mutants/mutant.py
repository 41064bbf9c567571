"""What is a mutant? One small change of the text of one file that makes it wrong, and the tests that must see it."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import NamedTuple

from . import rooms

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """name: what is wrong with it. file: of the repository. old: text that the file holds once. new: what stands there
    in its place. tests: of its room, by their node ids, "tests/" left out; one of them at least fails. quick: whether
    it is of the few that run with the slow tests."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    quick: bool = False

    @property
    def node_ids(self) -> list[str]:
        """What pytest is given."""
        return [f"tests/{test}" for test in self.tests]

    def mutated(self, text: str) -> str:
        """The file's text, changed. ValueError where the old text is not there exactly once."""
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"mutant {self.name}: {self.file} holds {found} times {self.old!r}, expected once: the "
                             "file has changed, so change the mutant with it")
        if self.old == self.new:
            raise ValueError(f"mutant {self.name} changes nothing")
        return text.replace(self.old, self.new)


def all_mutants() -> list[Mutant]:
    """Those of all rooms, in the order of their files."""
    names = sorted(module.name for module in pkgutil.iter_modules(rooms.__path__))
    return [one for name in names for one in importlib.import_module(f"{rooms.__name__}.{name}").MUTANTS]
