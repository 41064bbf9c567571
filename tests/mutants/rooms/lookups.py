"""Which mutants draft from tokens that are no longer in the row?"""

from __future__ import annotations

from ..mutant import Mutant

AGREEMENT = "hf_mlspec/speculation/drafters/agreement.py"

MUTANTS = [
    Mutant(
        "only the last token is compared", AGREEMENT,
        "LOOK_BACK = 32",
        "LOOK_BACK = 1",
        ("speculation/test_prompt_lookup.py::test_what_a_row_still_says_is_looked_for_far_back",),
    ),
]  # fmt: skip
