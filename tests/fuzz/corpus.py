"""Which inputs reached lines that the good ones do not? Kept beside this file, in base64, an input a line.

python -m tests.fuzz.corpus DIR    takes them from a long run: of every reader the short ones
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

FOLDER = Path(__file__).with_name("corpus")
_LONGEST, _OF_ONE = 2048, 4096  # bytes of an input, and of all that are kept of one reader


def read_corpus(name: str) -> list[bytes]:
    """Those of a reader; [] where there are none."""
    file = _file(name)
    return [base64.b64decode(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _file(name: str) -> Path:
    return FOLDER / f"{name.replace(' ', '_')}.txt"


def write_corpus(name: str, inputs: list[bytes]) -> int:
    """Keep the shortest of a reader's inputs; -> how many."""
    kept, room = [], _OF_ONE
    for data in sorted(inputs, key=len):
        if len(data) <= min(_LONGEST, room) and data not in kept:
            kept.append(data)
            room -= len(data)
    if kept:
        FOLDER.mkdir(exist_ok=True)
        _file(name).write_text("".join(base64.b64encode(data).decode() + "\n" for data in kept))
    return len(kept)


def main() -> None:
    from .lines import Lines
    from .state import State
    from .targets import TARGETS

    state = State(TARGETS, Path(sys.argv[1]), Lines(), {one.name: [] for one in TARGETS})
    for target in TARGETS:
        found = [data for data in state.pools[target.name] if data not in target.seeds]
        print(f"{target.name}: {write_corpus(target.name, found)} of {len(found)}")


if __name__ == "__main__":
    main()
