"""Does a row stop at the very token where stock generate would, inside an accepted block too?"""

from __future__ import annotations

import time

import pytest
import torch
from models import alone, letters, near, prompts, tiny
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

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


FOUR = prompts([8, 5, 11, 7])


class Recorded(StoppingCriteria):
    """Writes down what it is shown, and leaves the answer to `says`, given the new tokens `[batch, n]`."""

    def __init__(self, says):
        self.says, self.shown = says, []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(input_ids.tolist())
        return self.says(input_ids[:, 11:])


SAYS = {
    "a bound of its own for each row": lambda new: torch.tensor([new.shape[1] >= n for n in (20, 3, 11, 6)]),
    "the first row's word": lambda new: torch.tensor([new.shape[1] >= 4, False, False, False]),
    "what rows wrote": lambda new: new.sum(dim=1) > 150,
    "a bool for all": lambda new: new.shape[1] >= 9,
    "one for all as a tensor": lambda new: torch.tensor([new.shape[1] >= 9]),
    "any row's word": lambda new: bool((new.sum(dim=1) > 250).any()),
    "every row's word": lambda new: bool((new.sum(dim=1) > 250).all()),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("ends", [[62], list(range(3, 64, 11))], ids=["together", "one by one"])
@pytest.mark.parametrize("name", SAYS)
def test_a_criterion_is_asked_about_the_whole_batch_as_in_stock(name, ends, chain):
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    alone_, ours = Recorded(SAYS[name]), Recorded(SAYS[name])
    stock = TARGET.generate(**FOUR, **options, stopping_criteria=StoppingCriteriaList([alone_]))
    out = TARGET.generate(**FOUR, **options, stopping_criteria=StoppingCriteriaList([ours]), **chain)
    assert torch.equal(out, stock)
    assert ours.shown == alone_.shown
    written = (out[:, 11:] != 0).sum()
    assert hf_mlspec.last_stats(TARGET).new_tokens == written


def test_scores_of_a_row_that_ended_before_it_was_known():
    says = SAYS["a bound of its own for each row"]
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": 62, "pad_token_id": 0}
    out = TARGET.generate(
        **FOUR, **options, **BLOCKS, stopping_criteria=StoppingCriteriaList([Recorded(says)]),
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    counts = [sum(bool(step[r].any()) for step in out.scores) for r in range(4)]
    assert counts == [20, 3, 11, 6]


def test_an_answer_of_another_shape():
    criteria = StoppingCriteriaList([Recorded(lambda new: torch.zeros(3, dtype=torch.bool))])
    with pytest.raises(ValueError, match=r"Recorded answered with shape \[3\] for 4 rows.*one bool, or.*\[batch\]"):
        TARGET.generate(**FOUR, max_new_tokens=4, stopping_criteria=criteria, **BLOCKS)


@pytest.mark.parametrize("chain", CHAINS)
def test_criteria_of_transformers_that_a_user_passes(chain):
    end = at(6)
    criteria = StoppingCriteriaList([EosTokenCriteria(end)])
    options = {"stopping_criteria": criteria, "eos_token_id": at(2)}  # which stock generate then does not stop at
    assert same(options, chain).shape[1] == FREE.index(end) + 1
    criteria = StoppingCriteriaList([MaxLengthCriteria(8 + 13)])
    assert same({"stopping_criteria": criteria, "eos_token_id": None}, chain).shape[1] == 13


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
