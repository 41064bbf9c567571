"""What do the tests of the server talk to? The demo pair behind uvicorn, on a free port of this machine.

Every file of tests asks first, with `importorskip`, whether the packages of the extra `serve` are here.
"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def alone():
    """A second copy of the target: what generate writes for one request."""
    from servers import Alone

    return Alone()


@pytest.fixture(scope="session")
def server():
    """A server of the demo pair with both levels, four slots and small limits."""
    from servers import Running

    with Running(queue=40) as running:
        yield running
