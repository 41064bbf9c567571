"""Do rows that come and go in captured rounds on a GPU write what each would alone?"""

from __future__ import annotations

import pytest
import torch
from serving import CHAINS, Levels, Serving


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "streams"), [*((name, False) for name in CHAINS), ("nothing", True)])
@pytest.mark.parametrize("seed", range(3))
def test_rows_come_and_go(name, streams, sampled, seed):
    with torch.inference_mode():
        serving = Serving(name, Levels("cuda", sampled), seed, streams)
        serving.play(14)
        serving.loop.rounds.chain.finish()
