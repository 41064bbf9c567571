"""Is a state after a check that of the tokens that were accepted, fed one by one, whatever came between?"""

from __future__ import annotations

import pytest
import torch
from hybrids import HYBRIDS, hybrid
from models import tiny

from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.modules.stateful import StatefulEngine
from hf_mlspec.engines.modules.states import Kept, keeps_state, restored

ROW, MORE = [5, 9, 33, 17, 8], [11, 40, 7, 22]
CPU = torch.device("cpu")
NAMES = ["Qwen3_5ForCausalLM", "Mamba2ForCausalLM", "Lfm2ForCausalLM", "RwkvForCausalLM"]


def started(model, batch=1, follow=None):
    engine = engine_of(model, name="modules")
    assert type(engine) is StatefulEngine
    engine.follow = follow
    engine.start(batch, CPU)
    return engine


def guess(*rows):
    width = max(map(len, rows))
    return Guess(torch.tensor([list(row) + [0] * (width - len(row)) for row in rows]), [len(row) for row in rows])


def one_by_one(model, tokens, prompt=5):
    """Logits of every token from the prompt's last on, in an engine of their own."""
    engine = started(model)
    return torch.cat([engine.feed([tokens[:n]])[0] for n in range(prompt, len(tokens) + 1)])


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_which_models_keep_a_state(name):
    assert keeps_state(hybrid(name))


def test_keys_and_values_are_no_state():
    assert not keeps_state(tiny())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_check_has_the_bits_of_single_steps(name, dtype):
    model = hybrid(name).to(dtype)
    checked = started(model).feed([ROW], guess(MORE))[0]
    assert torch.equal(checked, one_by_one(model, ROW + MORE))


@pytest.mark.parametrize("accepted", range(len(MORE) + 1))
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_state_after_a_check_is_that_of_accepted_tokens(name, accepted):
    model, engine = hybrid(name), None
    engine = started(model)
    engine.feed([ROW], guess(MORE))
    engine.lengths = [len(ROW) + accepted]
    row = [*ROW, *MORE[:accepted], 50]
    found = engine.feed([row], guess([3, 60]))[0]
    assert torch.equal(found, one_by_one(model, [*row, 3, 60])[accepted + 1 :])


@torch.no_grad()
def test_many_rounds_without_an_accepted_token():
    model = hybrid("Qwen3_5ForCausalLM")
    engine, row = started(model), list(ROW)
    expected = one_by_one(model, [*ROW, *range(20, 32)])
    for step, token in enumerate(range(20, 32)):
        found = engine.feed([row], guess([1, 2, 3]))[0]
        assert torch.equal(found[0], expected[step])
        engine.lengths = [len(row)]
        row = [*row, token]


@torch.no_grad()
def test_rows_do_not_see_each_other():
    model = hybrid("Qwen3_5ForCausalLM")
    rows = [ROW, ROW[2:], [9]]
    engine = started(model, 3)
    found = engine.feed(rows, guess(MORE, MORE[:1], []), [True, True, True])
    for r, (row, more) in enumerate(zip(rows, (MORE, MORE[:1], []), strict=True)):
        alone = one_by_one(model, row + more, len(row))
        assert torch.equal(found[r, : len(more) + 1], alone)
    engine.lengths = [len(ROW), len(ROW) - 2, 1]
    engine.select([2, 0])
    engine.forget(0)
    engine.admit(1)
    rows = [[4, 4, 6], [*ROW, 7], [12, 3]]
    found = engine.feed(rows, None, [True, False, True])
    assert engine.lengths == [3, len(ROW), 2]
    assert torch.equal(found[0], one_by_one(model, rows[0], 3))
    assert torch.equal(found[2], one_by_one(model, rows[2], 2))
    assert torch.equal(engine.feed([rows[0], rows[1], rows[2]])[1], one_by_one(model, rows[1])[1:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("passes", [0, 1, 3])
@torch.no_grad()
def test_a_check_that_was_interrupted(name, passes, monkeypatch):
    model = hybrid(name)
    engine = started(model)
    engine.feed([ROW])
    own, left = engine._forward, [passes]

    def interrupted(*given):
        made = own(*given)  # states are written in place before the error
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return made

    engine._forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.feed([[*ROW, 50]], guess(MORE))
    engine._forward = own
    assert torch.equal(engine.feed([[*ROW, 50]], guess([3]))[0], one_by_one(model, [*ROW, 50, 3])[1:])


@torch.no_grad()
def test_a_level_goes_back_by_more_rounds_than_there_are_copies():
    model = hybrid("Qwen3_5ForCausalLM")
    engine, row = started(model), list(ROW)
    for token in range(20, 30):
        engine.feed([row], guess([1, 2]))
        engine.lengths = [len(row)]
        row = [*row, token]
    engine.lengths = [len(ROW) + 1]
    row = [*ROW, 20, 44]
    assert torch.equal(engine.feed([row])[0], one_by_one(model, row)[2:])


@torch.no_grad()
def test_a_follower_begins_with_its_leaders_state():
    model = hybrid("Qwen3_5ForCausalLM")
    leader = started(model)
    follower = started(model, follow=leader)
    leader.feed([ROW], guess(MORE))
    leader.lengths = [len(ROW) + 2]
    row = [*ROW, *MORE[:2], 50]
    follower.lengths = list(leader.lengths)
    forwards = []
    follower._forward = lambda *given, own=follower._forward: forwards.append(given[1]) or own(*given)
    found = follower.feed([row])[0]
    assert forwards == [len(row) - 1]  # nothing of the row was run again by the follower
    assert torch.equal(found, one_by_one(model, row)[3:])
    follower.step(torch.tensor([[3]]), [1], [0], 1)
    assert torch.equal(leader.feed([row])[0], found)  # what the follower drafted is not in its leader's state


@torch.no_grad()
def test_a_copy_is_not_what_comes_of_its_states():
    model = hybrid("Qwen3_5ForCausalLM")
    engine = started(model)
    engine.feed([ROW])
    states, _ = engine.cache.rows[0].states
    kept = Kept.of(states, len(ROW))
    before = [tensor.clone() for layer in states.layers[:1] for tensor in layer.recurrent_states.values()]
    engine.feed([[*ROW, 3]])
    back = restored(kept, engine.cache.rows[0].states[0])
    assert torch.equal(back.layers[0].recurrent_states[0], before[0])
    assert back.layers[1].keys.shape[2] == len(ROW)
    assert 0 < kept.nbytes < kept.whole_bytes


@torch.no_grad()
def test_a_length_that_was_never_fed():
    engine = started(hybrid("Qwen3_5ForCausalLM"))
    engine.lengths = [4]
    with pytest.raises(RuntimeError, match="row 0 is to go on behind 4 tokens, and its state is of 0"):
        engine.feed([ROW])


def test_no_format_for_a_state():
    from hf_mlspec.formats import cache_format

    with pytest.raises(ValueError, match="Qwen3_5ForCausalLM keeps a state"):
        engine_of(hybrid("Qwen3_5ForCausalLM"), name="modules").keep_in(cache_format("int8", "draft_cache"))
