"""Which tests need a GPU? All in this folder: without kernels for one they are skipped, and pytest says why.

With MLSPEC_REQUIRE_CUDA=1 there has to be one: nothing runs without its kernels. Behind an error that a GPU does not
recover from (an illegal access, a failed assertion of a kernel) it answers no call of the process any more: the next
test fails, and says behind which one that was, and the others are skipped; where none follows, its own end fails.
"""

from __future__ import annotations

import os

import pytest
import torch

from hf_mlspec import ops
from hf_mlspec.ops import library

LOST = pytest.StashKey[str]()  # of the run: behind which test the GPU was lost, and what it said
TOLD = pytest.StashKey[bool]()  # a test has failed for it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/cuda/" in item.path.as_posix()]
    reason = ops.why_no_cuda_kernels() if here else None
    if reason is not None:
        if os.environ.get("MLSPEC_REQUIRE_CUDA") == "1":
            raise pytest.UsageError(f"tests/cuda: {reason}")
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))


def said_by_the_device() -> str:
    """The error of a GPU that answers no more; "" while it does, and where nobody has asked it for anything."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return ""
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    stash = item.config.stash
    if LOST not in stash:
        return
    if stash.setdefault(TOLD, False):
        pytest.skip(stash[LOST])
    stash[TOLD] = True
    pytest.fail(f"{stash[LOST]}; tests of this process that follow are skipped: mend that one, or run them without it",
                pytrace=False)  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    """What other folders ask of the GPU later fails without a word of where it was lost."""
    last = nextitem is None or "tests/cuda/" not in nextitem.path.as_posix()
    said = said_by_the_device() if last and LOST not in item.config.stash else ""
    yield
    if said:
        item.config.stash[LOST], item.config.stash[TOLD] = lost_since(item, said), True
        pytest.fail(item.config.stash[LOST], pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if call.when == "teardown" and LOST not in item.config.stash and (said := said_by_the_device()):
        item.config.stash[LOST] = lost_since(item, said)
    return report


def lost_since(item: pytest.Item, said: str) -> str:
    return f"the GPU answers no more since {item.nodeid} ({said})"


@pytest.fixture
def kernels_are_required(monkeypatch):
    """An op without a kernel is an error instead of slow."""
    monkeypatch.setenv(library.REQUIRE_VARIABLE, "1")
