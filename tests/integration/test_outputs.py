"""Is what generate returns what stock generate would return, and what do the counts say?"""

from __future__ import annotations

import json

import pytest
import torch
from device_path import on_cuda, rounds
from models import letters, near, prompts, tiny
from transformers import DynamicCache, pipeline
from transformers.generation import GenerateDecoderOnlyOutput

import hf_mlspec
from hf_mlspec import SpeculationConfig

__all__ = ["rounds"]

TARGET = tiny(seed=2)
NEAR = near(TARGET, 0.02)
INPUTS = prompts([8])
CHAINS = [
    pytest.param([], id="alone"),
    pytest.param([NEAR], id="model"),
    pytest.param([NEAR, "early_exit:1"], id="model, first layers"),
    pytest.param(["early_exit:1", "prompt_lookup"], id="first layers, lookup"),
]


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}], ids=str)
def test_scores_and_logits_are_stocks(chain, options):
    options = {
        **{"max_new_tokens": 20, "do_sample": False, "eos_token_id": 62, "return_dict_in_generate": True},
        **{"output_scores": True, "output_logits": True},
        **options,
    }
    inputs = prompts([8, 5])
    stock = TARGET.generate(**inputs, **options)
    ours = TARGET.generate(**inputs, **options, assistant_models=chain)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert torch.equal(ours.sequences, stock.sequences)
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(stock[name]) == 20
        for own, theirs in zip(ours[name], stock[name], strict=True):
            assert own.shape == theirs.shape
            assert own.dtype == theirs.dtype
            torch.testing.assert_close(own, theirs, rtol=0, atol=5e-6)


def test_a_row_that_stopped_has_zeros_for_scores():
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    inputs = prompts([8, 5])
    free = TARGET.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 8:].tolist()
    out = TARGET.generate(**inputs, **options, eos_token_id=free[2], pad_token_id=0, assistant_models=[NEAR])
    stop = free.index(free[2])
    assert out.scores[stop][0].any()
    assert all(not step[0].any() for step in out.scores[stop + 1 :])


def test_only_what_was_asked_for():
    plain = TARGET.generate(**INPUTS, max_new_tokens=4, assistant_models=[NEAR])
    assert isinstance(plain, torch.Tensor)
    out = TARGET.generate(**INPUTS, max_new_tokens=4, return_dict_in_generate=True, assistant_models=[NEAR])
    assert out.scores is None
    assert out.logits is None
    assert out.attentions is None


def test_outputs_are_ordinary_tensors():
    """Inference tensors could not take part in a training step."""
    out = TARGET.generate(
        **INPUTS,
        max_new_tokens=4,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        assistant_models=[NEAR],
    )
    tensors = [out.sequences, *out.scores, *out.logits]
    tensors += [t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)]
    assert not any(t.is_inference() for t in tensors)
    assert not any(p.is_inference() for p in TARGET.parameters())
    assert not any(b.is_inference() for b in TARGET.buffers())


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chat_goes_on_in_the_users_cache(chain):
    def chat(**levels) -> tuple[list, list[int]]:
        cache, lengths = DynamicCache(), []
        ids = INPUTS["input_ids"]
        for turn in range(3):
            ids = torch.cat([ids, torch.tensor([[20 + turn, 31, 12]])], dim=1)
            ids = TARGET.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, past_key_values=cache,
                eos_token_id=62, **levels,
            )  # fmt: skip
            lengths.append(cache.get_seq_length())
        keys = [layer.keys for layer in cache.layers] + [layer.values for layer in cache.layers]
        return ids.tolist(), lengths, keys

    ids, lengths, keys = chat()
    ours, own_lengths, own_keys = chat(assistant_models=chain)
    assert ours == ids
    assert own_lengths == lengths
    for own, theirs in zip(own_keys, keys, strict=True):
        torch.testing.assert_close(own, theirs)


