"""Does the comparison find every difference, say how close it was, and count what it compared?"""

from __future__ import annotations

import json
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from hf_mlspec.integration.compare import Comparison, Difference, Item, _Run, first_difference
from hf_mlspec.integration.costs import probe

PROMPTS = ["def area(radius):", "a", "The quick brown fox jumps over the lazy dog, and", "x = [1, 2"]


@pytest.fixture(scope="module")
def model(saved_model):
    return AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(saved_model):
    return AutoTokenizer.from_pretrained(saved_model)


@pytest.mark.parametrize(("expected", "got", "position"), [
    ([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2),
    ([], [], None), ([], [4], 0), ([9], [4], 0)])
def test_first_difference(expected, got, position):
    assert first_difference(expected, got) == position


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("reference", ["ours", "stock"])
def test_a_chain_equals_its_target(model, tokenizer, batch_size, reference):
    found = hf_mlspec.compare(model, tokenizer, PROMPTS, ["mxfp4"], max_new_tokens=12, batch_size=batch_size,
                              reference=reference)
    assert found.differences == []
    assert found.identical == len(PROMPTS)
    assert found.tokens_compared == sum(len(item.ids) for item in found.items) > 0
    assert [item.prompt_tokens for item in found.items] == [len(prompt) for prompt in PROMPTS]
    assert found.speculation.levels[0].drafted > 0
    assert found.speculation.new_tokens == found.tokens_compared
    assert found.speculation.target_cache_bytes > 0
    assert found.chain_seconds > 0
    assert found.alone_seconds > 0


def test_the_reference_is_what_stock_generate_writes(model, tokenizer):
    found = hf_mlspec.compare(model, tokenizer, PROMPTS, ["prompt_lookup"], max_new_tokens=10, reference="stock")
    for prompt, item in zip(PROMPTS, found.items, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        written = model.generate(**inputs, max_new_tokens=10, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert item.reference_ids == written.tolist()


def test_a_difference_is_located_and_measured(model, tokenizer):
    true = hf_mlspec.compare(model, tokenizer, PROMPTS, [], max_new_tokens=8)
    references = [list(item.ids) for item in true.items]
    references[2][5] = (references[2][5] + 1) % 256
    found = hf_mlspec.compare(model, tokenizer, PROMPTS, ["mxfp4"], max_new_tokens=8, reference_ids=references)
    assert [item.index for item in found.items if item.difference] == [2]
    assert found.identical == 3
    assert found.alone_seconds == 0.0
    assert found.tokens_compared == sum(len(item.ids) for item in true.items) - len(references[2]) + 6
    difference = found.differences[0]
    assert (difference.position, difference.expected, difference.got) == (5, references[2][5], true.items[2].ids[5])
    prefix = tokenizer(PROMPTS[2]).input_ids + true.items[2].ids[:5]
    with torch.no_grad():
        best = model(torch.tensor([prefix])).logits[0, -1].topk(2)
    assert [token for token, _ in difference.top2] == best.indices.tolist()
    assert difference.top2[0][0] == difference.got
    assert difference.gap == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-4)
    assert difference.gap_float64 == pytest.approx(difference.gap, abs=1e-3)
    assert difference.gap_float64 != difference.gap


def test_a_row_that_ends_early_is_compared_up_to_its_end(model, tokenizer):
    whole = hf_mlspec.compare(model, tokenizer, PROMPTS, [], max_new_tokens=8)
    end = whole.items[0].ids[3]
    model.generation_config.eos_token_id, old = [257, end], model.generation_config.eos_token_id
    try:
        found = hf_mlspec.compare(model, tokenizer, PROMPTS, ["mxfp4"], max_new_tokens=8, batch_size=4)
    finally:
        model.generation_config.eos_token_id = old
    expected = whole.items[0].ids
    assert found.items[0].ids == expected[: expected.index(end) + 1]
    assert found.differences == []


def test_every_item_is_reported_twice(model, tokenizer):
    seen = []
    hf_mlspec.compare(model, tokenizer, PROMPTS[:2], ["prompt_lookup"], max_new_tokens=4,
                      on_item=lambda item, comparison: seen.append((item.index, item.reference_ids is None)))
    assert seen == [(0, True), (1, True), (0, False), (1, False)]


def test_showing_the_text_is_no_part_of_the_seconds(model, tokenizer):
    class SlowScreen:
        calls = 0

        def put(self, value):
            self.calls += 1
            time.sleep(0.2)

        def end(self):
            time.sleep(0.2)

    screen = SlowScreen()
    started = time.perf_counter()
    found = hf_mlspec.compare(model, tokenizer, PROMPTS[:1], ["prompt_lookup"], max_new_tokens=6, streamer=screen)
    assert screen.calls >= 2
    assert found.chain_seconds < time.perf_counter() - started - 0.2 * (screen.calls + 1)


def test_ties_are_told_from_differences():
    def item(index: int, gap: float) -> Item:
        return Item(index, 3, [1], [2], Difference(0, 2, 1, [(1, 0.0), (2, 0.0)], 0.0, [(2, gap), (1, 0.0)], gap))

    found = Comparison([item(0, 1e-7), item(1, 1e-2)])
    assert [d.gap_float64 for d in found.beyond_ties(1e-5)] == [1e-2]
    assert len(found.beyond_ties(0.0)) == 2
    assert len(Comparison([item(0, float("nan"))]).beyond_ties(1e9)) == 1


def test_the_result_is_json(model, tokenizer):
    found = hf_mlspec.compare(model, tokenizer, PROMPTS[:1], ["mxfp4"], max_new_tokens=4, reference_ids=[[1, 2, 3, 4]])
    told = json.loads(json.dumps(found.to_dict()))
    assert (told["prompts"], told["identical"], told["different"]) == (1, 0, 1)
    assert told["speculation"]["levels"][0]["name"] == "mxfp4"
    assert told["items"][0]["difference"]["expected"] in (1, 2, 3, 4)


def test_a_long_prompt_is_named_before_anything_is_decoded(model, tokenizer, monkeypatch):
    monkeypatch.setattr(type(model), "generate", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="prompt 2 of 3: 509 prompt tokens and up to 8 new ones exceed the 512"):
        hf_mlspec.compare(model, tokenizer, ["a", "b", "c" * 509], ["mxfp4"], max_new_tokens=8)


@pytest.mark.parametrize(("change", "message"), [
    ({"prompts": []}, "no prompts"), ({"prompts": "a text"}, "no prompts"), ({"prompts": ["a", ""]}, "prompt 1 of 2"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"), ({"batch_size": 0}, "batch_size is 0"),
    ({"reference": "theirs"}, "reference is 'theirs'"), ({"reference_ids": []}, "0 reference_ids for 1 prompts"),
    ({"streamer": object(), "batch_size": 2}, "batch_size is 2")])
def test_bad_input_is_named(model, tokenizer, change, message):
    asked = {"prompts": ["a"], "levels": [], "max_new_tokens": 2} | change
    with pytest.raises(ValueError, match=message):
        hf_mlspec.compare(model, tokenizer, **asked)


@pytest.mark.plans
def test_costs_are_measured_before_the_clock_runs(saved_model, tokenizer, cache, monkeypatch):
    """On a machine that knows none, by the answer that warms up."""
    engines, measured, write = [], probe.measured, _Run.write_with_chain

    def seen(engine, **how):
        engines.append(engine)
        return measured(engine, **how)

    def written(self, *given):
        before = len(engines)
        write(self, *given)
        assert before == len(engines) > 0

    monkeypatch.setattr(probe, "measured", seen)
    monkeypatch.setattr(_Run, "write_with_chain", written)
    fresh = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.float32).eval()
    hf_mlspec.compare(fresh, tokenizer, PROMPTS[:1], ["mxfp4"], max_new_tokens=12)
