"""Does a compiled decoder draft, check and count what its plain steps do, and refuse what would leave its memory?"""

from __future__ import annotations

import copy
import math
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import near, tiny

from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.rows import GROWTH
from hf_mlspec.nn.replace import direct_cast, early_exit
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.checker import Checker, roll_back
from hf_mlspec.speculation.draft import Draft, Drafter
from hf_mlspec.speculation.drafters.checked import CheckedDrafter
from hf_mlspec.speculation.drafters.model import ModelDrafter
from hf_mlspec.speculation.sampling import Sampler

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")

CPU = torch.device("cpu")
VOCAB = 64
TARGET = tiny(seed=2, dtype=torch.bfloat16)
MODELS = {
    "small": near(TARGET, 0.05),
    "cast": direct_cast(TARGET),
    "view": early_exit(TARGET, 1),
    "float32": near(TARGET, 0.05).float(),
}
_decoders: dict[str, CpuDecoder] = {}


def runner(name: str, follow: CpuEngine | None = None) -> CpuEngine:
    model = TARGET if name == "target" else MODELS[name]
    if name not in _decoders:
        _decoders[name] = CpuDecoder(model)
    return CpuEngine(model, _decoders[name], follow=follow)


def sampler(plain: bool) -> Sampler:
    """A processor that changes nothing keeps a level out of the compiled rounds."""
    return Sampler(VOCAB, warp=(lambda scores: scores) if plain else None)


def single(name: str, threshold: float, plain: bool) -> Drafter:
    drafter = ModelDrafter(runner(name), sampler(plain), name, threshold=threshold)
    assert drafter.in_engine is not plain
    return drafter


def checked(upper: str, lower: str, threshold: float, plain: bool, follows: bool = False) -> Drafter:
    above = runner(upper)
    inner = ModelDrafter(runner(lower, above if follows else None), sampler(plain), lower, threshold=threshold)
    checker = Checker(above, sampler(plain), upper, keep_logits=False)
    level = CheckedDrafter(checker, inner, num_draft_tokens=3, threshold=threshold)
    assert level._runs_in_engine([[1]], [1]) is not plain
    return level


KINDS = {
    "one model": lambda threshold, plain: single("small", threshold, plain),
    "one cast": lambda threshold, plain: single("cast", threshold, plain),
    "cast over small": lambda threshold, plain: checked("cast", "small", threshold, plain),
    "small over float32": lambda threshold, plain: checked("small", "float32", threshold, plain),
    "target over its view": lambda threshold, plain: checked("target", "view", threshold, plain, follows=True),
    "target over its cast": lambda threshold, plain: checked("target", "cast", threshold, plain, follows=True),
}
COUNTS = ("drafted", "accepted", "tested", "rounds", "forwards")
# A round: per row (how many may be drafted, how many of the drafted are kept).
rounds = st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=3), min_size=2,
                  max_size=5)  # fmt: skip


def counts(drafter: Drafter) -> list[int]:
    levels = [drafter, drafter.inner] if isinstance(drafter, CheckedDrafter) else [drafter]
    return [getattr(level.stats, name) for level in levels for name in COUNTS]


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(rounds=rounds, lengths=st.lists(st.integers(1, 12), min_size=3, max_size=3), leave=st.integers(0, 4))
def test_compiled_rounds_are_the_plain_ones(kind, threshold, rounds, lengths, leave):
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    both = [KINDS[kind](threshold, plain) for plain in (False, True)]
    for drafter in both:
        drafter.start(3, CPU)
    for number, shape in enumerate(rounds):
        if number == leave:
            rows, shape = [rows[2], rows[0]], [shape[2], shape[0]]
            for drafter in both:
                drafter.select([2, 0])
        shape = shape[: len(rows)]
        limits = [limit for limit, _ in shape]
        before = copy.deepcopy(rows)
        drafted, plain = (drafter.propose(rows, limits) for drafter in both)
        assert rows == before
        assert drafted.rows() == plain.rows()
        assert all(n <= limit for n, limit in zip(drafted.lengths, limits, strict=True))
        assert counts(both[0]) == counts(both[1])
        kept = [min(n, length) for (_, n), length in zip(shape, drafted.lengths, strict=True)]
        for drafter in both:
            drafter.rollback([len(row) + n for row, n in zip(rows, kept, strict=True)])
        more = torch.randint(3, VOCAB, (1 + number % 3,), generator=generator).tolist()
        rows = [[*row, *line[:n], *more] for row, line, n in zip(rows, drafted.rows(), kept, strict=True)]


@pytest.mark.parametrize("kind", ["one model", "cast over small", "target over its view"])
def test_a_cache_grows_without_a_trace(kind):
    row = torch.randint(3, VOCAB, (GROWTH - 5,), generator=torch.Generator().manual_seed(1)).tolist()
    drafter, fresh = KINDS[kind](0.0, False), KINDS[kind](0.0, False)
    drafter.start(2, CPU)
    drafter.propose([row, row[:9]], [3, 3])
    owner = drafter.checker.runner if isinstance(drafter, CheckedDrafter) else drafter.runner
    assert owner.cache.kv.shape[4] == GROWTH
    drafter.rollback([len(row), 9])
    grown = drafter.propose([row, row[:9]], [9, 9]).rows()
    assert owner.cache.kv.shape[4] > GROWTH
    fresh.start(2, CPU)
    assert fresh.propose([row, row[:9]], [9, 9]).rows() == grown
    assert [len(line) for line in grown] == [9, 9]


