"""What is kept of a draft that is a tree, what do lookups and models make of one, and what is written with it?"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from tables import CPU, SEED, VOCAB, TableRunner, chain, checker, counts, exact, table, write

from hf_mlspec.engines.engine import Capabilities, Guess
from hf_mlspec.engines.trees import END, MOST_NODES, children
from hf_mlspec.speculation import checker as checking
from hf_mlspec.speculation.acceptance import accept_row, accept_tree
from hf_mlspec.speculation.checker import Checker
from hf_mlspec.speculation.draft import Draft, Rows
from hf_mlspec.speculation.drafters.lookup_tree import LookupTree, merged
from hf_mlspec.speculation.drafters.model_tree import ModelTree
from hf_mlspec.speculation.drafters.ngram import NGram
from hf_mlspec.speculation.drafters.prompt_lookup import PromptLookup
from hf_mlspec.speculation.row_sampling import RowRule, RowSampler
from hf_mlspec.speculation.sampling import Sampler

DRAWS = 50_000
TARGET, FIRST, SECOND, THIRD, FOURTH = (table(seed) for seed in range(5))

#            6 -> 7 -> 8
#   row (5) <      \
#            60     61 -> 62
GUESSES, PARENTS = [6, 60, 7, 8, 61, 62], [-1, -1, 0, 2, 0, 4]


@pytest.mark.parametrize(
    ("best", "kept"),
    [
        ([6, 7, 0, 8, 9, 0, 0], [0, 2, 3]),  # the first branch, to its end
        ([6, 7, 0, 9, 9, 0, 0], [0, 2]),
        ([60, 7, 3, 9, 9, 0, 0], [1]),
        ([6, 61, 0, 9, 9, 62, 4], [0, 4, 5]),  # another branch, to its end
        ([6, 61, 0, 9, 9, 7, 4], [0, 4]),
        ([9, 7, 0, 8, 9, 62, 0], []),
        ([-1, 7, 0, 8, 9, 62, 0], []),  # NaN behind the row
        ([6, -1, 0, 8, 9, 62, 0], [0]),
    ],
)
def test_the_path_of_own_choices_is_kept(best, kept):
    assert accept_tree(GUESSES, PARENTS, best) == kept


@pytest.mark.parametrize("best", [[1, 2, 3, 4], [1, 2, 9, 4], [9, 2, 3, 4], [1, 9, 3, 4]])
def test_a_row_is_the_tree_in_which_each_follows_the_one_before(best):
    assert len(accept_tree([1, 2, 3], [-1, 0, 1], best)) == accept_row([1, 2, 3], best)
    assert accept_tree([], [], best) == []


def test_continuations_become_one_tree_of_at_most_so_many_branches():
    lines = [[1, 2, 3], [1, 2, 4], [1, 5], [6, 7], [8], [1, 2, 3, 9]]
    tokens, parents = merged(lines, [2, 2])
    assert tokens == [1, 2, 3, 5, 6, 7, 9]  # 4 is a second one where one is allowed, 8 a third one
    assert parents == [END, 0, 1, 0, END, 4, 2]
    assert merged(lines, []) == ([1, 2, 3, 9], [END, 0, 1, 2])
    assert len(merged([[n] for n in range(1000)], [1000])[0]) == MOST_NODES


def test_a_prompt_lookup_finds_every_place():
    row = [1, 2, 3, 9, 1, 2, 4, 9, 7, 2, 5, 9, 1, 2]
    lookup = PromptLookup(max_ngram=2)
    lookup.start(1, CPU)
    first, second, third = lookup.branches([row], [3], [3])[0]
    assert (first, second, third) == ([4, 9, 7], [3, 9, 1], [5, 9, 1])
    assert lookup.branches([row], [3], [])[0] == [first] == lookup.propose([row], [3]).rows()


def test_a_table_proposes_its_successors():
    ngram = NGram(order=2, threshold=0.4)
    for token in (2, 2, 2, 2, 3, 3, 3, 4):
        ngram.learn([1, token])
    ngram.learn([2, 7])
    ngram.start(1, CPU)
    assert ngram.branches([[1]], [2], [3])[0] == [[2, 7], [3]]  # 4 has an eighth, a third of the threshold is more
    assert ngram.branches([[1]], [2], [])[0] == [[2, 7]] == ngram.propose([[1]], [2]).rows()
    assert ngram.branches([[9]], [2], [3]) == [[]]


@pytest.mark.parametrize("widths", [[], [2], [3, 2, 1]])
def test_the_first_branch_of_lookups_is_the_row_that_the_first_would_draft(widths):
    torch.manual_seed(0)
    rows = [torch.randint(1, 6, (40,)).tolist(), [1, 2], torch.randint(1, 4, (25,)).tolist()]
    for lookup in (PromptLookup(), NGram()):
        lookup.start(3, CPU)
        tree = LookupTree([lookup.fork()], widths)
        tree.start(3, CPU)
        draft = tree.propose(rows, [4, 4, 2])
        for wanted, tokens, parents in zip(
            lookup.propose(rows, [4, 4, 2]).rows(), draft.rows(), draft.parents, strict=True
        ):
            branch, node = [], END
            while (node := next((n for n, p in enumerate(parents) if p == node), None)) is not None:
                branch.append(tokens[node])
            assert branch == wanted


def test_lookups_forget_what_was_rejected():
    tree = LookupTree([PromptLookup(), NGram()], [2, 2])
    tree.start(2, CPU)
    rows = [[1, 2, 3, 1, 2], [4, 5, 4]]
    fresh = tree.propose(rows, [3, 3]).rows()
    tree.propose([[*row, 9, 9] for row in rows], [3, 3])
    tree.rollback([5, 3])
    assert tree.propose(rows, [3, 3]).rows() == fresh
    tree.select([1])
    tree.admit(1)
    tree.replace(0)
    assert tree.propose([[7, 8, 7], [1, 2, 3, 1, 2]], [3, 3]).rows()[1] == fresh[0]
    assert tree.fork().lookups[0] is not tree.lookups[0]


def model_tree(probs: torch.Tensor, widths: list[int], threshold: float = 0.0, seed: int | None = SEED) -> ModelTree:
    return ModelTree(TableRunner(probs), Sampler(VOCAB, seed=seed), "table", widths=widths, threshold=threshold)


def test_a_model_proposes_its_likeliest_tokens_at_every_place():
    lines = [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.15, 0.05], [0.25, 0.4, 0.05, 0.3], [0.6, 0.3, 0.08, 0.02]
    probs = torch.tensor(lines)
    drafter = model_tree(probs, [2, 2], seed=None)
    drafter.start(1, CPU)
    draft = drafter.propose([[1, 0]], [3])
    assert draft.rows() == [[3, 2, 0, 1, 1, 3, 3, 0, 0, 0]]
    assert draft.parents == [[-1, -1, 0, 0, 1, 1, 2, 3, 4, 5]]
    sure = model_tree(probs, [2, 2], threshold=0.5, seed=None)
    sure.start(1, CPU)
    assert sure.propose([[1, 0]], [3]).rows() == [[3, 2]]  # neither is sure enough to go on
    sure = model_tree(probs, [3, 1], threshold=0.65, seed=None)
    sure.start(1, CPU)
    draft = sure.propose([[0, 1]], [3])
    assert draft.rows() == [[0, 2, 1, 3]]  # 0 is sure behind 1, and nothing behind 0
    assert draft.parents == [[-1, -1, -1, 0]]


def test_a_model_proposes_no_token_twice_behind_a_place():
    """Where processors leave fewer tokens than the tree is wide."""
    only = torch.full((VOCAB,), float("-inf")).index_fill(0, torch.tensor([0]), 0.0)
    for seed in (None, SEED):
        sampler = Sampler(VOCAB, seed=seed, process=lambda rows, scores, numbers: scores + only, prompt_lengths=[1])
        drafter = ModelTree(TableRunner(FIRST), sampler, "table", widths=[3, 3])
        drafter.start(1, CPU)
        draft = drafter.propose([[1, 0]], [2])
        assert draft.rows() == [[0, 0]]
        assert draft.parents == [[-1, 0]]


@pytest.mark.parametrize(
    ("lookups", "widths", "error", "words"),
    [([], [2], TypeError, r"lookups is \[\]: it takes a list of"), ("ngram", [2], TypeError, "lookups is 'ngram'"),
     ([3], [2], TypeError, r"lookups is \[3\]"), ([NGram()], [2, 0], ValueError, r"widths is \[2, 0\]: every depth"),
     ([NGram()], [True], ValueError, r"widths is \[True\]")],
)  # fmt: skip
def test_lookups_that_cannot_be_merged_are_refused(lookups, widths, error, words):
    with pytest.raises(error, match=words):
        LookupTree(lookups, widths)


def test_who_listens_to_checks_hears_of_depths():
    heard, target = [], checker(FIRST)
    target.start(2, CPU)
    target.on_check = lambda drafted, accepted, alive: heard.append(drafted)
    target.check([[0], [1]], Draft.trees([[1, 2, 3], [0]], [[-1, -1, 0], [-1]]))
    assert heard == [[2, 1]]


def test_a_model_that_samples_proposes_what_the_shared_noise_prefers():
    """Were the target the same model, it would take the first branch."""
    drafter, rows = model_tree(FIRST, [2, 2]), [[0]] * 64
    drafter.start(64, CPU)
    draft = drafter.propose(rows, [3] * 64)
    target = checker(FIRST)
    target.start(64, CPU)
    verdict = target.check(rows, draft)
    assert verdict.accepted == [3] * 64
    assert all(n == 2 + 4 + 4 for n in draft.lengths)


def test_noise_of_a_node_is_that_of_its_position():
    scores = torch.randn(2, 7, 32)
    sampler = Sampler(32, seed=5)
    sampler.start(2)
    best = sampler.choose(scores, [10, 20], [6, 6], [PARENTS, [-1] * 6])
    for r, depths in enumerate([[0, 1, 1, 2, 3, 2, 3], [0] + [1] * 6]):
        for j, depth in enumerate(depths):
            line = torch.full((2, 1, 32), 0.0)
            line[r, 0] = scores[r, j]
            assert sampler.choose(line, [10 + depth, 20 + depth], [0, 0])[r, 0] == best[r, j]


def no_sevens(prefixes: Rows, scores: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """A processor that reads tokens: how many tokens are before a position, and the last of them, are forbidden."""
    scores = scores.clone()
    for line, prefix in zip(scores, prefixes, strict=True):
        line[[len(prefix) % 64, prefix[-1] % 64]] = float("-inf")
    return scores


def of_rows(sampler, logits: torch.Tensor, row: list[int]) -> list[torch.Tensor]:
    """Scores of every position of the tree, each of a row of its own."""
    found = []
    for node in range(-1, len(GUESSES)):
        tokens, at = [], node
        while at != END:
            tokens.insert(0, GUESSES[at])
            at = PARENTS[at]
        found.append(sampler.scores(logits[:, node + 1 : node + 2], [row + tokens])[0, 0])
    return found


@pytest.mark.parametrize("rows", [False, True])
def test_processors_read_the_tokens_before_a_node(rows):
    how = {"process": no_sevens, "ends": frozenset([63])}
    rule = RowRule(64, prompt_length=1, **how)
    sampler = RowSampler(64, [rule], judges=True) if rows else Sampler(64, prompt_lengths=[1], **how)
    sampler.start(1)
    logits = torch.randn(1, 7, 64)
    guess = Guess(torch.tensor([GUESSES]), [6], [PARENTS])
    found = sampler.scores(logits, [[4, 5]], guess)[0]
    assert torch.equal(found, torch.stack(of_rows(sampler, logits, [4, 5])))


def test_processors_are_not_asked_behind_what_they_forbid():
    asked = []

    def process(prefixes: Rows, scores: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        asked.extend(prefixes)
        return scores.index_fill(1, torch.tensor([7]), float("-inf"))

    sampler = Sampler(64, prompt_lengths=[1], process=process, ends=frozenset([61]))
    sampler.start(1)
    sampler.scores(torch.randn(1, 7, 64), [[4, 5]], Guess(torch.tensor([GUESSES]), [6], [PARENTS]))
    assert sorted(asked) == [[4, 5], [4, 5, 6], [4, 5, 60]]  # not behind 7, nor behind the end 61


def test_a_processor_that_fails_off_the_path_ends_nothing():
    def process(prefixes: Rows, scores: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        if any(60 in prefix for prefix in prefixes):
            raise RuntimeError("no 60 here")
        return scores

    def checked(best: int) -> RowRule:
        rule = RowRule(64, prompt_length=1, process=process)
        runner = TableRunner(torch.full((64, 64), 1 / 64))
        runner.logits[5, best] = 5.0
        target = Checker(runner, RowSampler(64, [rule], judges=True), "table")
        target.start(1, CPU)
        target.check([[4, 5]], Draft.trees([[6, 60]], [[-1, -1]]))
        return rule

    assert checked(6).error is None
    failed = checked(60)
    assert str(failed.error) == "no 60 here"
    assert failed.failed_at == 3
    failed.scores(torch.zeros(1, 64), [4, 5], None, True)
    assert failed.failures == {}


def test_an_engine_without_trees_names_itself():
    class RowsAlone(TableRunner):
        can = Capabilities(by_module=True)

    target = Checker(RowsAlone(TARGET), Sampler(VOCAB), "the target")
    target.start(1, CPU)
    with pytest.raises(ValueError, match="the target is to check a tree and runs on engine 'modules', which goes"):
        target.check([[0]], Draft.trees([[1, 2]], [[-1, -1]]))
    assert target.check([[0]], Draft.trees([[1, 2]], [[-1, 0]])).tokens  # a row is one, whatever it says


# name -> (the chain below the target, tokens a sequence has, sequences). Each writes token by token what the target
# alone writes, whose 200,000 sequences test_distribution.py holds against enumeration.
CHAINS = {
    "depth 1": (lambda: model_tree(FIRST, [2]), 3, 10_000),
    "depth 2": (lambda: model_tree(FIRST, [3, 2]), 3, 10_000),
    "depth 3, thresholds": (lambda: model_tree(FIRST, [3, 2, 2], 0.3), 4, 10_000),
    "depth 4": (lambda: model_tree(FIRST, [2, 2, 1, 1]), 5, 10_000),
    "below a level": (lambda: chain([SECOND], model_tree(FIRST, [2, 2]), threshold=0.3), 4, 10_000),
    "below three levels": (lambda: chain([FOURTH, THIRD, SECOND], model_tree(FIRST, [2, 1])), 4, 2_000),
    "50,000 sequences": (lambda: model_tree(FIRST, [2]), 3, DRAWS),
}


def p_value(written: torch.Tensor, target: torch.Tensor) -> float:
    seen, expected = counts(written), exact(target, written.shape[1])
    return chisquare(seen.numpy(), (expected * (seen.sum() / expected.sum())).numpy()).pvalue


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_trees_write_what_the_target_writes(name):
    below, tokens, rows = CHAINS[name]
    level = below()
    written = write(TARGET, level, rows=rows, tokens=tokens)
    assert torch.equal(written, write(TARGET, None, rows=rows, tokens=tokens))
    assert p_value(written, TARGET) > 1e-3
    assert 0 < level.stats.accepted < level.stats.drafted


def forgets_a_sibling(guesses: list[int], parents: list[int], best: list[int]) -> list[int]:
    """As if a sibling that was refused needed no correction: where none behind a place is the choice, the last of them
    is taken."""
    kept, behind = accept_tree(guesses, parents, best), children(parents)
    while behind.get(kept[-1] if kept else END):
        at = kept[-1] if kept else END
        best[at + 1] = guesses[behind[at][-1]]
        kept = accept_tree(guesses, parents, best)
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["depth 1", "depth 2", "depth 3, thresholds", "depth 4"])
@pytest.mark.parametrize("wrong", ["a sibling that was refused", "the noise of the place"])
def test_what_forgets_something_fails_the_same_test(wrong, name, monkeypatch):
    """A sibling stays where none is the choice; a position has another one's noise."""
    if wrong == "a sibling that was refused":
        monkeypatch.setattr(checking, "accept_tree", forgets_a_sibling)
    else:
        own = Sampler.choose

        def forgets(self, scores, firsts, lengths, parents=None):
            return own(self, scores, [0] * len(firsts) if parents else firsts, lengths, parents)

        monkeypatch.setattr(Sampler, "choose", forgets)
    below, tokens, rows = CHAINS[name]
    assert p_value(write(TARGET, below(), rows=rows // 2, tokens=tokens), TARGET) < 1e-3
