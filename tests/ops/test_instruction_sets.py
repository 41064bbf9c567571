"""Does every instruction set of this machine compute every op, and integer sums with the same bits?"""

import os
from pathlib import Path

import pytest
from instruction_sets import ISAS, PACKAGE, output_on, run_on

from hf_mlspec.ops import library

ISA_OF_THIS_PROCESS = library.kernel_of("mxfp4_linear", "cpu")
CHECK = (
    PACKAGE
    + """
import cases
assert library.kernel_of("mxfp4_linear", "cpu") == sys.argv[2], library.kernel_table()
print(cases.check_all())
"""
)
HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(ISA_OF_THIS_PROCESS == "reference", reason="the compiled library is not built")


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    return {}


@pytest.mark.parametrize("isa", ISAS)
def test_every_op(isa, digests):
    digests[isa] = output_on(isa, CHECK, HERE)
    assert len(digests[isa]) == 64
    assert digests[isa] == digests.setdefault("generic", digests[isa]), "integer sums differ from generic's"


def test_the_best_set_is_chosen(digests):
    best = [isa for isa in ISAS if isa in digests][-1:]
    assert not best or os.environ.get("MLSPEC_CPU_ISA") or best == [ISA_OF_THIS_PROCESS]


@pytest.mark.parametrize("isa", ["sse9", "AVX2", "avx512"])
def test_unknown_instruction_set_is_an_error(isa):
    result = run_on(isa, PACKAGE + "ops.kernel_table()", HERE)
    assert result.returncode != 0
    assert f"MLSPEC_CPU_ISA={isa} is unknown, choose one of generic" in result.stderr
