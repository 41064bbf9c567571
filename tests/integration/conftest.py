"""What do the tests of generate watch: what was said already, and which engine was wired?"""

from __future__ import annotations

import pytest
from warned import forget_warnings

from hf_mlspec.integration.levels.wiring import Wiring


@pytest.fixture
def nothing_said_yet():
    """Messages that are said once come again."""
    forget_warnings()


@pytest.fixture
def runners(monkeypatch):
    """Names of the classes that score tokens, in the order in which chains were wired."""
    made, make = [], Wiring._engines

    def counted(self, *models):
        engines = make(self, *models)
        made.extend(type(engine).__name__ for engine in engines)
        return engines

    monkeypatch.setattr(Wiring, "_engines", counted)
    return made
