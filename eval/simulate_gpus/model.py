"""How long does a step take on several GPUs of a node, by what one GPU and its links were measured to take?

Of a step's time, reading weights and cache (or, with many tokens, arithmetic) shrinks with the number of GPUs; what
each layer adds beside it does not, and every layer adds up twice over the links. One GPU tells both apart: it is timed
with all of a model and with what each of two and of four GPUs would hold of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BYTES = {"bf16": 2.0, "nested": 16.25 / 8, "mxfp4": 4.25 / 8}  # a weight
HELD = {"alone": BYTES["bf16"], "cast": BYTES["bf16"] + BYTES["mxfp4"], "nested": BYTES["nested"]}
_SUMMED = 4096  # elements of a token of the measured sums

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Node:
    """What was measured. flops: of a GPU's matrix products; memory: bytes of one. fixed: by format, seconds that a
    layer takes beside its bytes, by tokens of the step; paces: seconds of a byte. sums: seconds of adding up
    [tokens, 4096] over two GPUs, by tokens; head: of bringing logits together. cached: tokens of a row behind which
    steps were timed. gpus: of the node."""

    flops: float
    memory: float
    fixed: Mapping[str, Points]
    paces: Mapping[str, Points]
    sums: Points
    head: float
    cached: float = 512
    gpus: int = 8


@dataclass(frozen=True)
class Shape:
    """Of a decoder like Llama. weights: all of it that a step reads, the head too."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128

    @property
    def weights(self) -> float:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocab * self.hidden

    def cache(self, tokens: float) -> float:
        """Bytes of keys and values of so many tokens, in bfloat16."""
        return 4.0 * tokens * self.layers * self.kv_heads * self.head_dim


def at(points: Points, x: float) -> float:
    """Between the measured points; outside of them as at the nearest one."""
    (x0, y0), *others = sorted(points)
    if x <= x0:
        return y0
    for x1, y1 in others:
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        x0, y0 = x1, y1
    return y0


def summing(node: Node, shape: Shape, gpus: int, tokens: float) -> float:
    """Seconds that a step takes for what GPUs add up: each reads the parts of all others."""
    if gpus == 1:
        return 0.0
    wide = tokens * shape.hidden / _SUMMED * (gpus - 1)
    most = max(tokens for tokens, _ in node.sums)
    return 2 * shape.layers * at(node.sums, wide) * max(1.0, wide / most) + node.head


def read_by(shape: Shape, word: str, rows: int, cached: float) -> float:
    """Bytes that a step reads."""
    return shape.weights * BYTES[word] + shape.cache(rows * cached)


def told_apart(reads: Sequence[float], seconds: Sequence[float], layers: int) -> tuple[float, float]:
    """Of steps of one GPU that read so many bytes: seconds that a layer takes beside them, and seconds of a byte, by
    least squares. ValueError where seconds do not grow with the bytes, or by more than these, and where all steps read
    as many."""
    mean_read, mean = sum(reads) / len(reads), sum(seconds) / len(seconds)
    spread = sum((read - mean_read) ** 2 for read in reads)
    if not spread:
        raise ValueError("steps of different bytes tell them from the rest: shares has to name two or more, such as "
                         "[1, 2]")
    pace = sum((read - mean_read) * (own - mean) for read, own in zip(reads, seconds, strict=True)) / spread
    beside = (mean - pace * mean_read) / layers
    if pace <= 0 or beside < 0:
        raise ValueError(f"steps of {', '.join(f'{read:.3g}' for read in reads)} bytes took "
                         f"{', '.join(f'{1e3 * own:.3g}' for own in seconds)} ms: no bytes beside a fixed time")
    return beside, pace


def step(node: Node, shape: Shape, word: str, gpus: int, rows: int, width: float = 1, cached: float = 512) -> float:
    """Seconds of one step of `rows` rows with `width` tokens each behind `cached` others."""
    tokens, known = rows * width, word if word in node.fixed else "bf16"
    reading = read_by(shape, word, rows, cached) * at(node.paces[known], tokens)
    work = max(reading, 2 * shape.weights * tokens / node.flops) / gpus
    return work + shape.layers * at(node.fixed[known], tokens) + summing(node, shape, gpus, tokens)


@dataclass(frozen=True)
class Chain:
    """["mxfp4", tiny]: a pass of the target checks `casts` drafts of the cast, of `drafted` + 1 tokens each; gained:
    tokens of a pass. tiny: seconds of a step of the last level, of which every GPU holds all."""

    casts: float
    drafted: int
    gained: float
    tiny: float


def chained(node: Node, shape: Shape, chain: Chain, gpus: int, rows: int, cached: float = 512, nested: bool = False
            ) -> float:
    """Seconds of a pass of the target with all that its drafts cost. nested: its own weights hold the 4-bit level."""
    own = step(node, shape, "nested" if nested else "bf16", gpus, rows, chain.casts * (chain.drafted + 1) + 1, cached)
    cast = step(node, shape, "mxfp4", gpus, rows, chain.drafted + 1, cached)
    return own + chain.casts * (cast + chain.drafted * chain.tiny)


def fits(node: Node, shape: Shape, gpus: int, rows: int, cached: float, held: str) -> bool:
    """Whether weights, as of `HELD`, and the cache of all rows have room, a tenth of the memory left alone."""
    weights = shape.weights * HELD[held] + 2.0 * shape.vocab * shape.hidden
    return weights + shape.cache(rows * cached) <= 0.9 * gpus * node.memory


def most_users(node: Node, shape: Shape, chain: Chain | None, gpus: int, cached: float, each: float, held: str) -> int:
    """Rows that decode at a time with `each` tokens a second or more for every one; 0: not one. chain: None where the
    target decodes alone."""
    def enough(rows: int) -> bool:
        if not fits(node, shape, gpus, rows, cached, held):
            return False
        if chain is None:
            return 1 / step(node, shape, "bf16", gpus, rows, 1, cached) >= each
        return chain.gained / chained(node, shape, chain, gpus, rows, cached, held == "nested") >= each

    best, add = 0, 4096
    while add:
        best, add = (best + add, add) if enough(best + add) else (best, add // 2)
    return best