def test_a_users_cache_saves_its_prefill():
    cache = DynamicCache()
    ids = TARGET.generate(**prompts([200]), max_new_tokens=5, past_key_values=cache, assistant_models=[])
    fed = []
    handle = TARGET.model.embed_tokens.register_forward_hook(lambda module, args, out: fed.append(args[0].shape[1]))
    TARGET.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, past_key_values=cache,
                    assistant_models=[])  # fmt: skip
    handle.remove()
    assert sum(fed) < 5


def test_a_returned_cache_goes_on_in_stock_generate():
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 62}
    out = TARGET.generate(**INPUTS, **options, return_dict_in_generate=True, assistant_models=[NEAR])
    assert out.past_key_values.get_seq_length() == out.sequences.shape[1] - 1
    mask = torch.ones_like(out.sequences)
    with_cache = TARGET.generate(out.sequences, attention_mask=mask, past_key_values=out.past_key_values, **options)
    assert torch.equal(with_cache, TARGET.generate(out.sequences, attention_mask=mask, **options))


def goes_on(target, out, mask: torch.Tensor, **options) -> None:
    """Stock generate writes the same from the returned cache as without it."""
    plain = target.generate(out.sequences, attention_mask=mask, **options)
    cache = out.past_key_values
    assert torch.equal(target.generate(out.sequences, attention_mask=mask, past_key_values=cache, **options), plain)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("ends", [[62], list(range(3, 64, 11))], ids=["together", "one by one"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_cache_of_a_batch_goes_on_in_stock_generate(chain, ends, kind):
    target = TARGET if kind == "llama" else tiny(kind, seed=2)
    inputs = prompts([8, 5, 11])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    out = target.generate(**inputs, **options, return_dict_in_generate=True, assistant_models=chain)
    new = (out.sequences[:, 11:] != 0).long()
    cache = out.past_key_values
    assert cache.get_seq_length() == 11 + new.sum(dim=1).min() - 1
    mask = torch.cat([inputs["attention_mask"], new], dim=1)
    if kind == "llama":
        seen = mask[:, : cache.get_seq_length()].bool()
        own = target(out.sequences, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        for layer, other in zip(cache.layers, own.past_key_values.layers, strict=True):
            for ours, theirs in ((layer.keys, other.keys), (layer.values, other.values)):
                theirs = theirs[:, :, : seen.shape[1]]
                torch.testing.assert_close(ours.transpose(1, 2)[seen], theirs.transpose(1, 2)[seen])
                assert not ours.transpose(1, 2)[~seen].any()
    goes_on(target, out, mask, **options)


@pytest.mark.parametrize("ends", [None, [62], list(range(3, 64, 11))], ids=["budget", "together", "one by one"])
@pytest.mark.parametrize("way", ["compiled", "captured"])
def test_the_cache_of_a_batch_comes_out_of_compiled_steps_and_captured_rounds(way, ends, rounds):
    target = tiny(seed=2, dtype=torch.float32)
    if way == "captured":
        on_cuda(target)
    inputs = prompts([8, 5, 11])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    cache = DynamicCache()
    ids = target.generate(**inputs, **options, past_key_values=cache, assistant_models=[near(target, 0.02)])
    assert bool(rounds) == (way == "captured")
    new = torch.ones_like(ids[:, 11:]) if ends is None else (ids[:, 11:] != 0).long()
    assert cache.get_seq_length() == 11 + new.sum(dim=1).min() - 1
    mask = torch.cat([inputs["attention_mask"], new], dim=1)
    own = target(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).past_key_values
    seen = mask[:, : cache.get_seq_length()].bool()
    for layer, other in zip(cache.layers, own.layers, strict=True):
        for ours, theirs in ((layer.keys, other.keys), (layer.values, other.values)):
            theirs = theirs[:, :, : seen.shape[1]]
            torch.testing.assert_close(ours.transpose(1, 2)[seen], theirs.transpose(1, 2)[seen], atol=1e-4, rtol=1e-3)
    ids, mask = (torch.cat([part[:, : seen.shape[1] + 1], torch.full((3, 2), fill)], dim=1)
                 for part, fill in ((ids, 20), (mask, 1)))  # fmt: skip
    plain = target.generate(ids, attention_mask=mask, **options, assistant_models=[])
    cached = target.generate(ids, attention_mask=mask, **options, assistant_models=[], past_key_values=cache)
    assert torch.equal(cached, plain)


def test_the_cache_of_a_padded_row_stands_where_its_sequence_does():
    inputs = prompts([8, 12])
    inputs = {name: value[:1] for name, value in inputs.items()}
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    out = TARGET.generate(**inputs, **options, return_dict_in_generate=True, assistant_models=[NEAR])
    assert out.past_key_values.get_seq_length() == 17
    goes_on(TARGET, out, torch.cat([inputs["attention_mask"], torch.ones(1, 6, dtype=torch.long)], dim=1), **options)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_batch_goes_on_in_the_users_cache(chain):
    inputs = prompts([8, 5, 11])
    ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], DynamicCache()
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": list(range(3, 64, 11)), "pad_token_id": 0}
    for _ in range(3):
        stock = TARGET.generate(ids, attention_mask=mask, **options)
        ours = TARGET.generate(
            ids, attention_mask=mask, **options, past_key_values=cache, assistant_models=chain
        )
        assert torch.equal(ours, stock)
        fewest = (ours[:, ids.shape[1] :] != 0).sum(dim=1).min()
        assert cache.get_seq_length() == ids.shape[1] + fewest - 1
        # The next turn: rows that ended earlier are padded on their left, so that no hole is in a prompt.
        width = ids.shape[1] + int(fewest)
        ids = torch.cat([ours[:, :width], torch.tensor([[20, 31]] * 3)], dim=1)
        mask = torch.cat([mask, torch.ones(3, ids.shape[1] - mask.shape[1], dtype=torch.long)], dim=1)


def test_a_batchs_cache_saves_its_prefill():
    cache, fed = DynamicCache(), []
    inputs = prompts([200, 190])
    ids = TARGET.generate(**inputs, max_new_tokens=5, eos_token_id=None, past_key_values=cache, assistant_models=[])
    handle = TARGET.model.embed_tokens.register_forward_hook(lambda module, args, out: fed.append(args[0].shape[1]))
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 5, dtype=torch.long)], dim=1)
    TARGET.generate(ids, attention_mask=mask, max_new_tokens=2, past_key_values=cache, assistant_models=[])
    handle.remove()
    assert sum(fed) < 15  # as many tokens of the longer row as the shorter one's padding


