"""Which mutants decide wrongly what a check keeps of a draft?"""

from __future__ import annotations

from ..mutant import Mutant

ACCEPTANCE = "hf_mlspec/speculation/acceptance.py"
CHECKER = "hf_mlspec/speculation/checker.py"
CHECKED = "hf_mlspec/speculation/drafters/checked.py"
DRAFT = "hf_mlspec/speculation/draft.py"

SAMPLING = "hf_mlspec/speculation/sampling.py"
TREES, CPU_TREES = "hf_mlspec/engines/trees.py", "hf_mlspec/engines/cpu/trees.py"
MASKS = "hf_mlspec/engines/modules/attention.py"

MUTANTS = [
    Mutant(
        "guesses behind a draft's end count", ACCEPTANCE,
        "(tokens == best[:, :-1]) & valid",
        "(tokens == best[:, :-1])",
        ("speculation/test_acceptance.py::test_the_specification",),
    ),
    Mutant(
        "one guess behind a draft's end counts", ACCEPTANCE,
        "device=tokens.device) < lengths",
        "device=tokens.device) <= lengths",
        ("speculation/test_acceptance.py::test_the_specification",),
    ),
    Mutant(
        "guesses are compared with the choice behind them", ACCEPTANCE,
        "tokens == best[:, :-1]",
        "tokens == best[:, 1:]",
        ("speculation/test_acceptance.py::test_the_specification",),
    ),
    Mutant(
        "guesses behind a wrong one count", ACCEPTANCE,
        "flags.long().cumprod(dim=1).sum(dim=1)",
        "flags.long().sum(dim=1)",
        ("speculation/test_acceptance.py::test_the_specification",),
    ),
    Mutant(
        "a row on the host keeps its first wrong guess", ACCEPTANCE,
        "next((n for n, (guess",
        "next((n + 1 for n, (guess",
        ("speculation/test_acceptance.py::test_the_specification",),
    ),
    Mutant(
        "a row on the host that is all right keeps nothing", ACCEPTANCE,
        "if guess != own), len(guesses))",
        "if guess != own), 0)",
        ("speculation/test_acceptance.py::test_the_specification",),
    ),
    Mutant(
        "the correction is dropped", CHECKER,
        "line[1 : 2 + a] if on",
        "line[1 : 1 + a] if on",
        ("speculation/test_acceptance.py::test_a_check_on_the_host",),
    ),
    Mutant(
        "the correction inside an engine is dropped", CHECKER,
        "best[: a + 1] for best, a in",
        "best[:a] for best, a in",
        ("speculation/test_acceptance.py::test_a_check_on_the_host",),
    ),
    Mutant(
        "an inactive row gains a token", CHECKER,
        "line[1 : 2 + a] if on else [] for line",
        "line[1 : 2 + a] for line",
        ("speculation/test_acceptance.py::test_a_check_on_the_host",),
    ),
    Mutant(
        "a rejected slot stays valid", CHECKER,
        "strict=True)])\n"
        "        return Verdict(tokens, accepted, logits, scores)",
        "strict=True)])\n"
        "        self.runner.lengths = [n + 1 for n in self.runner.lengths]\n"
        "        return Verdict(tokens, accepted, logits, scores)",
        ("speculation/test_acceptance.py::test_a_check_on_the_host",),
    ),
    Mutant(
        "a rejected slot of an engine stays valid", CHECKER,
        "strict=True)])\n"
        "        return Verdict(tokens, accepted, None, None, scores.confidence)",
        "strict=True)])\n"
        "        self.runner.lengths = [n + 1 for n in self.runner.lengths]\n"
        "        return Verdict(tokens, accepted, None, None, scores.confidence)",
        ("speculation/test_acceptance.py::test_a_check_on_the_host",),
    ),
    Mutant(
        "a roll-back raises lengths", CHECKER,
        "min(have, valid) for have, valid",
        "max(have, valid) for have, valid",
        ("speculation/test_acceptance.py::test_a_check_on_the_host",),
    ),
    Mutant(
        "NaN is a token", CHECKER,
        "            if -1 in line:",
        "            if False:",
        ("speculation/test_acceptance.py::test_a_check_on_the_host",),
    ),
    Mutant(
        "confidence is the least of all that was scored", CHECKED,
        "min(line[: len(tokens)], default=1.0)",
        "min(line, default=1.0)",
        ("speculation/test_acceptance.py::test_a_level_that_drafts_for_another",),
    ),
    Mutant(
        "guesses of the table are not cut at the draft's length", DRAFT,
        "[line[:n] for line, n in zip(self.tokens.tolist()",
        "[line for line, n in zip(self.tokens.tolist()",
        ("speculation/test_acceptance.py::test_a_level_that_drafts_for_another",),
    ),
    Mutant(
        "a follower keeps lengths of its own", CHECKER,
        "runner.lengths = list(runner.follow.lengths)",
        "pass",
        ("speculation/test_kv_overwriting.py::test_a_checked_cache_is_that_of_16_bits",),
    ),
    Mutant(
        "a tree's siblings are compared with the choice behind the row", ACCEPTANCE,
        "guesses[child] == best[node + 1]",
        "guesses[child] == best[0]",
        ("speculation/test_tree_drafts.py::test_the_path_of_own_choices_is_kept",),
    ),
    Mutant(
        "nodes have the noise of their place in the list", SAMPLING,
        "if parents is None else _offsets(parents, count)",
        "",
        ("speculation/test_tree_drafts.py::test_noise_of_a_node_is_that_of_its_position",),
    ),
    Mutant(
        "processors see a row twice in a call", SAMPLING,
        "for some in _once_each(r_index):",
        "for some in [list(range(len(places)))]:",
        ("integration/test_tree_calls.py::test_samples_with_processors_are_those_of_rows",),
    ),
    Mutant(
        "a branch follows what another one left", TREES,
        "waiting += behind.get(node, [])",
        "waiting[:0] = behind.get(node, [])",
        ("engines/test_tree_engines.py::test_a_tree_is_in_an_order_in_which_branches_stay_together",),
    ),
    Mutant(
        "the cache keeps the branch that came last", CPU_TREES,
        "if self.lying[at] != n]",
        "if False]",
        ("engines/test_tree_engines.py::test_the_cache_keeps_a_path",),
    ),
    Mutant(
        "nodes see their siblings", MASKS,
        "seen[:] = True if parent == END else",
        "seen[:] = False if parent == END else",
        ("engines/test_tree_engines.py::test_nodes_of_modules_see_their_own_branch_at_their_own_positions",),
    ),
]  # fmt: skip
