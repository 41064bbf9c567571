"""How does a model draft for itself? On fewer bits of its weights, or times coarser activations, in the same cache.

What drafts is an engine like any other, over the target's weights, at other bits. Its check at the target's bits
overwrites every drafted slot of the cache, so that after each round the cache holds what the target alone would have
put there. Weights and cache are there once.

    QSpec (arXiv 2410.11305)   4-bit weights times 4- or 8-bit activations; the target's are of 16 bits. Draft and
                               check read the same bytes, so this pays where arithmetic is the limit.
    nested BF16                the 4 bits of each weight that are a draft of it (formats/nested/): a quarter of the
                               bytes, and no copy as a cast would be.
    bit-planes                 the first few planes of each weight (formats/planes/); several such levels may be
                               in a chain, each with fewer planes than the one that checks it.

A level like this may stand under a `ModelDrafter`, or under a `Checker` in the middle of a chain.
"""

from __future__ import annotations

from ...engines.engine import Engine
from ...precision import Bits


def at_lower_precision(engine: Engine, bits: Bits) -> Engine:
    """`engine`, not yet started, with every packed layer of its model called at `bits` (see PrecisionSwitch)."""
    engine.bits = bits
    return engine
