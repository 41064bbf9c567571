"""Does a level with another tokenizer say in the checker's tokens what it said in its own?"""

from __future__ import annotations

import random
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_rounds import CPU, Plan, play, proposals
from small_tokenizers import LINES, small_tokenizer
from tables import TableRunner

from hf_mlspec.speculation.draft import Draft, Drafter
from hf_mlspec.speculation.drafters.cross_tokenizer import CrossTokenizerDrafter
from hf_mlspec.speculation.drafters.model import ModelDrafter
from hf_mlspec.speculation.drafters.row_translation import WINDOW, RowTranslation
from hf_mlspec.speculation.drafters.translation import special_token_map, token_text
from hf_mlspec.speculation.sampling import Sampler
from hf_mlspec.speculation.stats import LevelStats

KINDS = ["code", "gpt2", "llama", "metaspace", "words"]
PAIRS = list(permutations(KINDS, 2))
LOSSLESS = [pair for pair in PAIRS if "words" not in pair]
few = settings(max_examples=40, deadline=None)


class CachedLevel:
    """An inner level that, like a model, holds a cache of its rows and may only be given what it has not seen.

    rule: (row, limit) -> proposal. Every broken promise of the wrapper is an assertion here.
    """

    def __init__(self, rule):
        self.rule, self.name, self.stats = rule, "inner", LevelStats("inner")

    def start(self, batch, device):
        self.cache, self.held, self.fed = [[] for _ in range(batch)], [[] for _ in range(batch)], 0

    def propose(self, rows, limits):
        self.stats.rounds += 1
        out = []
        for r, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            cache = self.cache[r]
            assert row[:len(cache)] == cache, "a cached token changed without a rollback"
            assert len(cache) < len(row), "no token left to start from"
            self.fed += len(row) - len(cache)
            proposal = self.rule(row, limit)
            self.held[r] = [*row, *proposal]
            self.cache[r] = self.held[r][:-1] if proposal else list(row)
            out.append(proposal)
        return Draft.from_lists(out)

    def rollback(self, lengths):
        for r, length in enumerate(lengths):
            assert 0 <= length <= len(self.held[r])
            del self.held[r][length:], self.cache[r][length:]

    def select(self, keep):
        self.cache, self.held = ([part[r] for r in keep] for part in (self.cache, self.held))


class RestrictedLevel(CachedLevel):
    """Draws each token from a distribution over the allowed tokens that the last token of the row decides."""

    def __init__(self, vocab_size: int):
        super().__init__(None)
        self.vocab_size, self.allowed = vocab_size, None

    def distribution(self, last: int) -> torch.Tensor:
        logits = torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(last))
        return logits.masked_fill(~self.allowed, float("-inf")).softmax(-1)

    def propose(self, rows, limits):
        generator = torch.Generator().manual_seed(sum(map(sum, rows)))

        def draw(row, limit):
            tokens = []
            for _ in range(limit):
                tokens.append(int(torch.multinomial(self.distribution([*row, *tokens][-1]), 1, generator=generator)))
            return tokens

        self.rule = draw
        return super().propose(rows, limits)


def translation(outer: str, inner: str) -> RowTranslation:
    texts = [token_text(small_tokenizer(kind), len(small_tokenizer(kind))) for kind in (outer, inner)]
    return RowTranslation(*texts, special_token_map(*texts))


def wrapped(rule, outer: str, inner: str, **options) -> CrossTokenizerDrafter:
    ours, theirs = small_tokenizer(outer), small_tokenizer(inner)
    level = rule if isinstance(rule, CachedLevel) else CachedLevel(rule)
    return CrossTokenizerDrafter(level, ours, theirs, vocab_size=len(ours), inner_vocab_size=len(theirs), **options)


def spelled(kind: str, tokens: list[int]) -> bytes:
    """The text of a whole row."""
    text = token_text(small_tokenizer(kind), len(small_tokenizer(kind)))
    spelling = text.spelling(tokens)
    return spelling.removeprefix(b" ") if text.adds_space else spelling


