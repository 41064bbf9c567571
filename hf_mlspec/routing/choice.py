"""What does a block read? One place in which features become widths, whoever runs the pass.

Planes that are streamed are asked for here, too: what a router foresees of the blocks to come.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .blocks import Block
from .foresight import LEAD, announce, is_streamed
from .router import Router


def widths_of(router: Router, blocks: Sequence[Block], place: int, features: Tensor) -> list[int]:
    """Of block ``place`` for every row of float32 ``[rows, features]``; what comes LEAD blocks later is announced."""
    heard = place + LEAD < len(blocks) and is_streamed(blocks[place + LEAD])
    if heard and (ahead := router.foresee(place, features)) is not None:
        announce(blocks[place + LEAD], ahead)
    return router.choose(place, features)
