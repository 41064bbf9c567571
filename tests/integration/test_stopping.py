"""Does a row stop at the very token where stock generate would, inside an accepted block too?"""

from __future__ import annotations

import time

import pytest
import torch
from models import alone, letters, near, prompts, tiny
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_mlspec
from hf_mlspec import SpeculationConfig

TARGET = tiny(seed=2)
NEAR = near(TARGET, 0.01)
TOKENIZER = letters()
INPUTS = prompts([8])
FREE = alone(TARGET, INPUTS, max_new_tokens=40, eos_token_id=None)[0]
# Everything is accepted, in blocks of 8 and one: whatever stops a row stops it inside a block.
BLOCKS = {"assistant_models": [TARGET], "speculation_config": SpeculationConfig(8, 0.0)}
CHAINS = [
    pytest.param({"assistant_models": []}, id="alone"),
    pytest.param(BLOCKS, id="blocks"),
    pytest.param({"assistant_models": [NEAR, "early_exit:1"]}, id="model, first layers"),
    pytest.param({"assistant_models": [NEAR, "ngram"]}, id="model, table"),
]


def same(options: dict, chain: dict, inputs: dict | None = None) -> torch.Tensor:
    """Stock's ids, after asserting that the chain writes them too."""
    options = {"max_new_tokens": 40, "do_sample": False, **options}
    stock = TARGET.generate(**(inputs or INPUTS), **options)
    ours = TARGET.generate(**(inputs or INPUTS), **options, **chain)
    assert torch.equal(ours, stock)
    return stock[:, (inputs or INPUTS)["input_ids"].shape[1] :]


def at(place: int) -> int:
    """A token that is written first at or after this place."""
    return next(token for i, token in enumerate(FREE) if i >= place and token not in FREE[:i])


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("place", [0, 1, 3, 8, 9, 10, 15])
def test_end_of_sequence(chain, place):
    token = at(place)
    assert same({"eos_token_id": token}, chain)[0].tolist() == FREE[: FREE.index(token) + 1]


@pytest.mark.parametrize("chain", CHAINS)
def test_several_ends(chain):
    written = same({"eos_token_id": [at(12), at(4), 62]}, chain)
    assert written.shape[1] == FREE.index(at(4)) + 1


@pytest.mark.parametrize("chain", CHAINS)
def test_stop_strings(chain):
    for begin, end in ((1, 3), (7, 9), (9, 14)):
        text = TOKENIZER.decode(FREE[begin:end])
        options = {"stop_strings": [text, "never this"], "tokenizer": TOKENIZER, "eos_token_id": 62}
        written = same(options, chain)[0].tolist()
        assert text in TOKENIZER.decode(written)
        assert text not in TOKENIZER.decode(written[:-1])


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("length", [9, 10, 16, 17, 18, 30])
def test_max_length(chain, length):
    options = {"max_length": length, "eos_token_id": None, "do_sample": False}
    stock = TARGET.generate(**INPUTS, **options)
    assert torch.equal(TARGET.generate(**INPUTS, **options, **chain), stock)
    assert stock.shape[1] == length


@pytest.mark.parametrize("chain", CHAINS)
def test_min_new_tokens(chain):
    assert same({"eos_token_id": at(2), "min_new_tokens": 11}, chain).shape[1] >= 11


class AfterToken(StoppingCriteria):
    """Stops a row when the sum of its tokens passes a bound: no single token tells."""

    def __init__(self, bound: int):
        self.bound = bound

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, 8:].sum(dim=1) > self.bound


@pytest.mark.parametrize("chain", CHAINS)
def test_a_criterion_of_the_users(chain):
    criteria = StoppingCriteriaList([AfterToken(sum(FREE[:11]) - 1)])
    assert same({"stopping_criteria": criteria, "eos_token_id": None}, chain).shape[1] == 11


@pytest.mark.parametrize("chain", CHAINS)
def test_a_criterion_in_a_batch(chain):
    inputs = {name: value.expand(3, -1).clone() for name, value in INPUTS.items()}
    inputs["input_ids"][1, 2] = 9
    inputs["input_ids"][2, 5] = 30
    criteria = StoppingCriteriaList([AfterToken(300)])
    # With an end token, which stock needs in order to fill rows that have stopped.
    same({"stopping_criteria": criteria, "eos_token_id": 62}, chain, inputs)


def test_a_criterion_that_answers_with_a_bool():
    class Now(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] >= 13

    out = TARGET.generate(
        **INPUTS, do_sample=False, max_new_tokens=40, stopping_criteria=StoppingCriteriaList([Now()]), **BLOCKS
    )
    assert out.shape[1] == 13


def test_max_time():
    begin = time.perf_counter()
    out = TARGET.generate(**INPUTS, max_new_tokens=480, eos_token_id=None, max_time=0.05, do_sample=False, **BLOCKS)
    assert time.perf_counter() - begin < 20
    assert out.shape[1] < 8 + 480
    assert out[0, 8 : 8 + 20].tolist() == FREE[: out.shape[1] - 8][:20]


def test_tokens_behind_the_end_are_not_counted():
    token = at(4)
    TARGET.generate(**INPUTS, max_new_tokens=40, eos_token_id=token, do_sample=False, **BLOCKS)
    assert hf_mlspec.last_stats(TARGET).new_tokens == FREE.index(token) + 1
