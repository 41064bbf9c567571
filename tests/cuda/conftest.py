"""Which tests need a GPU? All in this folder: without kernels for one they are skipped, and pytest says why.

With MLSPEC_REQUIRE_CUDA=1 there has to be one: nothing runs without its kernels.
"""

from __future__ import annotations

import os

import pytest

from hf_mlspec import ops
from hf_mlspec.ops import library


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/cuda/" in item.path.as_posix()]
    reason = ops.why_no_cuda_kernels() if here else None
    if reason is not None:
        if os.environ.get("MLSPEC_REQUIRE_CUDA") == "1":
            raise pytest.UsageError(f"tests/cuda: {reason}")
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def kernels_are_required(monkeypatch):
    """An op without a kernel is an error instead of slow."""
    monkeypatch.setenv(library.REQUIRE_VARIABLE, "1")
