"""Does a batch of rows of different lengths hold and see what every row alone would?"""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ARCHITECTURES, near, prompts, tiny
from transformers import DynamicCache

from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.modules.attention import Plan, attend, planned, ragged_attention_on
from hf_mlspec.engines.modules.cache import RaggedCache
from hf_mlspec.engines.modules.engine import ModuleEngine, bare_forward
from hf_mlspec.nn.replace import early_exit
from hf_mlspec.speculation.checker import Checker, roll_back
from hf_mlspec.speculation.drafters.checked import CheckedDrafter
from hf_mlspec.speculation.drafters.model import ModelDrafter
from hf_mlspec.speculation.loop import decode
from hf_mlspec.speculation.sampling import Sampler

CPU = torch.device("cpu")
MODELS: dict = {}


def model_of(kind: str):
    if kind not in MODELS:
        MODELS[kind] = tiny(kind)
    return MODELS[kind]


def alone(model, row: list[int]) -> torch.Tensor:
    """Logits after every token of one row, from the model's own forward without a cache."""
    return model(input_ids=torch.tensor([row]), use_cache=False).logits[0]


# A round: per row (guesses, how many of them turn out true).
rounds = st.lists(
    st.lists(st.integers(0, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=3, max_size=3),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 14), min_size=3, max_size=3), rounds=rounds, seed=st.integers(0, 99))
def test_every_row_of_a_batch_is_scored_as_if_alone(kind, lengths, rounds, seed):
    model = model_of(kind)
    # Norms, and where attention has a soft cap or sinks its softmax too, are float32 in a float64 model.
    tolerance = 2e-5 if kind in ("gemma2", "gpt_oss") else 2e-6
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]
    runner = ModuleEngine(model, forward=bare_forward(model))
    runner.start(len(rows), CPU)
    with ragged_attention_on([model]), torch.no_grad():
        scored = []
        for shape in rounds:
            drafted = [n for n, _ in shape]
            guesses = torch.randint(3, 64, (len(rows), max(drafted)), generator=generator)
            logits = runner.feed(rows, Guess(guesses, drafted) if max(drafted) else None)
            scored += [
                (row + guesses[r, :n].tolist(), logits[r, : n + 1], n)
                for r, (row, n) in enumerate(zip(rows, drafted, strict=True))
            ]
            for r, (_, true) in enumerate(shape):
                rows[r] = rows[r] + guesses[r, :true].tolist() + [int(generator.initial_seed() + r) % 61 + 3]
            roll_back(runner, [len(row) - 1 for row in rows])
    for row, logits, n in scored:
        torch.testing.assert_close(logits, alone(model, row)[-n - 1 :], rtol=0, atol=tolerance)


def test_select_keeps_rows_in_the_order_asked_for():
    model = tiny()
    rows = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    runner = ModuleEngine(model)
    runner.start(3, CPU)
    with ragged_attention_on([model]), torch.no_grad():
        runner.feed(rows)
        runner.select([2, 0])
        kept = [[*rows[2], 20], [*rows[0], 21]]
        logits = runner.feed(kept)
    for row, line in zip(kept, logits, strict=True):
        torch.testing.assert_close(line[-1], alone(model, row)[-1])


def test_lanes_grow_beyond_their_capacity():
    model = tiny(max_position_embeddings=2048)
    row = torch.randint(3, 64, (900,), generator=torch.Generator().manual_seed(0)).tolist()
    runner = ModuleEngine(model, capacity=1)
    runner.start(1, CPU)
    sizes, logits = {}, {}
    with ragged_attention_on([model]), torch.no_grad():
        for length in (1, 256, 257, 600, 900):
            logits[length] = runner.feed([row[:length]])[0, -1]
            sizes[length] = runner.cache.layers[0].keys.shape[2]
    for length, line in logits.items():
        torch.testing.assert_close(line, alone(model, row[:length])[-1])
    assert sizes == {1: 256, 256: 256, 257: 512, 600: 768, 900: 1280}
    assert runner.cache.nbytes == 2 * 2 * 1280 * 2 * 8 * 8  # layers, keys and values, slots, heads, dim, bytes


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_plain_cache_goes_in_and_comes_out(kind):
    model = tiny(kind)
    row = prompts([12])["input_ids"]
    with torch.no_grad():
        reference = model(input_ids=row, use_cache=True).past_key_values
        cache, out = RaggedCache(2), DynamicCache()
        cache.load(((layer.keys, layer.values) for layer in reference.layers), 12)
        for begin, end in ((0, 5), (5, 12)):
            for index, (keys, values) in enumerate(cache.row(0, begin, end)):
                out.update(keys[None], values[None], index)
    for layer, other in zip(reference.layers, out.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)


