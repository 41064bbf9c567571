"""What do the tests of the server talk to? The demo pair behind uvicorn, on a free port of this machine."""

from __future__ import annotations

import pytest

needed = "the server's packages are not installed (extra serve): {}"
for package in ("fastapi", "uvicorn", "openai", "prometheus_client"):
    try:
        __import__(package)
    except ImportError:
        collect_ignore_glob = ["test_*.py"]
        pytest.skip(needed.format(package), allow_module_level=True)

from servers import Alone, Running


@pytest.fixture(scope="session")
def alone() -> Alone:
    """The target in a process of its own: what generate writes for one request."""
    return Alone()


@pytest.fixture(scope="session")
def server(alone):
    """A server of the demo pair with both levels, four slots and small limits."""
    with Running(queue=40) as running:
        yield running
