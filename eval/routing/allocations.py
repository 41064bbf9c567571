"""Which fixed width of each block is best at an average of bits, and which would be best for each query alone?

`greedy` starts at the widest and lowers, again and again, the block that costs least for the bits it frees; what a
block costs is looked at anew only when it is about to be lowered. `oracle` knows what follows a query: it moves each
block of each query to the width of the least distance + price x bits, block after block, a few times over.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import torch

from hf_mlspec.routing.blocks import average_bits

from .scoring import Found, Scorer


def greedy(scorer: Scorer, widths: Sequence[int], stop: float, step: Callable[[], None]) -> list[list[int]]:
    """Allocations from the widest of all to the first at or below ``stop`` bits, each with one block lowered."""
    own = [widths[-1]] * len(scorer.blocks)
    now = float(scorer.fixed(own).distance.mean())
    total = sum(block.weights for block in scorer.blocks)
    path = [list(own)]

    def price(place: int) -> tuple[float, float]:
        """What a bit of a weight costs where the block goes one width down, and the distance then."""
        step()
        narrower = widths[widths.index(own[place]) - 1]
        distance = float(scorer.fixed([*own[:place], narrower, *own[place + 1 :]]).distance.mean())
        freed = (own[place] - narrower) * scorer.blocks[place].weights / total
        return (distance - now) / freed, distance

    heap = [(*price(place), place, 0) for place in range(len(own))]
    heapq.heapify(heap)
    while average_bits(own, scorer.blocks) > stop and heap:
        _, distance, place, age = heapq.heappop(heap)
        if age < len(path) - 1:
            heapq.heappush(heap, (*price(place), place, len(path) - 1))
            continue
        own[place], now = widths[widths.index(own[place]) - 1], distance
        path.append(list(own))
        if own[place] != widths[0]:
            heapq.heappush(heap, (*price(place), place, len(path) - 1))
    return path


def around(path: list[list[int]], scorer: Scorer, bits: float) -> tuple[list[int], list[int], float]:
    """The allocations of a path next above and next below an average, and the share of the first that meets it."""
    averages = [average_bits(own, scorer.blocks) for own in path]
    below = next((place for place, own in enumerate(averages) if own <= bits), len(path) - 1)
    above = max(below - 1, 0)
    gap = averages[above] - averages[below]
    return path[above], path[below], (bits - averages[below]) / gap if gap else 0.0


def blend(above: Found, below: Found, share: float) -> Found:
    """What queries have on average of which so many, drawn by lot, are at the first allocation."""
    parts = ((getattr(above, name), getattr(below, name)) for name in ("nats", "distance", "bits"))
    return Found(*(share * first + (1 - share) * second for first, second in parts))


def oracle(
    scorer: Scorer, start: Sequence[int], widths: Sequence[int], price: float, sweeps: int, step: Callable[[], None]
) -> Found:
    """Each query at its own best widths for a price of a bit, in nats a token."""
    own = [list(start) for _ in scorer.rows]
    total = sum(block.weights for block in scorer.blocks)
    now = scorer.each(own)
    for _ in range(sweeps):
        for place, block in enumerate(scorer.blocks):
            best, chosen = now.distance + price * now.bits, [row[place] for row in own]
            base = now.bits - torch.tensor(chosen) * (block.weights / total)
            for width in widths:
                if all(row[place] == width for row in own):
                    continue
                step()
                tried = scorer.each([[*row[:place], width, *row[place + 1 :]] for row in own])
                cost = tried.distance + price * (base + width * block.weights / total)
                better = (cost < best).tolist()
                best = torch.minimum(best, cost)
                chosen = [width if wins else old for wins, old in zip(better, chosen, strict=True)]
            for row, width in zip(own, chosen, strict=True):
                row[place] = width
            now = scorer.each(own)
    return now