class Levels:
    """A target and levels that write into its cache."""

    def __init__(self, dtype=torch.float64):
        self.target = tiny(dtype=dtype)
        self.top = self.runner(self.target, None)
        self.models = [self.target]

    def runner(self, model, follow):
        return ModuleEngine(model, follow=follow, forward=bare_forward(model))

    def model_drafter(self, model, follow):
        self.models.append(model)
        return ModelDrafter(self.runner(model, follow), Sampler(64), "draft")

    def checked(self, model, follow, make_inner, count=3):
        self.models.append(model)
        runner = self.runner(model, follow)
        return CheckedDrafter(
            Checker(runner, Sampler(64), "middle"), make_inner(runner), num_draft_tokens=count, threshold=0.0
        )


def shared_chains() -> dict:
    """Name -> a chain of levels in the target's cache, over a `Levels`."""
    return {
        "one level": lambda s: s.model_drafter(near(s.target), s.top),
        "first layers": lambda s: s.model_drafter(early_exit(s.target, 1), s.top),
        "three levels": lambda s: s.checked(
            near(s.target), s.top, lambda runner: s.model_drafter(early_exit(s.target, 1), runner)
        ),
        "a level of its own below": lambda s: s.checked(
            near(s.target), s.top, lambda runner: s.model_drafter(near(s.target, 0.1), None)
        ),
    }


@pytest.mark.parametrize("name", shared_chains())
def test_after_each_round_the_targets_cache_holds_the_targets_values_only(name):
    levels = Levels()
    below = shared_chains()[name](levels)
    assert below.follows
    top = Checker(levels.top, Sampler(64), "target")
    rows = [line[-n:] for line, n in zip(prompts([4, 9, 6])["input_ids"].tolist(), (4, 9, 6), strict=True)]
    top.start(len(rows), CPU)
    states: list[list] = []
    with torch.no_grad():
        with ragged_attention_on(levels.models):
            decode(
                top,
                below,
                rows,
                [20, 30, 25],
                num_draft_tokens=5,
                stop=lambda number, row, tokens: (len(tokens), False),
                emit=lambda numbers, kept, verdict: states.append(snapshot(levels.top, numbers, rows)),
                device=CPU,
            )
        for length, row, lanes in (entry for state in states for entry in state):
            reference = levels.target(input_ids=torch.tensor([row[:length]])).past_key_values
            for layer, (keys, values) in zip(reference.layers, lanes, strict=True):
                torch.testing.assert_close(keys, layer.keys[0])
                torch.testing.assert_close(values, layer.values[0])
    assert sum(map(len, states)) > 20
    assert 0 < below.stats.accepted < below.stats.drafted


def snapshot(runner: ModuleEngine, numbers: list[int], rows: list[list[int]]) -> list:
    """Per active row: tokens the cache holds truly, the row, and its keys and values."""
    entries = []
    for place, number in enumerate(numbers):
        length = runner.lengths[place]
        assert length == len(rows[number]) - 1
        lanes = [
            (lane.keys[place, :, :length].clone(), lane.values[place, :, :length].clone())
            for lane in runner.cache.layers
        ]
        entries.append((length, list(rows[number]), lanes))
    return entries


def test_attention_outside_of_a_plan_names_the_cause():
    model = tiny()
    with ragged_attention_on([model]), pytest.raises(RuntimeError, match=r"same model generates.*another thread"):
        model(input_ids=torch.tensor([[5, 6, 7]]))
    model(input_ids=torch.tensor([[5, 6, 7]]))


@pytest.mark.parametrize("extra", [{"position_bias": 1}, {"attention_mask": torch.zeros(1, 1, 3, 3)}])
def test_attention_refuses_what_it_would_leave_out(extra):
    model = tiny()
    states = torch.zeros(1, 4, 3, 8)
    refusal = pytest.raises(ValueError, match=r"LlamaAttention adds .* without assistant_models")
    with planned(Plan([0], 3, CPU)), refusal:
        attend(model.model.layers[0].self_attn, states, states, states, **extra)


def test_a_window_that_an_architecture_leaves_to_its_mask_is_found():
    model = tiny("mistral")  # window 7
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 12, 8, dtype=torch.float64).unbind(0)
    layer = model.model.layers[0].self_attn
    with planned(Plan([0], 12, CPU)):
        said = attend(layer, query, key, value, sliding_window=7)[0]
        unsaid = attend(layer, query, key, value)[0]
        whole = attend(layer, query, key, value, sliding_window=None)[0]
    assert torch.equal(said, unsaid)
    assert not torch.allclose(said, whole)


def test_the_last_thread_out_restores_the_model():
    model = tiny()
    before = model.config._attn_implementation
    inside, leave = threading.Event(), threading.Event()

    def other():
        with ragged_attention_on([model]):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with ragged_attention_on([model]):
        thread.start()
        assert inside.wait(10)
    assert model.config._attn_implementation == "mlspec_ragged"
    leave.set()
    thread.join()
    assert model.config._attn_implementation == before
