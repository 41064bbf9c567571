"""Which mutants choose tokens by other scores or other noise?"""

from __future__ import annotations

from ..mutant import Mutant

CHECKER = "hf_mlspec/speculation/checker.py"
SAMPLING = "hf_mlspec/speculation/sampling.py"
ROW_SAMPLING = "hf_mlspec/speculation/row_sampling.py"
CHOOSE = "hf_mlspec/ops/choose.py"

MUTANTS = [
    Mutant(
        "the noise of a check is that of the token before", CHECKER,
        "[len(row) for row in rows], asked",
        "[len(row) - 1 for row in rows], asked",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
            "speculation/test_chain.py",
        ),
    ),
    Mutant(
        "a larger vocabulary's engine takes tokens itself", CHECKER,
        "and sampler.is_greedy and runner.vocab_size <= sampler.vocab_size",
        "and sampler.is_greedy",
        ("integration/test_vocabulary.py",),
    ),
    Mutant(
        "tokens that a model lacks have a score", SAMPLING,
        "value=float(\"-inf\"))\n"
        "        return logits",
        "value=0.0)\n"
        "        return logits",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "scores of padding rows are not cut", SAMPLING,
        "return logits[..., : self.vocab_size]",
        "return logits",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "NaN scores choose a token", SAMPLING,
        "return best.masked_fill(top.isnan(), -1)",
        "return best",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "NaN scores of a row that samples choose a token", SAMPLING,
        "return tokens.masked_fill(confidence.isnan(), -1)\n"
        "\n",
        "return tokens\n"
        "\n",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "all positions of a check have the first one's noise", SAMPLING,
        "places[1] += torch.arange(count, dtype=torch.int32)",
        "places[1] += 0",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "rows that stay take the noise of those before them", SAMPLING,
        "self.row_ids = [self.row_ids[r] for r in keep]",
        "self.row_ids = self.row_ids[: len(keep)]",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "a row that replaces another has its noise", SAMPLING,
        "        self.row_ids[row] = self._joined\n",
        "",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
            "speculation/test_continuous.py",
        ),
    ),
    Mutant(
        "rows that join have the noise of rows that left", SAMPLING,
        "self.row_ids += [self._joined + i",
        "self.row_ids += [len(self.row_ids) + i",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
            "speculation/test_continuous.py",
        ),
    ),
    Mutant(
        "processors see the token they are asked about", SAMPLING,
        "prefixes = [rows[r] + guesses[r][:j] for",
        "prefixes = [rows[r] + guesses[r][: j + 1] for",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "processors are asked behind guesses that they forbid", SAMPLING,
        "if j <= reach[r]]",
        "]",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "processors are asked behind the end of a sequence", SAMPLING,
        "if never or token in self.ends:",
        "if never:",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "processors write into the logits", SAMPLING,
        "scores, reach = scores.clone(), list(lengths)",
        "scores, reach = scores, list(lengths)",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
            "integration/test_outputs.py",
        ),
    ),
    Mutant(
        "warpers come before the cut", SAMPLING,
        "scores = self.fit(logits)\n"
        "        if self.process",
        "scores = self.fit(self.warp(logits) if self.warp else logits)\n"
        "        if self.process",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "a draw has the noise of the position before", SAMPLING,
        "drawn(scores[:, None], self.seed, self.row_ids, positions)",
        "drawn(scores[:, None], self.seed, self.row_ids, [p - 1 for p in positions])",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
            "speculation/test_chain.py",
        ),
    ),
    Mutant(
        "a row's noise depends on its place", ROW_SAMPLING,
        "rule.seed, [0], [first])",
        "rule.seed, [r], [first])",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "a row's noise starts one position late", ROW_SAMPLING,
        "rule.seed, [0], [first])",
        "rule.seed, [0], [first + 1])",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "rows that sample are those at rest", ROW_SAMPLING,
        "if rule.seed is not None and n >= 0:",
        "if rule.seed is not None and n < 0:",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "a failing token is told one late", ROW_SAMPLING,
        "self.error, self.failed_at = error, first + j\n",
        "self.error, self.failed_at = error, first + j + 1\n",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "a level's error ends the target's row", ROW_SAMPLING,
        "        if not self.judges:\n"
        "            raise error",
        "        if self.judges:\n"
        "            raise error",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "rules of one row process the next", ROW_SAMPLING,
        "rule.scores(scores[r, : n + 1], row, own",
        "self.rules[r - 1].scores(scores[r, : n + 1], row, own",
        (
            "speculation/test_sampling.py",
            "speculation/test_row_sampling.py::test_rows_are_processed_by_their_own_rules_only",
            "speculation/test_row_sampling.py::test_a_row_has_the_noise_of_a_call_of_one_row",
            "speculation/test_row_sampling.py::test_a_row_whose_processor_fails_leaves_the_others_alone",
            "speculation/test_row_sampling.py::test_no_level_below_changes_a_token",
        ),
    ),
    Mutant(
        "noise has no rounds but nine", CHOOSE,
        "_ROUNDS = 10",
        "_ROUNDS = 9",
        ("ops/test_step_ops.py", "speculation/test_distribution.py", "ops/test_rows.py",),
    ),
    Mutant(
        "streams have the same noise", CHOOSE,
        "streams.long()[:, None] & _WORD",
        "streams.long()[:, None] & 0",
        (
            "ops/test_step_ops.py",
            "speculation/test_row_sampling.py",
            "integration/test_sampled_generation.py",
        ),
    ),
    Mutant(
        "positions have the same noise", CHOOSE,
        "positions.long()[:, None] & _WORD",
        "positions.long()[:, None] & 0",
        (
            "ops/test_step_ops.py",
            "speculation/test_row_sampling.py",
            "speculation/test_distribution.py",
        ),
    ),
]  # fmt: skip
