"""Has a token's attention the same bits whatever tokens, rows and threads a call has, on every instruction set?"""

from pathlib import Path

import pytest
from instruction_sets import ISAS, PACKAGE, output_on

from hf_mlspec.ops import library

pytestmark = pytest.mark.skipif(
    library.kernel_of("ragged_attention", "cpu") == "reference", reason="the compiled library is not built"
)
CHECK = (
    PACKAGE
    + """
import attention_cases
assert library.kernel_of("ragged_attention", "cpu") == sys.argv[2], library.kernel_table()
print(attention_cases.check_all())
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_every_width(isa):
    assert output_on(isa, CHECK, Path(__file__).parent) == "ok"
