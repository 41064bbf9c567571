"""Which chains does the program compare: QSpec, a head, a tree and both, and what changes one number at a time?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Of every part the chains by name: levels, lengths and, of the last level, widths by depth. "own": the target's own
# weights at fewer bits, "small": a head or a tiny model.
PARTS = {
    "tables": {
        "QSpec": "own:3",
        "small": "small:4",
        "small, tree": "small:4:2,2,1,1",
        "QSpec, small": "own+small:8,4",
        "QSpec, small, tree": "own+small:8,4:2,2,1,1",
    },
    "depth": {f"{depth} deep": f"small:{depth}" for depth in (1, 2, 3, 4, 6, 8)},
    "width": {
        shape: f"small:4:{shape}" for shape in ("1", "2", "3", "2,2", "3,2", "2,2,2", "2,2,1,1", "4,2,1,1")
    },
    "order": {
        "own": "own:8",
        "small": "small:4",
        "own, small": "own+small:8,4",
        "own, lookups": "own+prompt_lookup:8,4",
        "small, lookups": "small+prompt_lookup:4,4",
        "own, small, lookups": "own+small+prompt_lookup:8,4,4",
    },
}


@dataclass
class Chain:
    """One of them. levels: what stands for them. config: options of the call."""

    name: str
    levels: list[str]
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, text: str, stands: dict[str, str], threshold: float) -> Chain:
        """From "level+level:length,length:width,width"; stands: what words stand for. ValueError for another text."""
        parts = text.split(":")
        if not 2 <= len(parts) <= 3:
            raise ValueError(f"{name}={text}: a chain is LEVEL+LEVEL:LENGTH,LENGTH or that and :WIDTH,WIDTH")
        levels, (lengths, *tree) = parts[0].split("+"), [[int(n) for n in part.split(",")] for part in parts[1:]]
        if len(lengths) != len(levels):
            raise ValueError(f"{name}={text}: {len(levels)} levels, and {len(lengths)} lengths")
        config = {"num_draft_tokens": lengths, "confidence_threshold": [threshold] * len(levels)}
        return cls(name, [stands.get(level, level) for level in levels], config | ({"tree": tree[0]} if tree else {}))


def chains_of(part: str, stands: dict[str, str], threshold: float, small: str, *, heads: bool) -> list[Chain]:
    """The chains of a part; small: what the level in the place of "small" is called. heads: it is one, and nothing
    stands below it."""
    found = []
    for name, text in PARTS[part].items():
        if not (heads and "small+" in text):
            found.append(Chain.of(name.replace("small", small), text, stands, threshold))
    return found
