"""Do the bits of an op depend on threads, on who else computes, or on a fork? And does the pool itself hold?"""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import cases
import pytest
import torch
from test_instruction_sets import PACKAGE

from hf_mlspec.ops import library

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels_ext" / "cpu" / "threads"
COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
needs_kernel = pytest.mark.skipif(
    library.kernel_of("mxfp4_linear", "cpu") == "reference", reason="the compiled library is not built"
)
# Several threads in the parent, then a child that computes the same; prints a line each.
FORKED = """
import os
sys.path.insert(0, sys.argv[1])
import cases
torch.set_num_threads(2)
case, x = cases.mxfp4_case(700, 512, 8), cases.seeded(3, 512)
before = case.call(x)
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if all(torch.equal(case.call(x), before) for _ in range(50)) else 3)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(case.call(x), before)
print("same")
"""


@pytest.fixture(autouse=True)
def _threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@needs_kernel
def test_any_number_of_threads_gives_the_same_bits():
    for case in cases.linears(530, 512):
        x = cases.seeded(9, 512).bfloat16()
        torch.set_num_threads(1)
        alone = case.call(x)
        for threads in (2, 8):  # 8: more than this machine may have
            torch.set_num_threads(threads)
            assert torch.equal(case.call(x), alone), (case.name, threads)


@needs_kernel
def test_several_python_threads_at_once():
    torch.set_num_threads(2)
    work = [(case, cases.seeded(5, 512, seed=s)) for s, case in enumerate(cases.linears(300, 512))]
    expected = [case.call(x) for case, x in work]
    wrong = []

    def repeat(first: int) -> None:
        for i in range(first, first + 40):
            case, x = work[i % len(work)]
            if not torch.equal(case.call(x), expected[i % len(work)]):
                wrong.append(case.name)

    threads = [threading.Thread(target=repeat, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_after_use_computes_on():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PACKAGE + FORKED, str(HERE)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout.strip()) == (0, "same"), result.stderr


@needs_kernel
def test_flushing_of_tiny_numbers_is_the_callers_on_every_thread():
    """2^-127 x 1 is a subnormal: kept, or with torch.set_flush_denormal(True) lost, whoever computes it."""
    weight, x = torch.eye(600), torch.full((1, 600), 2.0**-127)
    torch.set_num_threads(2)
    case = library.torch.ops.mlspec.f32_linear.default
    kept = case(x, weight, None)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flushed = case(x, weight, None)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(kept, x)
    assert flushed.eq(0).all()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
@pytest.mark.parametrize("sanitize", [False, True])
def test_the_pool_shares_out_every_item_once(tmp_path, sanitize):
    program = tmp_path / "stress"
    flags = ["-std=c++20", "-O1", "-pthread", *(["-g", "-fsanitize=thread"] if sanitize else [])]
    sources = [str(HERE / "parallel_stress.cpp"), str(KERNELS / "parallel.cpp")]
    # A sanitizer preloaded for the library of this process has no place in the compiler or the program.
    bare = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    told = {"capture_output": True, "text": True, "timeout": 120, "env": bare}
    built = subprocess.run([COMPILER, *flags, f"-I{KERNELS}", *sources, "-o", str(program)], **told)
    if sanitize and "tsan" in built.stderr:
        pytest.skip("this compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    words = ["100", "no fork"] if sanitize else ["500"]
    ran = subprocess.run([str(program), *words], **told)
    if sanitize and "unexpected memory mapping" in ran.stderr:
        pytest.skip("ThreadSanitizer does not run under this kernel's memory layout")
    assert ran.returncode == 0, ran.stderr
