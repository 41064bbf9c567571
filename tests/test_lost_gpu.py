"""Do tests on GPUs say behind which one a GPU was lost? tests/cuda/conftest.py, on a GPU that is played."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_mlspec import ops

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).with_name("cuda") / "conftest.py"
ILLEGAL = "CUDA error: an illegal memory access was encountered\nSearch for it"
TESTS = """
import pytest
import torch

class Played:
    error = None

    def synchronize(self):
        if self.error is not None:
            raise self.error

played = Played()

@pytest.fixture(autouse=True, scope="session")
def device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "synchronize", lambda: played.synchronize())
        yield

def test_one():
    pass

def test_two():
    played.error = ERROR
    FAILS

def test_three():
    played.synchronize()

def test_four():
    played.synchronize()

@pytest.mark.parametrize("turn", range(5))
def test_five(turn):
    played.synchronize()
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Outcomes and output of a run whose second test meets this error."""
    monkeypatch.setattr(ops, "why_no_cuda_kernels", lambda: None)

    def run(error: str, fails: str = "pass"):
        folder = pytester.mkdir("tests") / "cuda"
        folder.mkdir()
        (folder / "conftest.py").write_text(CONFTEST.read_text())
        (folder / "test_played.py").write_text(TESTS.replace("ERROR", error).replace("FAILS", fails))
        done = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/cuda")
        return done.parseoutcomes(), done.stdout.str()

    return run


@pytest.mark.parametrize("fails", ["pass", "assert False", "played.synchronize()"], ids=["passes", "fails", "meets"])
def test_one_test_fails_for_a_lost_gpu_and_names_where_it_was_lost(run, fails):
    outcomes, said = run(f"torch.AcceleratorError({ILLEGAL!r})", fails)
    own = {"failed": 1} if fails != "pass" else {}
    assert outcomes == {"passed": 1 + (not own), "errors": 1, "skipped": 6, **own}
    why = ("the GPU answers no more since tests/cuda/test_played.py::test_two "
           "(CUDA error: an illegal memory access was encountered)")  # fmt: skip
    assert f"{why}; tests of this process that follow are skipped: mend that one, or run them without it" in said
    assert "ERROR at setup of test_three" in said
    assert "SKIPPED [6] tests/cuda/conftest.py:" in said
    assert said.count(why) == 2


def test_a_gpu_that_the_last_test_loses_is_an_error_of_that_test(run, monkeypatch):
    monkeypatch.setitem(globals(), "TESTS", TESTS[: TESTS.index("def test_three")])
    outcomes, said = run(f"torch.AcceleratorError({ILLEGAL!r})")
    assert outcomes == {"passed": 2, "errors": 1}
    assert "ERROR at teardown of test_two" in said
    assert "the GPU answers no more since tests/cuda/test_played.py::test_two" in said


def test_want_of_memory_loses_no_gpu(run):
    outcomes, _ = run("torch.OutOfMemoryError('CUDA out of memory')")
    assert outcomes == {"passed": 2, "failed": 7}


def test_who_has_asked_no_gpu_for_anything_asks_none_now(monkeypatch):
    """To ask makes a context, which a run without GPUs cannot."""
    scope: dict = {}
    exec(compile(CONFTEST.read_text(), str(CONFTEST), "exec"), scope)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("asked"))
    assert scope["said_by_the_device"]() == ""
