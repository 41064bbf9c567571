"""Does a compiled decoder say that there is no memory, and compute on, whichever of a call's requests is refused?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from instruction_sets import PACKAGE

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

HERE = Path(__file__).parent
COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
# A fresh decoder with a layer of experts for each request that is refused, then the same call again.
PROGRAM = """
import ctypes, faulthandler
import torch
from hf_mlspec.ops.compiled_decoder import F32, Experts, Sizes, Weight, compiled_decoder, set_experts, set_linear

faulthandler.dump_traceback_later(60, exit=True)  # a team waits for ever for a thread that is gone
torch.set_num_threads(2)
memory = ctypes.CDLL(sys.argv[1])
seeded = torch.Generator().manual_seed(0)
table = torch.randn(200, 32, generator=seeded)
tensors = {}


def weight(name, outputs, inputs, *experts):
    shape = *experts, outputs, inputs
    tensors.setdefault(name, torch.randn(shape, generator=seeded) / inputs**0.5)
    return Weight(F32, tensors[name], inputs, outputs)


def decoder():
    made = compiled_decoder(Sizes(32, 2, 2, 16, 64, 200, 200, 16, "silu", 1e-5), torch.float32, table, torch.ones(32))
    made.set_rope(0, torch.ones(64, 8), torch.zeros(64, 8))
    made.add_layer([torch.ones(32), torch.ones(32), *[None] * 10], 0, 0, None)
    for name in "qkvo":
        set_linear(made, name, weight(name, 32, 32))
    shared = {"gate": weight("gate", 64, 32), "up": weight("shared", 64, 32), "down": weight("shared_down", 32, 64)}
    up, down = weight("up", 128, 32, 6), weight("down", 32, 64, 6)
    set_experts(made, Experts(weight("router", 7, 32).weight, None, 2, True, up, down, None, None, shared))
    set_linear(made, "head", weight("head", 200, 32))
    return made


def called(made, name):
    kv, view, states = torch.zeros(1, 2, 1, 2, 64, 16), (0, 0, 0), ([], [])
    ids, counts, starts = list(range(40)), [40], [0]
    if name == "score":
        return made.score(kv, ids, counts, starts, [40], True, True, *view, *states)[2].tolist()
    if name == "draft":
        return made.draft(kv, ids, counts, starts, [3], 0.0, *view, *states)[0]
    how = *view, *view, *states, *states
    return made.draft_checked(kv, [0], made, kv, [0], ids, counts, starts, [3], 2, 0.0, 0.0, *how)[0]


for name in ("score", "draft", "draft_checked"):
    expected, count, told, served = called(decoder(), name), 0, 0, False
    words = f"{name}: no memory for the activations of 40 tokens in 1 rows: pass fewer"
    while not served:
        made, found = decoder(), None
        memory.refuse_after(count)
        try:
            found = called(made, name)
        except torch.OutOfMemoryError as error:
            told += str(error).startswith(words)
        except RuntimeError as error:  # arguments and results are handed over outside the decoder
            assert "bad_alloc" in str(error), error
        served = memory.requests_left() >= 0
        memory.refuse_after(-1)
        assert found == (expected if served else None), (name, count)
        assert called(made, name) == expected, (name, count)
        count += not served
    print(name, count, told)
"""


@pytest.mark.slow
@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no C++ compiler here, or no LD_PRELOAD")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer has its own operator new")
def test_every_request_for_memory_that_is_refused_ends_in_an_error(tmp_path):
    library = tmp_path / "refused.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([COMPILER, *flags, str(HERE / "refused_memory.cpp"), "-ldl"], check=True)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PACKAGE + PROGRAM, str(library)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "LD_PRELOAD": str(library)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    told = {name: int(count) for name, _, count in map(str.split, result.stdout.splitlines())}
    assert told.keys() == {"score", "draft", "draft_checked"}
    assert min(told.values()) >= 30, result.stdout  # requests of the decoder itself