def whole_characters(text: bytes) -> str:
    return text.decode(errors="ignore")


def scrambled(kind: str):
    """A rule whose proposal depends on the last tokens only and uses the whole vocabulary, special tokens included."""
    size = len(small_tokenizer(kind))

    def rule(row, limit):
        rng = random.Random(str(row[-3:]))
        return [rng.randrange(size) for _ in range(rng.randrange(limit + 1))]

    return rule


def reads_ahead(kind: str, text: str):
    """A rule that knows the text: it goes on with the tokens of what follows the row in it."""
    tokens = token_text(small_tokenizer(kind), len(small_tokenizer(kind)))

    def rule(row, limit):
        said = spelled(kind, row)
        assert text.encode().startswith(said)
        return tokens.encode(text[len(said.decode()):], not said)[:limit]

    return rule


texts = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(LINES), max_size=4).map("\n".join),
                  st.text(alphabet=" \n\tabe_(é中🙂", max_size=300))


@pytest.mark.parametrize("kind", KINDS[:-1])
@given(text=texts, begins=st.booleans())
@few
def test_encoding_and_spelling_are_inverse(kind, text, begins):
    tokens = token_text(small_tokenizer(kind), len(small_tokenizer(kind)))
    if kind == "metaspace" and begins:  # adds its space only where the text has none
        text = text.lstrip(" ▁")
    text = text.replace("▁", " ") if kind in ("llama", "metaspace") else text
    ids = tokens.encode(text, begins)
    assert tokens.spelled_ends(ids, text.encode(), begins)[-1:] == ([len(text.encode())] if ids else [])
    assert bool(ids) == bool(text)


@pytest.mark.parametrize("kind", KINDS[:-1])
@given(text=texts)
@few
def test_spelling_is_what_the_tokenizer_decodes(kind, text):
    tokenizer = small_tokenizer(kind)
    ids = token_text(tokenizer, len(tokenizer)).encode(text, True)
    assert spelled(kind, ids).decode() == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(("outer", "inner"), LOSSLESS)
@given(text=texts, cut=st.integers(0, 300))
@few
def test_the_inner_row_says_the_same(outer, inner, text, cut):
    text = text.replace("▁", " ").lstrip(" ")
    row = small_tokenizer(outer)(text)["input_ids"][:cut]
    view = translation(outer, inner)
    view.update(0, row)
    assert spelled(inner, view.inner).decode() == whole_characters(spelled(outer, row))
    assert view.inner[:len(view.inner_text.prefix)] == view.inner_text.prefix


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
@given(seed=st.integers(0, 10**9))
@settings(max_examples=15, deadline=None)
def test_the_inner_row_depends_on_the_row_alone(outer, inner, seed):
    rng = random.Random(seed)
    tokenizer, view = small_tokenizer(outer), translation(outer, inner)
    row: list[int] = []
    for _ in range(12):
        length = rng.randrange(len(row) // 2 if rng.random() < 0.2 else max(0, len(row) - 6), len(row) + 1)
        text = rng.choice(LINES)[rng.randrange(40):]
        new = tokenizer(text, add_special_tokens=False)["input_ids"][:rng.randrange(60)]
        new += [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(3))]
        before, same = list(view.inner), view.update(length, new)
        row = row[:length] + new
        fresh = translation(outer, inner)
        fresh.update(0, row)
        assert view.outer == row
        assert view.inner == fresh.inner
        assert view.inner[:same] == before[:same]


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
@given(text=texts, cut=st.integers(0, 80), proposal=st.lists(st.integers(0, 999), max_size=12),
       limit=st.integers(0, 9))
