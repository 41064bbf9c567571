"""Where are costs kept that calls measure while a program runs: in a folder of its own, which goes at the end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_CACHE = "MLSPEC_CACHE"  # the folder where measured costs are kept


@contextmanager
def own_costs() -> Iterator[None]:
    """Calls inside know no costs that were measured before, and leave none behind."""
    before = os.environ.get(_CACHE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_CACHE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[_CACHE]
            else:
                os.environ[_CACHE] = before
