"""Which mutants choose tokens by other scores or other noise?"""

from __future__ import annotations

from ..mutant import Mutant

CHECKER = "hf_mlspec/speculation/checker.py"
SAMPLING = "hf_mlspec/speculation/sampling.py"
CHOOSE = "hf_mlspec/ops/choose.py"

MUTANTS = [
    Mutant(
        "the noise of a check is that of the token before", CHECKER,
        "[len(row) for row in rows], asked",
        "[len(row) - 1 for row in rows], asked",
        (
            "speculation/test_level_limits.py::test_a_sampled_draft_of_the_checkers_own_table_is_always_right",
        ),
        quick=True,
    ),
    Mutant(
        "a draw has the noise of the position before", SAMPLING,
        "drawn(scores[:, None], self.seed, self.row_ids, positions)",
        "drawn(scores[:, None], self.seed, self.row_ids, [p - 1 for p in positions])",
        (
            "speculation/test_level_limits.py::test_a_sampled_draft_of_the_checkers_own_table_is_always_right",
        ),
        quick=True,
    ),
    Mutant(
        "noise has no rounds but nine", CHOOSE,
        "_ROUNDS = 10",
        "_ROUNDS = 9",
        ("ops/test_step_ops.py::test_philox_gives_the_published_words",),
    ),
]  # fmt: skip