@few
def test_a_translated_proposal_spells_a_prefix_of_what_was_proposed(outer, inner, text, cut, proposal, limit):
    view = translation(outer, inner)
    view.update(0, small_tokenizer(outer)(text)["input_ids"][:cut])
    proposal = [i % len(small_tokenizer(inner)) for i in proposal]
    tokens, said = view.to_outer(proposal, limit), view._said(proposal)[0]
    assert len(tokens) <= limit
    if tokens and view.outer_text.piece(tokens[-1]) is None:
        assert tokens.pop() == view.outer_text.eos
    assert all(view.outer_text.piece(token) is not None for token in tokens)
    ours = view.outer_text.spelling(tokens)
    text_begins = not view.outer or view.outer_text.piece(view.outer[-1]) is None
    if view.outer_text.adds_space and text_begins:
        ours = ours.removeprefix(b" ")
    assert not ours or said.startswith(view._pending + ours)


@pytest.mark.parametrize(("outer", "inner"), LOSSLESS)
def test_a_level_that_knows_the_text_is_nearly_always_right(outer, inner):
    text = "\n".join(LINES)
    truth = small_tokenizer(outer)(text)["input_ids"]
    drafter = wrapped(reads_ahead(inner, text), outer, inner)
    drafter.start(1, CPU)
    length, drafted, accepted = 3, 0, 0
    while length < len(truth) - 1:
        [tokens] = proposals(drafter, [truth[:length]], [6])
        right = next((i for i, (a, b) in enumerate(zip(tokens, truth[length:], strict=False)) if a != b), len(tokens))
        right = min(right, len(truth) - 1 - length)
        drafter.rollback([length + right])
        drafted, accepted, length = drafted + len(tokens), accepted + right, length + right + 1
    assert accepted >= 0.9 * drafted
    assert accepted >= 0.7 * len(truth)
    # The cache stays valid: each inner token is given to the inner level about once.
    assert drafter.inner.fed < 1.6 * len(small_tokenizer(inner)(text)["input_ids"])


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
@given(seed=st.integers(0, 10**9), batch=st.integers(1, 3), tentative=st.booleans())
@settings(max_examples=12, deadline=None)
def test_random_rollbacks_leave_what_a_fresh_drafter_has(outer, inner, seed, batch, tentative):
    rule, size = scrambled(inner), len(small_tokenizer(outer))

    def check(rows, limits, proposed):
        fresh = wrapped(rule, outer, inner)
        fresh.start(len(rows), CPU)
        assert proposed == proposals(fresh, rows, limits)

    # Ids a little beyond the tokenizer: padding rows of an embedding have no token.
    play(wrapped(rule, outer, inner), Plan(seed, batch, 6, size + 3, tentative), check)


def test_ends_of_text_go_over_both_ways():
    code, llama = small_tokenizer("code"), small_tokenizer("llama")
    view = translation("code", "llama")
    view.update(0, [*code("end")["input_ids"], code.eos_token_id, *code("new")["input_ids"]])
    assert view.inner.count(llama.eos_token_id) == 1
    assert view.inner[0] == llama.bos_token_id
    after = llama(" now", add_special_tokens=False)["input_ids"]
    assert view.to_outer([*after, llama.eos_token_id, *after], 20)[-1] == code.eos_token_id
    assert view.to_outer([llama.eos_token_id], 20) == [code.eos_token_id]
    assert view.to_outer([llama.bos_token_id], 20) == []


def test_special_tokens_without_counterpart_only_separate_texts():
    code, llama = small_tokenizer("code"), small_tokenizer("llama")
    view = translation("code", "llama")
    user = code.convert_tokens_to_ids("<|user|>")
    view.update(0, [user, *code("said")["input_ids"], user, *code("more")["input_ids"]])
    assert view.inner == [llama.bos_token_id, *llama("said", add_special_tokens=False)["input_ids"],
                          *llama("more", add_special_tokens=False)["input_ids"]]


def test_a_row_without_text_gives_the_inner_level_a_first_token():
    code = small_tokenizer("code")
    drafter = wrapped(lambda row, limit: [], "llama", "code")
    drafter.start(1, CPU)
    assert proposals(drafter, [[0]], [3]) == [[]]
    assert drafter.inner.held == [[code.eos_token_id]]


