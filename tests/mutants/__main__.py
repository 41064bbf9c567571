"""Does every mutant die? Applies each in a copy of the package, runs the tests of its room, and tells survivors.

python -m tests.mutants                 all of them
python -m tests.mutants --quick         the few that run with the slow tests
python -m tests.mutants --only rollback those whose name or file has this text
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from .mutant import Mutant, all_mutants
from .tree import Outcome, copied_tree, import_package


def chosen(only: str | None, quick: bool) -> list[Mutant]:
    """The mutants asked for."""
    return [one for one in all_mutants()
            if (only is None or only in one.name or only in one.file) and (one.quick or not quick)]  # fmt: skip


def run(mutants: list[Mutant], told: Callable[[str], object] = print) -> list[tuple[Mutant, Outcome]]:
    """The outcome of each, those first whose file is changed; told: called with a line of each."""
    found: list[tuple[Mutant, Outcome]] = []

    def tell(mutant: Mutant, outcome: Outcome) -> None:
        what = outcome.wrong or (f"killed by {outcome.killed_by}" if outcome.killed_by else "SURVIVES")
        found.append((mutant, outcome))
        told(f"{len(found):3}/{len(mutants)} {outcome.seconds:6.1f} s  {mutant.name}: {what}")

    with copied_tree() as tree:
        in_files = [mutant for mutant in mutants if tree.swaps(mutant) is None]
        for mutant in in_files:
            tell(mutant, tree.in_the_file(mutant))
        node_ids = sorted({test for mutant in mutants for test in mutant.node_ids})
        import_package(node_ids)
        whole = tree.tested(node_ids)
        if whole.wrong or whole.killed_by:
            raise ValueError(f"without a mutant the tests fail, so nothing follows from them: {whole}")
        told(f"all of their tests pass without a mutant, {whole.seconds:.0f} s")
        for mutant in mutants:
            if mutant not in in_files:
                tell(mutant, tree.in_functions(mutant))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", help="mutants whose name or file has this text")
    parser.add_argument("--quick", action="store_true", help="the few that run with the slow tests")
    options = parser.parse_args()
    mutants = chosen(options.only, options.quick)
    if not mutants:
        print(f"no mutant is named {options.only!r}", file=sys.stderr)
        return 2
    found = run(mutants, lambda line: print(line, flush=True))
    alive = [mutant.name for mutant, outcome in found if outcome.killed_by is None]
    print(f"{len(found)} mutants, {len(found) - len(alive)} killed, {len(alive)} not{': ' * bool(alive)}"
          f"{', '.join(alive)}")  # fmt: skip
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