@pytest.mark.parametrize("rows", [1, 2])
def test_a_filled_cache_that_cannot_be_continued(rows):
    """What belongs to a longer text, to other rows or to another model; the cache stays as it is."""
    ids = prompts([8] * rows)["input_ids"]
    mask = torch.ones_like(ids)

    def refused(words: str, cache: DynamicCache, width: int = 8, mask: torch.Tensor = mask) -> None:
        before = cache.get_seq_length()
        with pytest.raises(ValueError, match=words):
            TARGET.generate(
                ids[:, :width], attention_mask=mask[:, :width], max_new_tokens=3, past_key_values=cache,
                assistant_models=[NEAR],
            )  # fmt: skip
        assert cache.get_seq_length() == before

    def made_by(model, rows: int = rows) -> DynamicCache:
        cache = DynamicCache()
        model(torch.full((rows, 6), 9), past_key_values=cache)
        return cache

    cache = made_by(TARGET)
    hole = mask.clone()
    hole[0, 3] = 0
    refused(r"attention_mask hides 1 of the prompt", cache, mask=hole)
    refused(r"holds 6 tokens and the prompt has 5: .*first tokens, 4 at most; crop", cache, width=5)
    refused(r"holds 6 tokens and the prompt has 6: ", cache, width=6)
    refused(r"has 3 layers and LlamaForCausalLM 2", made_by(tiny(num_hidden_layers=3)))
    refused(r"keys of layer 0 .* shape \[\d, 4, 6, 8\], and \[\d, 2, 6, 8\]", made_by(tiny(num_key_value_heads=4)))
    refused(r"shape \[\d, 2, 6, 16\], and \[\d, 2, 6, 8\]", made_by(tiny(head_dim=16)))
    refused(r"shape \[3, 2, 6, 8\], and \[\d, 2, 6, 8\]", made_by(TARGET, 3))
    refused(r"float32 on cpu, and LlamaForCausalLM computes in torch.float64", made_by(tiny(dtype=torch.float32)))
    out = TARGET.generate(ids, attention_mask=mask, max_new_tokens=3, past_key_values=cache, assistant_models=[NEAR])
    assert cache.get_seq_length() == out.shape[1] - 1


