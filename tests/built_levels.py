"""Which levels do calls build?"""

from __future__ import annotations

import pytest

from hf_mlspec.integration.levels.wiring import Wiring


def levels_built(patch: pytest.MonkeyPatch) -> list[list[str]]:
    """Per call of Wiring from now on the names of the levels that it built."""
    names, below = [], Wiring._below

    def watched(self, leader, levels, engines):
        names.append([level.name for level in levels])
        return below(self, leader, levels, engines)

    patch.setattr(Wiring, "_below", watched)
    return names