def test_incomplete_characters_are_finished_or_dropped():
    gpt2, llama = small_tokenizer("gpt2"), small_tokenizer("llama")
    row = gpt2("A 中", add_special_tokens=False)["input_ids"]  # the last character is three tokens
    view = translation("gpt2", "llama")
    view.update(0, row[:-1])
    assert spelled("llama", view.inner) == b"A "
    character = [llama.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "中".encode()]
    assert view.to_outer(character, 9) == row[-1:]
    assert view.to_outer(character[:2], 9) == []
    assert view.to_outer(llama("x", add_special_tokens=False)["input_ids"], 9) == []
    assert view.to_outer([llama.eos_token_id], 9) == []  # no end of text inside a character


def test_a_last_token_that_could_be_longer_is_dropped_unless_it_is_the_only_one():
    code, gpt2 = small_tokenizer("code"), small_tokenizer("gpt2")
    view = translation("code", "gpt2")
    view.update(0, code("x =")["input_ids"])
    proposed = gpt2(" self.cou", add_special_tokens=False)["input_ids"]
    tokens = view.to_outer(proposed, 20)
    assert " self.cou".startswith(code.decode(tokens))
    assert len(code.decode(tokens)) < len(" self.cou")
    assert len(view.to_outer(gpt2(" s", add_special_tokens=False)["input_ids"], 20)) >= 1


def test_no_work_is_asked_for_without_room_and_stats_are_the_inner_levels():
    drafter = wrapped(scrambled("llama"), "code", "llama", name="tiny")
    drafter.start(2, CPU)
    assert isinstance(drafter, Drafter)
    assert proposals(drafter, [[20], [30]], [0, 0]) == [[], []]
    assert drafter.stats.rounds == 0
    proposals(drafter, [[20], [30]], [0, 2])
    assert drafter.stats is drafter.inner.stats
    assert (drafter.stats.rounds, drafter.name, drafter.stats.name) == (1, "tiny", "tiny")


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __len__(self):
        return len(self.tokenizer)

    def __call__(self, text, **options):
        self.characters += len(text)
        return self.tokenizer(text, **options)


@pytest.mark.parametrize("piece", ["x", " word", "中", "\n"])
def test_what_a_round_encodes_does_not_grow_with_the_row(piece):
    ours, theirs = Counting(small_tokenizer("code")), Counting(small_tokenizer("llama"))
    drafter = CrossTokenizerDrafter(CachedLevel(scrambled("llama")), ours, theirs, vocab_size=len(ours),
                                    inner_vocab_size=len(theirs))
    drafter.start(1, CPU)
    row, most = ours(piece * 2000)["input_ids"], 0
    proposals(drafter, [row], [4])
    for token in row[:50]:
        ours.characters = theirs.characters = 0
        drafter.rollback([len(row)])
        row.append(token)
        proposals(drafter, [row], [4])
        most = max(most, ours.characters + theirs.characters)
    assert most < 6 * WINDOW


@pytest.mark.parametrize(("outer", "inner"),
                         [("code", "llama"), ("llama", "code"), ("gpt2", "code"), ("gpt2", "words")])
def test_common_vocabulary_is_one_to_one_and_equal_in_text(outer, inner):
    drafter = wrapped(RestrictedLevel(len(small_tokenizer(inner))), outer, inner, by_text=False)
    common = drafter.common
    allowed = common.inner_allowed.nonzero().flatten().tolist()
    assert len(allowed) == len(common) > 20
    assert len({int(common.to_outer[i]) for i in allowed}) == len(allowed)
    for i in allowed:
        token = int(common.to_outer[i])
        assert common.outer_text.piece(token) == common.inner_text.piece(i)
        assert int(common.to_inner[token]) == i
    assert int(common.to_outer[small_tokenizer(inner).eos_token_id]) == small_tokenizer(outer).eos_token_id
    assert (common.to_outer[~common.inner_allowed] == -1).all()