def test_score_feed_and_step_say_the_same():
    rows, guesses = [[5, 6, 7], [8], [9, 10, 11, 12]], [[20, 21], [22], []]
    scored, fed, stepped = (runner("small") for _ in range(3))
    for one in (scored, fed, stepped):
        one.start(3, CPU)
    scores = scored.score(rows, guesses, want_confidence=True, want_logits=True)
    logits = fed.feed(rows, Guess(torch.tensor([[20, 21], [22, 0], [0, 0]]), [2, 1, 0]))
    assert scored.lengths == fed.lengths == [5, 2, 4]
    assert scored.forwards == fed.forwards == 1
    flat = torch.cat([logits[0], logits[1, :2], logits[2, :1]])
    assert torch.equal(scores.logits, flat)
    assert [len(line) for line in scores.best] == [3, 2, 1]
    assert list(chain(*scores.best)) == flat.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(list(chain(*scores.confidence))), flat.softmax(-1).amax(-1))
    assert scored.score(rows, guesses).logits is None
    stepped.step(torch.tensor([[5], [5], [5]]), [1, 1, 1], [0, 0, 0], 1)
    roll_back(stepped, [0, 0, 0])
    steps = [stepped.step(torch.tensor([[t]] * 3), [1] * 3, [0] * 3, 1) for t in rows[0] + guesses[0]]
    assert all(torch.equal(step[0, 0], logits[0, j]) for j, step in enumerate(steps[2:]))
    assert stepped.lengths == [5, 5, 5]
    with pytest.raises(ValueError, match="takes whole rows"):
        stepped.step(torch.tensor([[1, 2]] * 3), [2, 1, 2], [0, 0, 0], 1)


@pytest.mark.parametrize("name", ["small", "cast"])
def test_nan_weights_are_an_error_that_names_the_level(name):
    model = copy.deepcopy(MODELS[name])
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    decoder = CpuDecoder(model)

    def level(**options) -> ModelDrafter:
        return ModelDrafter(CpuEngine(model, decoder), Sampler(VOCAB), "broken", **options)

    broken = level()
    above = CheckedDrafter(Checker(CpuEngine(model, decoder), Sampler(VOCAB), "broken", keep_logits=False),
                           single("float32", 0.0, False), num_draft_tokens=2)  # fmt: skip
    for drafter in (broken, above, level(threshold=0.5)):
        drafter.start(2, CPU)
        with pytest.raises(FloatingPointError, match=r"logits of level broken are NaN.*bfloat16"):
            drafter.propose([[4, 5], [6]], [3, 3])
    checker = Checker(CpuEngine(model, decoder), Sampler(VOCAB), "broken", keep_logits=False)
    checker.start(1, CPU)
    with pytest.raises(FloatingPointError, match="logits of broken are NaN"):
        checker.check([[4, 5]], Draft.from_lists([[7]]))


def test_nothing_lies_beyond_the_cache_or_the_rotary_tables():
    one, other = runner("small"), runner("float32")
    for level in (one, other):
        level.start(2, CPU)
        level._reserve = lambda slots: None
    row = [5] * (GROWTH - 3)
    cache = rf"row 0 grows to 257 tokens, the cache has {GROWTH} slots"
    with pytest.raises(IndexError, match=cache):
        one.draft([row, [5]], [4, 4], 0.0)
    with pytest.raises(IndexError, match=cache):
        one.score([row, [5]], [[7] * 4, []])
    with pytest.raises(IndexError, match=cache):
        one.draft_checked(other, [row, [5]], [4, 4], num_draft_tokens=2, tiny_threshold=0.0, threshold=0.0)
    assert [len(line) for line in one.draft([row, [5]], [3, 3], 0.0)] == [3, 3]
    one.start(1, CPU)
    one.cache.reserve(4096)
    positions = one.decoder.positions
    assert positions < 4096
    with pytest.raises(IndexError, match=f"the rotary tables {positions} positions"):
        one.draft([[5] * positions], [1], 0.0)


def test_a_threshold_that_is_no_number_is_refused():
    one, other = runner("small"), runner("float32")
    for level in (one, other):
        level.start(1, CPU)
    with pytest.raises(ValueError, match=r"^threshold is NaN"):
        one.draft([[5]], [3], math.nan)
    for tiny_threshold, threshold in ((math.nan, 0.0), (0.0, math.nan)):
        with pytest.raises(ValueError, match="_threshold is NaN"):
            one.draft_checked(
                other, [[5]], [4], num_draft_tokens=2, tiny_threshold=tiny_threshold, threshold=threshold
            )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda kv: kv[:, :, :, :1].contiguous(), ValueError, "the cache has shape"),
        (lambda kv: kv[:1], ValueError, "the cache has shape"),
        (lambda kv: kv[..., :4], ValueError, "the cache has shape"),
        (lambda kv: kv.transpose(3, 4), ValueError, "the cache has shape"),
        (lambda kv: kv[:, :, :1].contiguous(), ValueError, "the cache has 1 rows; got 2 rows"),
        (lambda kv: kv.float(), TypeError, "the cache is Float"),
        (lambda kv: kv.half(), TypeError, "the cache is Half"),
        (lambda kv: kv.to("meta"), ValueError, "the cache has shape"),
    ],
)
def test_a_cache_of_another_shape_is_refused(change, error, words):
    one = runner("small")
    one.start(2, CPU)
    one.cache.kv = change(one.cache.kv)
    for call in (lambda: one.score([[5], [6]], [[], []]), lambda: one.draft([[5], [6]], [2, 2], 0.0)):
        with pytest.raises(error, match=words):
            call()
