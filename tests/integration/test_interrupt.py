"""Is a model as usable after an interrupted or failed call, and beside another thread, as before?"""

from __future__ import annotations

import threading

import pytest
import torch
from models import alone, near, prompts, tiny
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_mlspec

INPUTS = prompts([8, 5])
ONE = prompts([8])


class Bomb(LogitsProcessor, StoppingCriteria):
    """Goes off at its n-th call: a processor, a criterion and a streamer in one."""

    def __init__(self, calls: int, error: BaseException):
        self.calls, self.error = calls, error

    def tick(self):
        self.calls -= 1
        if self.calls < 0:
            raise self.error

    def __call__(self, input_ids, scores):
        self.tick()
        return scores if scores is not None else False

    def put(self, value):
        self.tick()

    def end(self): ...


def as_processor(bomb):
    return {"logits_processor": LogitsProcessorList([bomb])}


def as_criterion(bomb):
    return {"stopping_criteria": StoppingCriteriaList([bomb])}


def as_streamer(bomb):
    return {"streamer": bomb}


@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the user's own"), MemoryError()], ids=repr)
@pytest.mark.parametrize("form", [as_processor, as_criterion, as_streamer])
def test_an_interrupted_call_leaves_no_trace(form, error, calls):
    target = tiny(seed=2)
    other = near(target, 0.02)
    table = hf_mlspec.NGram()
    inputs = ONE if form is as_streamer else INPUTS
    options = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": None}
    reference = alone(target, inputs, max_new_tokens=25, eos_token_id=None)
    before = target.config._attn_implementation, other.config._attn_implementation
    chains = [[other, "early_exit:1"], ["early_exit:1", other, table]]
    for chain in chains:
        with pytest.raises(type(error)) as caught:
            target.generate(**inputs, **options, **form(Bomb(calls, error)), assistant_models=chain)
        assert caught.value is error
        assert (target.config._attn_implementation, other.config._attn_implementation) == before
    for chain in [*chains, []]:
        out = target.generate(**inputs, **options, assistant_models=chain)
        assert out[:, 8:].tolist() == reference
    assert alone(target, inputs, max_new_tokens=25, eos_token_id=None) == reference
    assert alone(other, inputs, max_new_tokens=3) is not None
    target(input_ids=INPUTS["input_ids"], labels=INPUTS["input_ids"]).loss.backward()  # it still trains


def test_two_threads_on_two_models():
    models = [tiny(seed=2), tiny("qwen3", seed=5)]
    references = [alone(model, ONE, max_new_tokens=40, eos_token_id=None) for model in models]
    check_threads([(model, [near(model, 0.05), "early_exit:1"]) for model in models], references)


def test_two_threads_on_one_model():
    model = tiny(seed=2)
    reference = alone(model, ONE, max_new_tokens=40, eos_token_id=None)
    other = near(model, 0.05)
    check_threads([(model, [other]), (model, ["early_exit:1", other])], [reference, reference])
    assert model.config._attn_implementation == other.config._attn_implementation == "sdpa"


def check_threads(calls: list, references: list) -> None:
    """Every thread writes its own reference, ten times over, while the others write theirs."""
    written: list = [[] for _ in calls]
    start = threading.Barrier(len(calls))

    def work(number: int) -> None:
        model, chain = calls[number]
        start.wait(30)
        for _ in range(10):
            out = model.generate(
                **ONE, max_new_tokens=40, do_sample=False, eos_token_id=None, assistant_models=chain
            )
            written[number].append(out[:, 8:].tolist())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert written == [[reference] * 10 for reference in references]


def test_the_rng_is_not_touched_by_greedy_decoding():
    target = tiny(seed=2)
    torch.manual_seed(4)
    state = torch.get_rng_state()
    target.generate(**INPUTS, max_new_tokens=9, do_sample=False, assistant_models=[near(target), "ngram"])
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_are_not_touched():
    target = tiny(seed=2, dtype=torch.float32)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    target.generate(**INPUTS, max_new_tokens=9, do_sample=True, assistant_models=["mxfp4", "early_exit:1"])
    after = target.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