@pytest.mark.parametrize(("outer", "inner"), [("code", "llama"), ("llama", "code"), ("gpt2", "code")])
@given(seed=st.integers(0, 10**9), batch=st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_tokens_of_a_restricted_level_go_over_unchanged(outer, inner, seed, batch):
    level = RestrictedLevel(len(small_tokenizer(inner)))
    drafter = wrapped(level, outer, inner, by_text=False)

    def check(rows, limits, proposed):
        fresh = wrapped(RestrictedLevel(level.vocab_size), outer, inner, by_text=False)
        fresh.start(len(rows), CPU)
        draft = fresh.propose(rows, limits)
        assert [tokens[:n] for tokens, n in zip(draft.tokens.tolist(), draft.lengths, strict=True)] == proposed
        assert draft.lengths == limits
        for held, view, tokens in zip(fresh._held, fresh._views, proposed, strict=True):
            assert held[len(view.inner):] == [int(fresh.common.to_inner[token]) for token in tokens]

    play(drafter, Plan(seed, batch, 4, len(small_tokenizer(outer)) + 3), check)


def test_a_restricted_model_draws_with_the_noise_of_the_checkers_tokens():
    """Where it knows the checker's scores of the common tokens, its guesses are the checker's choices among them."""
    code, llama = small_tokenizer("code"), small_tokenizer("llama")
    scores = torch.randn(len(llama), generator=torch.Generator().manual_seed(1))
    model = ModelDrafter(TableRunner(torch.ones(1, 1)), Sampler(len(llama), seed=6), "inner")
    model.runner.logits, model._fresh = scores.expand(len(llama), -1), False
    drafter = CrossTokenizerDrafter(model, code, llama, by_text=False, vocab_size=len(code),
                                    inner_vocab_size=len(llama))
    drafter.start(2, CPU)
    rows = [code("for i in range(10): 中")["input_ids"], code("x")["input_ids"]]
    checkers = torch.full((2, 5, len(code)), float("-inf"))
    common = drafter.common.to_inner >= 0
    checkers[:, :, common] = scores[drafter.common.to_inner[common]]
    own = Sampler(len(code), seed=6)
    own.start(2)
    best = own.choose(checkers, [len(row) for row in rows], [4, 4])
    assert len(drafter._views) == 2
    assert proposals(drafter, rows, [5, 5]) == best.tolist()
    assert len({len(view.inner) - len(row) for view, row in zip(drafter._views, rows, strict=True)}) == 2


def test_common_tokens_go_over_one_to_one_and_others_by_their_text():
    code, llama = small_tokenizer("code"), small_tokenizer("llama")
    drafter = wrapped(RestrictedLevel(len(llama)), "code", "llama", by_text=False)
    drafter.start(1, CPU)
    row = code("for i in range(10): 中")["input_ids"]
    proposals(drafter, [row], [1])
    inner, common = drafter._views[0].inner, drafter.common
    assert spelled("llama", inner) == spelled("code", row)
    mapped = [int(common.to_inner[token]) for token in row if common.to_inner[token] >= 0]
    assert len(mapped) > len(row) // 2
    rest = iter(inner)
    assert all(token in rest for token in mapped)


def test_a_level_that_cannot_be_restricted_is_refused():
    with pytest.raises(TypeError, match=r"'inner' \(CachedLevel\).*allowed"):
        wrapped(scrambled("llama"), "code", "llama", by_text=False)


def test_a_level_that_ignores_its_restriction_is_named():
    level = RestrictedLevel(len(small_tokenizer("llama")))
    drafter = wrapped(level, "code", "llama", by_text=False)
    drafter.start(1, CPU)
    outside = int((~drafter.common.inner_allowed).nonzero()[5])
    level.propose = lambda rows, limits: Draft.from_lists([[outside]])
    with pytest.raises(ValueError, match=f"proposed token {outside}, outside the {len(drafter.common)} tokens"):
        drafter.propose([[20]], [1])


def test_vocabularies_that_share_nothing_are_refused():
    with pytest.raises(ValueError, match="share none"):
        CrossTokenizerDrafter(RestrictedLevel(2), small_tokenizer("code"), small_tokenizer("llama"), by_text=False,
                              vocab_size=420, inner_vocab_size=2)