def test_pipeline():
    target = tiny(seed=2)
    generator = pipeline("text-generation", model=target, tokenizer=letters())
    options = {"max_new_tokens": 12, "do_sample": False}
    for prompt in ("Hello there", ["one prompt", "and another one"]):
        stock = generator(prompt, **options)
        assert generator(prompt, **options, assistant_models=["early_exit:1", "prompt_lookup"]) == stock


@pytest.mark.parametrize("lengths", [[9], [9, 4, 13]])
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_counts_are_consistent(lengths, threshold):
    config = SpeculationConfig(num_draft_tokens=[6, 3, 2], confidence_threshold=threshold)
    chain = [NEAR, "early_exit:1", "ngram"]
    out = TARGET.generate(
        **prompts(lengths), max_new_tokens=40, eos_token_id=None, return_dict_in_generate=True, do_sample=False,
        assistant_models=chain, speculation_config=config,
    )  # fmt: skip
    stats = out.speculation
    assert [level.name for level in stats.levels] == ["LlamaForCausalLM", "early_exit:1", "ngram"]
    assert stats.new_tokens == 40 * len(lengths)
    first = stats.levels[0]
    # Every pass of the target settles what it accepts of the draft, and one token, for each row.
    assert first.accepted + stats.row_passes == stats.new_tokens
    assert stats.tokens_per_target_pass == stats.new_tokens / stats.row_passes > 1
    for level in stats.levels:
        assert 0 <= level.accepted <= level.tested <= level.drafted
        assert level.acceptance == (level.accepted / level.tested if level.tested else 0)
        assert level.rounds > 0
    middle, last = stats.levels[1:]
    assert first.forwards >= first.rounds - 1
    assert middle.forwards >= middle.rounds - 1
    assert last.forwards == 0
    assert first.rounds <= stats.target_passes
    assert middle.rounds >= first.rounds
    within = stats.target_seconds + sum(level.seconds for level in stats.levels)
    assert 0 < within <= stats.seconds
    assert stats.seconds_outside_forwards == pytest.approx(stats.seconds - within)
    assert hf_mlspec.last_stats(TARGET) == stats
    assert json.loads(json.dumps(stats.to_dict()))["levels"][2]["name"] == "ngram"


def test_counts_of_a_call_stay_when_another_follows():
    table = hf_mlspec.NGram()
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}
    first = TARGET.generate(**INPUTS, **options, assistant_models=[NEAR, table]).speculation
    before = json.dumps(first.to_dict())
    second = TARGET.generate(**INPUTS, **options, assistant_models=[NEAR, table]).speculation
    assert json.dumps(first.to_dict()) == before
    # The second call counts itself only.
    assert second.levels[1].rounds <= second.levels[0].forwards
    assert second.new_tokens == 20


def test_without_levels_there_is_one_token_a_pass():
    TARGET.generate(**INPUTS, max_new_tokens=12, eos_token_id=None, assistant_models=[])
    stats = hf_mlspec.last_stats(TARGET)
    assert (stats.new_tokens, stats.target_passes, stats.tokens_per_target_pass, stats.levels) == (12, 12, 1.0, [])


def test_a_model_that_never_generated_has_no_counts():
    assert hf_mlspec.last_stats(tiny()) is None
