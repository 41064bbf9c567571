"""Does a runner feed what its cache lacks, and only that?"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from models import tiny

from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.modules.attention import Plan, planned, ragged_attention_on
from hf_mlspec.engines.modules.cache import RaggedCache
from hf_mlspec.engines.modules.engine import ModuleEngine, bare_forward
from hf_mlspec.speculation.checker import catch_up, roll_back

CPU = torch.device("cpu")


class Spy:
    """A model whose logits name the token they follow; what it was fed is written down."""

    config = tiny().config

    def __init__(self):
        self.fed, self.positions = [], []

    def forward(self, tokens, positions, cache, kept):
        self.fed.append(tokens.tolist())
        self.positions.append(positions.tolist())
        return tokens[..., None].float().expand(-1, -1, 64)[:, kept]


@pytest.fixture
def spy():
    return Spy()


def runner_of(spy, rows: int, **options) -> ModuleEngine:
    runner = ModuleEngine(spy, forward=spy.forward, **options)
    runner.start(rows, CPU)
    return runner


def last_tokens(logits) -> list:
    return logits[..., 0].tolist()


def test_only_what_is_missing_is_fed(spy):
    runner = runner_of(spy, 2)
    assert last_tokens(runner.feed([[5, 6], [7, 8]])) == [[6], [8]]
    assert runner.lengths == [2, 2]
    runner.feed([[5, 6, 9], [7, 8, 10]])
    assert spy.fed == [[[5, 6], [7, 8]], [[9], [10]]]
    assert spy.positions == [[[0, 1], [0, 1]], [[2], [2]]]


def test_the_last_token_is_always_scored(spy):
    runner = runner_of(spy, 1)
    runner.feed([[5, 6]])
    assert last_tokens(runner.feed([[5, 6]])) == [[6]]
    assert spy.fed[1] == [[6]]


def test_rows_of_different_lengths(spy):
    runner = runner_of(spy, 3)
    logits = runner.feed([[5, 6, 7], [8], [9, 10]])
    assert last_tokens(logits) == [[7], [8], [10]]
    assert spy.fed == [[[5, 6, 7], [8, 8, 8], [9, 10, 10]]]
    assert runner.lengths == [3, 1, 2]
    runner.feed([[5, 6, 7, 1], [8, 2], [9, 10, 3]])
    assert spy.positions[1] == [[3], [1], [2]]


def test_drafts_follow_their_rows(spy):
    runner = runner_of(spy, 2)
    logits = runner.feed([[5, 6, 7], [8]], Guess(torch.tensor([[20, 21], [30, 31]]), [2, 1]))
    assert last_tokens(logits)[0] == [7, 20, 21]
    assert last_tokens(logits)[1][:2] == [8, 30]
    assert runner.lengths == [5, 2]


def test_rollback_never_lengthens(spy):
    runner = runner_of(spy, 2)
    runner.feed([[5, 6, 7], [8, 9, 10]])
    roll_back(runner, [1, 99])
    assert runner.lengths == [1, 3]
    runner.feed([[5, 11], [8, 9, 10, 12]])
    assert spy.fed[1] == [[11], [12]]
    assert spy.positions[1] == [[1], [3]]


def test_a_follower_uses_its_leaders_cache_and_lengths(spy):
    leader = runner_of(spy, 2)
    follower = ModuleEngine(spy, forward=spy.forward, follow=leader)
    follower.start(2, CPU)
    assert follower.cache is leader.cache
    leader.feed([[5, 6], [7, 8, 9]])
    catch_up(follower)
    assert follower.lengths == [2, 3]
    follower.feed([[5, 6, 1], [7, 8, 9, 2]])
    assert leader.lengths == [2, 3]
    assert follower.cache_bytes == 0


def test_ids_and_positions_beyond_the_model_are_read_as_its_last(spy):
    runner = runner_of(spy, 2, num_embeddings=50, num_positions=4)
    runner.feed([[5, 60], [7, 8, 9, 61]])
    assert max(max(line) for line in spy.fed[0]) == 49
    runner.feed([[5, 60, 1], [7, 8, 9, 61]], Guess(torch.tensor([[1, 2], [3, 4]]), [2, 0]))
    assert max(max(line) for line in spy.positions[1]) == 3


def test_forwards_and_seconds_are_counted(spy):
    runner = runner_of(spy, 1)
    runner.feed([[5, 6]])
    runner.feed([[5, 6, 7]])
    assert runner.forwards == 2
    assert runner.seconds > 0


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_bare_forward_gives_the_models_own_bits(kind):
    model = tiny(kind, dtype=torch.float32)
    rows = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [14, 15, 16]]
    written = []
    for forward in (bare_forward(model), None):
        runner = ModuleEngine(model, forward=forward)
        runner.start(2, CPU)
        with ragged_attention_on([model]), torch.no_grad():
            first = runner.feed(rows)
            roll_back(runner, [7, 3])
            second = runner.feed([[*rows[0][:7], 20], [*rows[1], 21]], Guess(torch.tensor([[1, 2], [3, 4]]), [2, 1]))
        written.append(torch.cat([first, second], dim=1))
    assert torch.equal(*written)


def test_hooked_trained_and_other_models_keep_their_own_forward():
    model = tiny()
    assert bare_forward(model) is not None
    assert bare_forward(model.train()) is None
    assert bare_forward(model.eval()) is not None
    handle = model.model.register_forward_pre_hook(lambda *args: None)
    assert bare_forward(model) is None
    handle.remove()
    model.forward = model.forward
    assert bare_forward(model) is None
    assert bare_forward(tiny("gemma3")) is None


def test_a_caches_memory_goes_with_its_last_user():
    cache = RaggedCache(2)
    with planned(Plan([0], 3, CPU)):
        for layer in range(2):
            cache.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), layer)
    keys = weakref.ref(cache.layers[0].keys)
    gc.disable()  # a cycle would wait for the collector, and so would a GPU full of keys and values
    try:
        del cache
        assert keys() is None
    finally:
        gc.enable()
