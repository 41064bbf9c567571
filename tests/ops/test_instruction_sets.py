"""Does every instruction set of this machine compute every op, and integer sums with the same bits?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_mlspec.ops import library

ISAS = ("generic", "avx2", "avxvnni", "avxvnniint8", "avx512vnni", "avx512bf16", "amx")
ISA_OF_THIS_PROCESS = library.kernel_of("mxfp4_linear", "cpu")
# In a process of its own per instruction set: it is chosen once, at the first call.
# hf_mlspec/__init__.py is left out: it imports transformers, which takes longer than the checks.
PACKAGE = """
import sys, types, torch
package = types.ModuleType("hf_mlspec")
package.__path__ = [sys.argv[1] + "/../../hf_mlspec"]
sys.modules["hf_mlspec"] = package
from hf_mlspec import ops
from hf_mlspec.ops import library
"""
CHECK = (
    PACKAGE
    + """
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
import cases
assert library.kernel_of("mxfp4_linear", "cpu") == sys.argv[2], library.kernel_table()
print(cases.check_all())
"""
)
pytestmark = pytest.mark.skipif(ISA_OF_THIS_PROCESS == "reference", reason="the compiled library is not built")


def run(isa: str, code: str = CHECK) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), isa],
        capture_output=True,
        text=True,
        env={**os.environ, "MLSPEC_CPU_ISA": isa},
    )


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    return {}


@pytest.mark.parametrize("isa", ISAS)
def test_every_op(isa, digests):
    result = run(isa)
    if f"MLSPEC_CPU_ISA={isa} is not supported by this CPU" in result.stderr or (
        isa != "generic" and f"MLSPEC_CPU_ISA={isa} is unknown" in result.stderr
    ):
        pytest.skip(f"this CPU has no {isa}")
    assert result.returncode == 0, result.stderr
    digests[isa] = result.stdout.strip()
    assert len(digests[isa]) == 64
    assert digests[isa] == digests.setdefault("generic", digests[isa]), "integer sums differ from generic's"


def test_the_best_set_is_chosen(digests):
    best = [isa for isa in ISAS if isa in digests][-1:]
    assert not best or os.environ.get("MLSPEC_CPU_ISA") or best == [ISA_OF_THIS_PROCESS]


@pytest.mark.parametrize("isa", ["sse9", "AVX2", "avx512"])
def test_unknown_instruction_set_is_an_error(isa):
    result = run(isa, PACKAGE + "ops.kernel_table()")
    assert result.returncode != 0
    assert f"MLSPEC_CPU_ISA={isa} is unknown, choose one of generic" in result.stderr
