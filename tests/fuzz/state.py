"""What did a long run reach, and where does it go on? A JSON file for each reader, and one of the lines left."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .harness import Counts, Finding, Target
from .lines import Lines

_NUMBERS = ("inputs", "taken", "refused", "peak", "slowest", "seconds")


class State:
    """Counts and pools of readers, by their names. folder: where they are kept; None: nowhere. pools: of a new run.

    A run that was killed goes on with the turn that it was in: the same inputs again.
    """

    def __init__(
        self, targets: Sequence[Target], folder: Path | None, lines: Lines, pools: Mapping[str, list[bytes]]
    ) -> None:
        self.folder, self.lines = folder, lines
        self.pools = {name: list(pool) for name, pool in pools.items()}
        self.counts = {one.name: Counts() for one in targets}
        self.turns = dict.fromkeys(self.counts, 0)
        self._fed, self._texts = set(), lines.texts
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for name in self.counts:
                if (file := self._file(name)).is_file():
                    self._take(name, json.loads(file.read_text(encoding="utf-8")))
            told = json.loads(file.read_text()) if (file := folder / "lines.json").is_file() else {}
            if told.get("texts") == self._texts:
                lines.forget(told["left"])
                self._fed = {name for name, one in self.counts.items() if one.inputs}

    def _file(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '_')}.json"

    def _take(self, name: str, told: dict[str, Any]) -> None:
        findings = {one["what"]: Finding(**one | {"data": _bytes(one["data"])}) for one in told["findings"]}
        self.counts[name] = Counts(**{key: told[key] for key in _NUMBERS}, errors=Counter(told["errors"]),
                                   findings=findings)  # fmt: skip
        self.turns[name] = told["turns"]
        known = set(self.pools[name])
        self.pools[name] += [data for data in map(_bytes, told["pool"]) if data not in known]

    def begin(self, name: str) -> None:
        """A turn of a reader. Its inputs may end the process: which reader it was is said first."""
        self.turns[name] += 1
        if self.folder is not None:
            (self.folder / "now").write_text(f"{name}, turn {self.turns[name]}\n", encoding="utf-8")

    def first(self, name: str) -> list[bytes]:
        """The whole pool, once: in a new run, and where readers have changed, whose lines are counted anew."""
        known = [] if name in self._fed else list(self.pools[name])
        self._fed.add(name)
        return known

    def end(self, name: str) -> None:
        """Keep what a turn brought."""
        if self.folder is None:
            return
        counts = self.counts[name]
        findings = [asdict(one) | {"data": _text(one.data)} for one in counts.findings.values()]
        told = {**{key: getattr(counts, key) for key in _NUMBERS}, "errors": dict(counts.errors),
                "findings": findings, "turns": self.turns[name], "pool": [_text(one) for one in self.pools[name]]}
        left = {"texts": self._texts, "left": self.lines.told_all()}
        for file, said in ((self._file(name), told), (self.folder / "lines.json", left)):
            aside = file.with_suffix(".aside")
            aside.write_text(json.dumps(said), encoding="utf-8")
            aside.replace(file)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
