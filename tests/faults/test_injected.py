"""Does a model write right tokens and stay usable where memory, a number, a call or a thread fails inside?

A fixed few of the many that `python -m tests.faults` tries.
"""

from __future__ import annotations

import os
import subprocess
import sys
from shutil import which

import pytest

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from tests.faults.__main__ import chosen
from tests.faults.interrupts import CAN_BE_BUILT
from tests.faults.kinds import all_faults
from tests.faults.scenes import SCENES, Written
from tests.mutants.mutant import ROOT


class Stub:
    """What `Scene` needs of a model."""

    class config:
        _attn_implementation = "sdpa"

    @staticmethod
    def state_dict() -> dict:
        return {}


def scene(act):
    """One over a stub, whose act is given."""
    from tests.faults.scenes import Scene

    return Scene([Stub()], act)


def test_numbers_are_spread_and_the_same_every_time():
    assert chosen(5, 10, "x") == [1, 2, 3, 4, 5]
    some = chosen(1000, 10, "x")
    assert some == chosen(1000, 10, "x") != chosen(1000, 10, "y")
    assert [(number - 1) // 100 for number in some] == list(range(10))


def test_a_scene_sees_a_wrong_token_and_a_row_that_is_missing():
    turn = scene(lambda: [Written([1, 2, 3]), Written([4])])
    assert turn.wrong([Written([1, 2, 3]), Written([4])]) is None
    assert turn.wrong([Written([1, 2], ValueError()), Written([4])]) is None
    assert "wrote [1, 3]" in turn.wrong([Written([1, 3], ValueError()), Written([4])])
    assert "wrote [1, 2]" in turn.wrong([Written([1, 2]), Written([4])])
    assert "1 rows of 2" in turn.wrong([Written([1, 2, 3])])


def test_a_scene_sees_that_a_model_is_spoiled():
    told = [[Written([1])], [Written([1])], [Written([2])]]
    turn = scene(lambda: told.pop(0))
    assert turn.spoiled() == "afterwards it wrote [2] where [1] is right"
    turn = scene(lambda: [Written([1])])
    turn.models[0].config._attn_implementation = "other"
    try:
        assert turn.spoiled() == "attention is other, it was sdpa"
    finally:
        Stub.config._attn_implementation = "sdpa"


def test_every_kind_comes_in_a_scene_that_is_there():
    found = all_faults()
    assert {one.scene_of for one in found} == set(SCENES)
    assert len({(one.kind, one.name) for one in found}) == len(found) > 50


compiled = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
counts = pytest.mark.skipif(not CAN_BE_BUILT, reason="no C compiler here, or no headers of Python")


@pytest.mark.slow
@compiled
@counts
def test_a_few_of_each_kind(tmp_path, monkeypatch):
    """Each at its beginning, in the middle and at the end of one scene. Bytecodes are not as many every time: the
    garbage collector runs some of ours."""
    monkeypatch.setenv("MLSPEC_FAULTS_FOLDER", str(tmp_path))
    turn, words = SCENES["compiled chain"](), {}
    for faults in all_faults():
        if faults.scene_of != "compiled chain" or faults.kind.startswith("no memory"):
            continue
        most = faults.count(turn)
        some = 2, (most + 2) // 2, most - most // 20
        words.setdefault(faults.kind, set()).update(faults.inject(turn, at) for at in some)
    assert "error" in words["interrupt"]
    assert words["interrupt"] <= {"error", "went on"}  # one in a finalizer is ignored
    assert {"error", "went on"} <= words["NaN"]
    assert "went on" in words["stuck thread"]


@pytest.mark.slow
@compiled
@pytest.mark.skipif(which("c++") is None or sys.platform != "linux", reason="no C++ compiler, or no LD_PRELOAD")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer has its own operator new")
def test_a_few_requests_for_memory_that_are_refused(tmp_path):
    """In a process of its own, which has the library that refuses memory."""
    command = [sys.executable, "-m", "tests.faults", "--each", "4", "--only", "memory", "--scene", "compiled chain",
               "--journal", str(tmp_path / "journal")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "8 faults, 0 findings"
